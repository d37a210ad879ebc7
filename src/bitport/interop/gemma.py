"""Gemma's own format for models that were trained to be quantized (``quant_method: gemma``). For a linear layer [N, K],
or an embedding with ``embedding_quantized`` and ``embedding_scale``::

    weight                     int8 [N, K], or uint8 [N, K/2] or [N, K/4] of 4 or 2 bits, the first code lowest
    weight_scale               float32 [N, groups]: one group, but in embeddings
    input_activation_scale,
    output_activation_scale    float32 [], 0 if there is none

    value = code * scale       codes of 4 and 2 bits are stored as code + 8 and code + 2

Inputs are rounded to int8 with input_activation_scale, and outputs with output_activation_scale: bitport only rounds
inputs. The bits of a layer are those of the expression in module_quant_configs that matches first in its name, or else
num_bits. Rows are taken to fill their bytes.
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
from bitport.interop.configuration import compiled, refuse_unknown, setting
from bitport.numerics import Format, Quantized
from bitport.numerics.packing import from_signed
from bitport.schemes import Scheme
from bitport.tensor import from_parts

NUMBER, LAYERS = "num_bits", "module_quant_configs"
STORED = {8: torch.int8, 4: torch.uint8, 2: torch.uint8}
"""Bits of a code -> dtype in the files."""
PARTS = {"weight": "weight_scale", "embedding_quantized": "embedding_scale"}
"""Name of the codes -> name of their scales."""
INPUT, OUTPUT = "input_activation_scale", "output_activation_scale"
CACHE = ("k_cache_scale", "v_cache_scale")
DROPPED = {
    OUTPUT: "scales of outputs, which are not rounded here",
    **dict.fromkeys(CACHE, "scales of the cache of keys and values"),
}


class Reader(codec.Reader):
    known = ("quant_method", "modules_to_not_convert", "quantize_embeddings", NUMBER, LAYERS)

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.common, own = _bits(config, 4, "quantization_config"), setting(config, LAYERS, dict, {})
        self.own = [(compiled(pattern), self._own(own, pattern)) for pattern in own]

    def _own(self, own: Mapping[str, Any], pattern: str) -> int:
        said, what = setting(own, pattern, dict), f"{LAYERS} of {pattern!r}"
        refuse_unknown(said, (NUMBER,), what)
        return _bits(said, self.common, what)

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found: dict[str, WeightNames] = {}
        for name, it in held.items():
            module, _, last = name.rpartition(".")
            if last not in PARTS or it.dtype not in STORED.values():
                continue
            if (parameter := f"{module}.weight") in found:
                raise CheckpointError(f"{module} has both {' and '.join(PARTS)}; fetch the checkpoint again")
            parts = {"codes": name, "scale": f"{module}.{PARTS[last]}", "input": f"{module}.{INPUT}"}
            if parts["input"] not in held:
                del parts["input"]
            check_complete(name, parts.values(), held)
            found[parameter] = WeightNames(parameter, parts)
        ends = (*PARTS.values(), INPUT)
        refuse_lost(held, found.values(), lambda name, _: name.endswith(ends), "weight in int8 or uint8")
        return list(found.values())

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        lasts = {name: name.rpartition(".")[2] for name, it in held.items() if math.prod(it.shape) == 1}
        return {name: DROPPED[last] for name, last in lasts.items() if last in DROPPED}

    def read(self, weight: Stored) -> Tensor:
        bits, codes = self._bits_of(weight.name.removesuffix(".weight")), weight["codes"]
        if codes.dtype != STORED[bits]:
            raise CheckpointError(
                f"{weight.names['codes']} is {codes.dtype}, and of {bits} bits by quantization_config"
            )
        n, width = weight.expect("codes", (codes.dtype,), (None, None)).shape
        scale = weight.expect("scale", (torch.float32,), (n, None)).contiguous()
        k, groups = width * 8 // bits, scale.shape[1]
        if k % groups:
            raise CheckpointError(
                f"{weight.names['scale']} has {groups} groups, and {k} columns do not divide into these"
            )
        fmt = Format(dtype=f"int{bits}", block=(1, k // groups if groups > 1 else 0))
        data = (from_signed(codes) if bits == 8 else codes).contiguous()
        act_scale = weight.number("input") if "input" in weight else None
        if act_scale is None or not act_scale:
            return from_parts(Quantized(data, scale), Scheme(weight=fmt), shape=(n, k), dtype=self.dtype)
        scheme = Scheme(weight=fmt, act="int8-tensor", static=True)
        return from_parts(Quantized(data, scale), scheme, shape=(n, k), dtype=self.dtype, act_scale=act_scale)

    def _bits_of(self, module: str) -> int:
        """Those of the match that begins first; of two that begin at one place, of the one that is said first."""
        matches = [(match.start(), bits) for pattern, bits in self.own if (match := pattern.search(module))]
        return min(matches, key=lambda match: match[0])[1] if matches else self.common


def _bits(said: Mapping[str, Any], default: int, what: str) -> int:
    bits: int = setting(said, NUMBER, int, default)
    if bits not in STORED:
        raise CheckpointError(f"{what}: {NUMBER} {bits}: {', '.join(map(str, STORED))} are read")
    return bits
