"""BitNet b1.58 (``quant_method: bitnet``): weights of -1, 0 and 1. For a layer [N, K]::

    weight          uint8 [N/4, K]       row r + i*N/4 in bits 2i and 2i + 1 of row r, as code + 1
    weight_scale    float [1]

    value = code * weight_scale    (linear_class: autobitlinear)
    value = code / weight_scale    (linear_class: bitlinear, the default)

Inputs are rounded to int8 by token. Weights stay ternary in bitport: of four codes of int2 they use -1, 0 and 1.
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
from bitport.interop.checks import Stored
from bitport.interop.codec import WeightNames, check_complete, refuse_lost
from bitport.interop.configuration import one_of
from bitport.interop.words import of_rows_apart
from bitport.numerics import Format, Quantized
from bitport.numerics.packing import pack_bits
from bitport.schemes import Scheme
from bitport.schemes.presets import TENSOR
from bitport.tensor import from_parts

LINEAR, MULTIPLIES, SCALE = "linear_class", "autobitlinear", "weight_scale"
SCHEME = Scheme(weight=Format(dtype="int2", block=TENSOR, scale="float32"), act="int8")
RECIPROCAL = "scales divide there and multiply here: they are kept as their reciprocals, rounded to float32"


class Reader(codec.Reader):
    known = ("quant_method", "modules_to_not_convert", LINEAR, "quantization_mode", "use_rms_norm", "rms_norm_eps")

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.multiplies = one_of(config, LINEAR, ("bitlinear", MULTIPLIES)) == MULTIPLIES
        if one_of(config, "quantization_mode", ("offline", "online")) == "online":
            raise CheckpointError(
                "quantization_config: quantization_mode online: its weights are floats, which are rounded in every "
                "call. Convert the model whose weights are packed (offline), or quantize this one: bitport quantize"
            )
        if config.get("use_rms_norm"):
            raise CheckpointError(
                "quantization_config: use_rms_norm: each layer normalizes its input, for which the model in float has "
                "no place"
            )
        if not self.multiplies:
            self.notes.append(RECIPROCAL)

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = []
        for name, it in held.items():
            if name.endswith(".weight") and it.dtype == torch.uint8:
                module = name.removesuffix(".weight")
                check_complete(name, [f"{module}.{SCALE}"], held)
                if self.multiplies and f"{module}.bias" in held:
                    raise CheckpointError(f"{module}.bias is multiplied by {SCALE} there, as no linear layer does")
                found.append(WeightNames(name, {"weight": name, "scale": f"{module}.{SCALE}"}))
        refuse_lost(held, found, lambda name, _: name.endswith(f".{SCALE}"), "weight that is packed in uint8")
        return found

    def read(self, weight: Stored) -> Tensor:
        data, stored = weight.expect("weight", (torch.uint8,), (None, None)), weight.number("scale").double()
        codes = of_rows_apart(data, range(0, 8, 2), 2)
        if int(codes.max()) > 2:
            raise CheckpointError(f"{weight.names['weight']} holds the code 3; 0 to 2 stand for -1, 0 and 1")
        scale = (stored if self.multiplies else 1 / stored).float()
        if not 0 < float(scale) < math.inf:
            raise CheckpointError(f"{weight.names['scale']} must be a positive number, not {float(stored):g}")
        parts = Quantized(pack_bits(codes + 1, 2), scale.reshape(1, 1))
        return from_parts(parts, SCHEME, shape=tuple(codes.shape), dtype=self.dtype)
