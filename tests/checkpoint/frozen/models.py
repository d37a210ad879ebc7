"""The models in the frozen files: every number type, every kind of scale, every kind of module and part.

Codes, zero points and scales are random rather than rounded weights, so that the files hold every code of a type (NaN
and infinity too) and every zero point that one may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitport.numerics import Format, quantize, to_storage
from bitport.schemes import Scheme, preset
from bitport.tensor import QTensor, from_parts
from bitport.tensor.qtensor import rows_of

N, K = 6, 75
"""No multiple of a group, nor of a byte: the last block of a row is short, and its last byte padded."""


def _table(name: str) -> Scheme:
    return Scheme(weight=Format(dtype=name, block=(1, 32), scale="float16"))


INTEGERS = {
    "int1": Scheme(weight=Format(dtype="int1", block=(1, 32), scale="input")),
    **{name: preset(name) for name in ("int2", "int3", "int4", "int5", "int6", "int7", "int8")},
    **{name: preset(name) for name in ("int4-g32-sym", "int3-g32-fzero", "int5-channel", "int8-tensor", "int8-asym")},
    "int6-blocks": Scheme(weight=Format(dtype="int6", block=(4, 32), zero="float", scale="bfloat16")),
    **{name: preset(name) for name in ("int8-dyn", "int8-static", "int4-int8", "int4-fp8")},
}
FLOATS = {
    **{name: preset(name) for name in ("fp8", "fp8-row", "fp8-block", "fp8-wo", "fp8-e5m2-wo", "fp8-static")},
    **{name: preset(name) for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4-static")},
    "e3m2": Scheme(weight=Format(dtype="float6_e3m2", block=(1, 32), scale="e8m0", scale_rule="ceil"), act="mxfp4"),
    "nf4": preset("nf4"),
    **{name: _table(name) for name in ("bnb_fp4", "ggml_iq4", "ggml_iq3", "ggml_iq3s", "ggml_iq2")},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random(like: Tensor, scheme: Scheme, kind: str = "linear", transposed: bool = False, **extra: Any) -> QTensor:
    """A quantized tensor of the shape and dtype of ``like``, in which every code is as likely."""
    rows, fmt = rows_of(like.detach(), kind, transposed), scheme.weight
    parts = quantize(rows, fmt)
    codes = torch.randint(0, fmt.number.qmax + 1, rows.shape, dtype=torch.uint8)
    most = min(1 << fmt.number.bits, 255)
    zero = torch.randint(0, most + 1, parts.scale.shape).to(torch.uint8) if fmt.zero == "int" else parts.zero
    if scheme.static:
        extra["act_scale"] = torch.tensor(0.0625)
    parts = parts._replace(data=to_storage(codes, fmt.number), zero=zero)
    made = from_parts(parts, scheme, shape=tuple(like.shape), dtype=like.dtype, transposed=transposed, **extra)
    return made


def put(module: nn.Module, name: str, scheme: Scheme, **more: Any) -> None:
    """Quantize the parameter ``name`` of ``module``."""
    q = random(getattr(module, name), scheme, **more)
    setattr(module, name, nn.Parameter(q, requires_grad=False))


def linears(names: Iterable[str]) -> nn.ModuleDict:
    """A layer for each name, in different dtypes."""
    return nn.ModuleDict({n: nn.Linear(K, N, bias=False, dtype=DTYPES[at % 3]) for at, n in enumerate(names)})


def of_schemes(schemes: dict[str, Scheme]) -> Callable[[bool], nn.Module]:
    def build(quantized: bool) -> nn.Module:
        model = linears(schemes)
        for name, scheme in schemes.items() if quantized else ():
            put(model[name], "weight", scheme)
        return model

    return build


class Places(nn.Module):
    """Every kind of module and of part, and tensors that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 24)
        self.head = nn.Linear(24, 9, bias=False)
        self.head.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(4, 3, (3, 2), dtype=torch.float16)
        self.turned = nn.ConvTranspose1d(4, 3, 3)
        self.recurrent = nn.LSTM(8, 4)
        self.experts = nn.Parameter(torch.randn(3, 5, 40))
        self.lying = nn.Parameter(torch.randn(2, 40, 5, dtype=torch.bfloat16))
        self.sorted = nn.Linear(K, N)
        self.scaled = nn.Linear(K, N, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)
        self.register_buffer("steps", torch.tensor([1, 2**40]))
        self.register_buffer("mask", torch.tensor([[True, False]]), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
        self.register_buffer("nothing", torch.zeros(0, 4, dtype=torch.bfloat16))


def places(quantized: bool) -> nn.Module:
    model = Places()
    if not quantized:
        return model
    int4, int8 = preset("int4-g32"), preset("int8")
    put(model.embed, "weight", int8)
    model.head.weight = model.embed.weight
    put(model.attention, "in_proj_weight", int4)
    put(model.conv, "weight", int4, kind="conv")
    put(model.turned, "weight", int8, kind="conv")
    put(model.recurrent, "weight_ih_l0", int8)
    put(model.recurrent, "weight_hh_l0", preset("int4-g32-sym"))
    put(model, "experts", preset("nvfp4"))
    put(model, "lying", int4, transposed=True)
    put(model.sorted, "weight", int4, perm=torch.randperm(K).int())
    put(model.scaled, "weight", preset("int3-g32"), perm=torch.randperm(K), pre_scale=torch.rand(K) + 0.5)
    return model


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "integers": of_schemes(INTEGERS),
    "floats": of_schemes(FLOATS),
    "places": places,
}
"""Directory -> the model in it; ``True``: with quantized weights."""
