"""The result of explain(): which kernel runs each layer, per number of rows, and why no faster one does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitport.layouts.base import asked
from bitport.ops import Decision, decide
from bitport.ops.product import operand
from bitport.ops.select import GENERIC
from bitport.report.text import table
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class LayerExplanation:
    """One quantized weight, and the kernel for each number of input rows."""

    name: str
    scheme: str
    layout: str
    device: str
    op: str
    decisions: dict[int, Decision]
    """Number of rows -> decision."""
    note: str = ""
    """Why the weight may be used otherwise."""
    layouts: tuple[tuple[str, str], ...] = ()
    """Layouts that the device has for its kernels, and why each refuses the weight; given where it is plain and left to
    the generic kernel."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which kernel computes each quantized layer; printed, a table. ``rows``: the numbers of input rows it was asked
    for."""

    layers: tuple[LayerExplanation, ...]
    rows: tuple[int, ...]

    def to_json(self) -> str:
        """All fields, including those of the layers, as JSON text."""
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        """One line per group of layers with the same kernels, then the refusals."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for layer in self.layers:
            kernels = tuple(layer.decisions[m].kernel for m in self.rows)
            refused = tuple(dict.fromkeys(r for m in self.rows for r in layer.decisions[m].refused))
            key = (layer.scheme, layer.layout, layer.device, layer.op, kernels, refused, layer.note, layer.layouts)
            groups.setdefault(key, []).append(layer.name)
        header = ("weights", "scheme", "layout", "device", "op", *(f"{m} rows" for m in self.rows))
        body, notes = [], []
        for (scheme, layout, device, op, kernels, refused, note, others), names in groups.items():
            label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            body.append((label, scheme, layout, device, op, *kernels))
            if op == "dequantize":
                notes.append(f"{label}: dequantized on every call; PyTorch computes the convolution")
            notes += [f"{label}: {note}"] if note else []
            notes += [f"{label}: {kernel} refused: {reason}" for kernel, reason in refused]
            notes += [f"{label}: layout {other} refused: {reason}" for other, reason in others]
        return "\n".join([table(header, body), *notes]) if body else "no quantized weight in this model"

    __repr__ = __str__  # shown as the value of a notebook cell


def explain_layer(name: str, kind: str, q: QTensor, rows: Sequence[int], note: str = "") -> LayerExplanation:
    op = _op(q, kind)
    decisions = {m: decide(op, *_arguments(op, q, m)) for m in rows}
    left = q.bits_layout == "plain" and any(each.kernel == GENERIC and each.refused for each in decisions.values())
    arrived = asked(q.qdata.device, q.matrix, q.parts, q.scheme.act) if left else ()
    refused = tuple((layout.name, reason) for layout, reason in arrived if reason is not None)
    return LayerExplanation(name, str(q.scheme), q.bits_layout, str(q.qdata.device), op, decisions, note, refused)


def _op(q: QTensor, kind: str) -> str:
    if kind == "embedding":
        return "embedding"
    if kind == "conv":
        return "dequantize"
    if q.batched:  # inputs with a static scale are rounded before the matmul
        return "dyn_grouped_linear" if q.scheme.act and q.act_scale is None else "grouped_linear"
    return "dyn_linear" if q.scheme.act else "linear"


def _arguments(op: str, q: QTensor, m: int) -> tuple[Any, ...]:
    """Arguments of the op for m rows; the input is a fake tensor."""
    device, weight = q.qdata.device, operand(q)
    dtype = q.dtype
    if op == "dequantize":
        return (*weight, dtype)
    if op == "embedding":
        return (_shape_only((m,), torch.int64, device), *weight, dtype)
    x = _shape_only((m, weight.k), torch.float32 if op == "grouped_linear" and q.scheme.act else dtype, device)
    if "grouped" in op:
        ends = _shape_only(weight.batch, torch.int32, device)
        return (x, ends, *weight, *([q.scheme.act] if op == "dyn_grouped_linear" else []))
    return (x, *weight, q.scheme.act, q.act_scale, None) if q.scheme.act else (x, *weight, None)


def _shape_only(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, dtype=dtype, device=device)
