"""bitsandbytes' 4-bit product, nf4 in blocks of 64, and its int8 product, which also rounds inputs."""

from __future__ import annotations

import copy
import functools

import bitsandbytes as bnb
import torch
from bitsandbytes import functional
from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("bitsandbytes",)
VARIANTS = {"nf4": "4-bit", "int8-dyn": "8-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    """The functions that its layers call, with weights that stay on the device. Its int8 kernels only support float16:
    inputs are converted in advance, so that no call casts."""
    if variant == "nf4":
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        exact = copy.copy(state)
        exact.dtype = torch.float32
        value = functional.dequantize_4bit(codes, exact).reshape(weight.shape).double()
        every = [functools.partial(_nf4, codes.clone(), copy.deepcopy(state)) for _ in range(copies)]
        return Prepared(every, lambda: value, codes.nbytes + state.absmax.nbytes)
    if weight.shape[0] % 4 or weight.shape[1] % 4:
        return f"{weight.shape[0]} outputs or {weight.shape[1]} columns are not a multiple of 4"
    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    whole = codes.double() * scale.double()[:, None] / 127
    calls = [functools.partial(_int8, _state(codes, scale)) for _ in range(copies)]
    return Prepared(calls, lambda: whole, codes.nbytes + scale.nbytes, accept=Tensor.half)


def _nf4(codes: Tensor, state: functional.QuantState, x: Tensor) -> Tensor:
    return bnb.matmul_4bit(x, codes, quant_state=state)


def _int8(state: bnb.MatmulLtState, x: Tensor) -> Tensor:
    return bnb.matmul(x, state.CB, state=state)


def _state(codes: Tensor, scale: Tensor) -> bnb.MatmulLtState:
    """The state of a Linear8bitLt without outliers, after its weight was rounded."""
    made = bnb.MatmulLtState()
    made.CB, made.SCB = codes.clone(), scale.clone()
    made.has_fp16_weights, made.is_training, made.threshold = False, False, 0.0
    return made
