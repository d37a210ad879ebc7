"""bitsandbytes' 4-bit layer: nf4 in blocks of 64."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("bitsandbytes",)
VARIANTS = {"nf4": "4-bit"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    every = [_layer(weight) for _ in range(copies)]
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    value = functional.dequantize_4bit(codes, state).reshape(weight.shape).double()
    return Prepared(every, lambda: value, codes.nbytes + state.absmax.nbytes)


def _layer(weight: Tensor) -> torch.nn.Module:
    n, k = weight.shape
    layer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(
        weight.clone(), requires_grad=False, compress_statistics=False, quant_type="nf4", blocksize=64
    )
    made: torch.nn.Module = layer.to("cpu").eval()
    return made
