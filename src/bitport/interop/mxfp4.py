"""MXFP4 of gpt-oss (``quant_method: mxfp4``): only the experts. For E stacked matrices [N, K] in blocks of 32::

    <experts>.gate_up_proj_blocks uint8 [E, N, K/32, 16]     two e2m1 codes per byte, the even one low
    <experts>.gate_up_proj_scales uint8 [E, N, K/32]         e8m0

    value = e2m1(code) * 2^(scale - 127)

The model has the parameter ``<experts>.gate_up_proj`` as [E, K, N]. Inputs are not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError
from bitport.interop import codec
from bitport.interop.checks import E8M0, POWERS, Stored
from bitport.interop.codec import Described, WeightNames, check_complete
from bitport.numerics import Quantized
from bitport.schemes import PRESETS, preset
from bitport.tensor import QTensor, from_parts

BYTES = 16
"""Bytes per block of 32 codes."""
BLOCKS, SCALES = "_blocks", "_scales"
BOTH = ("gate_up_proj", "down_proj")
FORMAT = PRESETS["mxfp4"].weight


class Reader(codec.Reader):
    known = ("quant_method", "modules_to_not_convert", "dequantize")

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = {}
        for name, it in held.items():
            if name.endswith((BLOCKS, SCALES)) and it.dtype in POWERS:
                parameter = name.removesuffix(BLOCKS).removesuffix(SCALES)
                parts = {"blocks": parameter + BLOCKS, "scales": parameter + SCALES}
                check_complete(name, parts.values(), held)
                found[parameter] = WeightNames(parameter, parts)
        return list(found.values())

    def read(self, weight: Stored) -> Tensor:
        blocks = weight.expect("blocks", (torch.uint8,), (None, None, None, BYTES))
        experts, n, groups, _ = blocks.shape
        scales = weight.expect("scales", POWERS, (experts, n, groups))
        parts = Quantized(blocks.flatten(-2).contiguous(), scales.contiguous().view(E8M0))
        shape = (experts, 2 * BYTES * groups, n)
        return from_parts(parts, preset("mxfp4-wo"), shape=shape, dtype=self.dtype, transposed=True)


class Writer(codec.Writer):
    """Writes experts of gpt-oss only: programs that read this format look for no others."""

    name = "mxfp4"

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def refuses(self, q: Described) -> str | None:
        last = q.name.rpartition(".")[2]
        if q.kind != "experts" or len(q.shape) != 3 or not q.transposed or last not in BOTH:
            return (
                f"it holds {' and '.join(BOTH)} of stacked experts as gpt-oss has them, [experts, K, N], and this is a "
                f"weight of the kind {q.kind!r}, {list(q.shape)}"
            )
        fmt = q.scheme.weight
        if not codec.same_numbers(fmt, FORMAT) or q.scheme.act:
            return f"it holds the scheme mxfp4-wo alone, not {q.scheme}"
        if extra := codec.no_place(q, "it"):
            return extra
        if q.shape[1] % FORMAT.block[1]:
            return f"it has whole blocks of {FORMAT.block[1]} columns, and {q.shape[1]} do not divide into these"
        return None

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        self.written.add(name)
        return {name + BLOCKS: q.qdata.unflatten(-1, (-1, BYTES)), name + SCALES: q.scale.view(torch.uint8)}

    def config(self, left: list[str]) -> dict[str, Any]:
        for module in {name.rpartition(".")[0] for name in self.written}:
            if lost := [each for each in BOTH if f"{module}.{each}" not in self.written]:
                raise ArgumentError(
                    f"{module}: {lost[0]} is not quantized; in mxfp4 all experts of a module are quantized, or none"
                )
        return {"quant_method": self.name, "modules_to_not_convert": left}
