"""Exported programs in torch's own ops, for runtimes that support no others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bitport.export.trace import Method, exported
from bitport.ops import decompositions
from bitport.tensor import QTensor

SHIFTS = {
    torch.ops.aten.__rshift__.Scalar: lambda x, places: torch.div(x, 1 << places, rounding_mode="floor"),
    torch.ops.aten.__lshift__.Scalar: lambda x, places: x * (1 << places),
}
"""Of integers. torch's core set has none, and its own table does not decompose them."""


def decomposed(
    module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None, *, core: bool = True
) -> torch.export.ExportedProgram:
    """``module(*args)`` exported by torch.export, with weights in the canonical layout and bitport's ops decomposed
    into torch's. ``core``: decompose torch's ops too, into its core set, to which 8-bit floats add ``view(dtype)``, and
    float4 inputs ``signbit``."""
    table = decompositions()
    if core:
        table = {**torch.export.default_decompositions(), **SHIFTS, **table}
    program = exported(Method(_plain(module), args, dynamic_shapes))
    with torch.no_grad():
        return program.run_decompositions(table)


def _plain(module: nn.Module) -> nn.Module:
    """A copy of the module with every quantized weight in the canonical layout, sharing all other tensors."""
    kept: dict[int, Any] = {}
    for value in [*module.parameters(), *module.buffers()]:
        plain = isinstance(value, QTensor) and value.bits_layout != "plain"
        kept[id(value)] = nn.Parameter(value.to_layout("plain"), requires_grad=False) if plain else value  # type: ignore[attr-defined]
    return copy.deepcopy(module, kept)
