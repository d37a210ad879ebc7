"""bitsandbytes' 4-bit layer, nf4 in blocks of 64, and its int8 layer, which rounds inputs too."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("bitsandbytes",)
VARIANTS = {"nf4": "4-bit", "int8-dyn": "8-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    if variant == "nf4":
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        value = functional.dequantize_4bit(codes, state).reshape(weight.shape).double()
        return Prepared([_nf4(weight) for _ in range(copies)], lambda: value, codes.nbytes + state.absmax.nbytes)
    every = [_int8(weight) for _ in range(copies)]
    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    value = codes.double() * scale.double()[:, None] / 127
    return Prepared(every, lambda: value, codes.nbytes + scale.nbytes)


def _nf4(weight: Tensor) -> torch.nn.Module:
    n, k = weight.shape
    layer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(weight.cpu().clone(), requires_grad=False, quant_type="nf4", blocksize=64)
    made: torch.nn.Module = layer.to(weight.device).eval()
    return made


def _int8(weight: Tensor) -> torch.nn.Module:
    n, k = weight.shape
    layer = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False, threshold=0.0)
    layer.weight = bnb.nn.Int8Params(weight.cpu().half(), requires_grad=False, has_fp16_weights=False)
    made: torch.nn.Module = layer.to(weight.device).eval()
    return made
