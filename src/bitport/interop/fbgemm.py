"""Float8 of FBGEMM (``quant_method: fbgemm_fp8``), used by Meta for Llama 3.1 405B. For a layer [N, K], and for E
stacked experts of Llama 4, which are [E, K, N]::

    weight        float8_e4m3fn [N, K]       weight_scale        float32 [N, 1]
    gate_up_proj  float8_e4m3fn [E, K, N]    gate_up_proj_scale  float32 [E, 1, N]
    down_proj     float8_e4m3fn [E, K, N]    down_proj_scale     float32 [E, N, 1]

    value = weight * scale

FBGEMM clamps inputs to activation_scale_ub, then rounds each token to float8. Without the clamp a token with one large
number would lose its small ones, and no scheme has it: inputs are not quantized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import E4M3, Stored
from bitport.interop.codec import WeightNames, check_complete, refuse_lost
from bitport.interop.configuration import setting
from bitport.numerics import Quantized
from bitport.schemes import preset
from bitport.tensor import from_parts

BOUND, USUAL = "activation_scale_ub", 1200.0
INPUT_BOUND = ".input_scale_ub"
"""A tensor of one number per layer; programs take the bound from the configuration instead."""
EXPERTS = ("gate_up_proj", "down_proj")
SCALES = tuple(f"{name}_scale" for name in ("weight", *EXPERTS))


class Reader(codec.Reader):
    known = ("quant_method", "modules_to_not_convert", BOUND)

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        bound = float(setting(config, BOUND, (int, float), USUAL))
        if not 0 < bound < math.inf:
            raise CheckpointError(f"quantization_config: {BOUND} must be a positive number, not {bound}")
        self.notes.append(f"inputs are used as they are: no scheme cuts them off at {bound:g} before they are rounded")

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = []
        for name, it in held.items():
            if it.dtype == E4M3 and name.endswith((".weight", *EXPERTS)):
                check_complete(name, [f"{name}_scale"], held)
                found.append(WeightNames(name, {"weight": name, "scale": f"{name}_scale"}))
        refuse_lost(
            held,
            found,
            lambda name, dtype: dtype.itemsize == 1 or name.endswith(SCALES),
            f"weight in {E4M3} that has a scale",
        )
        return found

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        reason = f"the bound of inputs of each layer, which is {BOUND}"
        return {name: reason for name, it in held.items() if name.endswith(INPUT_BOUND) and math.prod(it.shape) == 1}

    def read(self, weight: Stored) -> Tensor:
        experts = weight.name.endswith(EXPERTS)
        data = weight.expect("weight", (E4M3,), (None,) * (3 if experts else 2))
        shape = tuple(data.shape)
        data = data.transpose(-2, -1).contiguous() if experts else data.contiguous()
        *stack, n, _ = data.shape
        column = (*stack, n, 1)
        stored = (*stack, 1, n) if weight.name.endswith(EXPERTS[0]) else column
        scale = weight.expect("scale", (torch.float32,), stored).reshape(column)
        return from_parts(
            Quantized(data, scale.contiguous()), preset("fp8-wo"), shape=shape, dtype=self.dtype, transposed=experts
        )
