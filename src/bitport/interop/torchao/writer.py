"""Writing torchao files. Numbers do not change, but Int8Tensor and Float8Tensor have float32 scales there."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import name_of
from bitport.errors import ArgumentError
from bitport.interop import codec
from bitport.interop.codec import Described
from bitport.interop.shifts import zero_points
from bitport.interop.torchao.forms import form_of, typed
from bitport.interop.torchao.header import part_of
from bitport.interop.torchao.inputs import SYMMETRIC
from bitport.interop.torchao.tensors import TENSOR_CLASSES
from bitport.numerics.packing import unpack_bits
from bitport.numerics.swizzle import swizzled
from bitport.tensor import QTensor

NAMES = "tensor_names"
TEXT = 2048
"""An upper bound on the bytes in the header for a tensor, besides its name."""
GPU = "products with Int4Tensor, int4 without zero points, need torchao's kernels for NVIDIA's processors (mslk)"


class Writer(codec.Writer):
    """Writes one scheme for all weights: the configuration has only one, from which vLLM creates the tensors to load
    into."""

    name = "torchao"

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}

    def refuses(self, q: Described) -> str | None:
        form = form_of(q.scheme)
        if wrong := codec.no_layer(q, "torchao is written for", conv1d=False):
            return wrong
        if form is None:
            return (
                "written are integers in rows or groups, float8 in rows or with one scale, mxfp8, mxfp4 and nvfp4, "
                "with inputs as torchao rounds them; blocks of rows, float zero points and fixed scales of inputs are "
                "not"
            )
        if "perm" in q.parts:
            return "torchao has no order of columns (perm)"
        if "pre_scale" in q.parts and "act_pre_scale" not in TENSOR_CLASSES[form.kind].optional:
            return f"a {form.kind} of torchao has no scales that inputs are multiplied by (pre_scale)"
        if any(size % step for size, step in zip(q.shape, q.scheme.weight.block_shape(*q.shape), strict=True)):
            return f"torchao has whole blocks, and {q.shape[0]}x{q.shape[1]} does not divide into those of {q.scheme}"
        return self.refuses_another_scheme(q, "torchao is written in")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        form = form_of(q.scheme)
        assert form is not None
        if q.scheme.act in ("int8", "int8-tensor"):
            self.tell(SYMMETRIC)
        if form.kind == "Int4Tensor":
            self.tell(GPU)
        parts = PARTS[form.kind](q, name)
        if q.pre_scale is not None:
            parts["act_pre_scale"] = q.pre_scale
        said = {**_shape(form.kind, q), **form.said}
        self.texts[name] = json.dumps({**typed(form.kind, said), "_tensor_data_names": list(parts)})
        return {part_of(name, role): part for role, part in parts.items()}

    def config(self, left: list[str]) -> dict[str, Any]:
        assert self.scheme is not None
        form = form_of(self.scheme)
        assert form is not None
        return {"quant_method": self.name, "quant_type": {"default": form.config}, "modules_to_not_convert": left}

    def room(self, names: list[str]) -> int:
        return sum(TEXT + 4 * len(json.dumps(name)) for name in names)

    def metadata(self, plain: list[str]) -> dict[str, str]:
        # torchao does not support names without a module.
        within = [name for name in plain if "." in name]
        texts = self.texts | dict.fromkeys(within, json.dumps({"_type": "Tensor"}))
        return {**texts, NAMES: json.dumps(list(texts))}


def _shape(kind: str, q: QTensor) -> dict[str, Any]:
    block, dtype = [q.matrix.block_n, q.matrix.block_k], typed("torch.dtype", name_of(q.dtype))
    if kind in ("MXTensor", "NVFP4Tensor"):
        return {"orig_dtype": dtype}
    return {"block_size": block, **({"shape": list(q.shape)} if kind == "Int4Tensor" else {"dtype": dtype})}


def _bytes(q: QTensor, name: str, scale: Tensor) -> dict[str, Tensor]:
    bits, middle = q.scheme.weight.number.bits, 1 << (q.scheme.weight.number.bits - 1)
    codes = unpack_bits(q.qdata, bits, q.matrix.k).to(torch.int16) - middle
    zero = zero_points(q).to(torch.int16)
    if int(zero.max()) - middle > 127:
        raise ArgumentError(f"{name}: the zero point {int(zero.max())} less {middle} does not fit torchao's int8")
    return {"qdata": codes.to(torch.int8), "scale": scale, "zero_point": (zero - middle).to(torch.int8)}


def _int4(q: QTensor, name: str) -> dict[str, Tensor]:
    scale = q.scale.t().contiguous()
    return {"qdata": (q.qdata ^ 0x88).view(torch.int8), "scale": scale, "zero_point": torch.zeros_like(scale)}


def _nvfp4(q: QTensor, name: str) -> dict[str, Tensor]:
    assert q.scale2 is not None
    return {"qdata": q.qdata, "scale": swizzled(q.scale), "per_tensor_scale": q.scale2.reshape(())}


PARTS = {
    "Int8Tensor": lambda q, name: _bytes(q, name, q.scale.float()),
    "IntxUnpackedToInt8Tensor": lambda q, name: _bytes(q, name, q.scale),
    "Int4Tensor": _int4,
    "Float8Tensor": lambda q, name: {"qdata": q.qdata, "scale": q.scale.float()},
    "MXTensor": lambda q, name: {"qdata": q.qdata, "scale": swizzled(q.scale)},
    "NVFP4Tensor": _nvfp4,
}
"""Class -> a function that returns its tensors, see :mod:`bitport.interop.torchao.tensors`."""
