"""AMD Quark (``quant_method: quark``). For a layer [N, K], by its configuration::

                                weight                          weight_scale
    fp8_e4m3                    float8_e4m3fn [N, K]            one number, [N], [N/rows, K/columns], [N, K/g]
    fp4, fp6_e2m3               uint8 [N, K*b/8]: dense         [N, K/g]: uint8, e8m0; nvfp4: e4m3
    int8, uint8                 int8, uint8 [N, K]              one number, [N]
    int8, uint8   per_group     int8, uint8 [K, N]              [K/g, N]
    int4, uint4                 int32 [N, K/8]                  [N]
    int4, uint4   per_group     int32 [K, N/8]                  [K/g, N]

    weight_zero_point           for integers: shaped as weight_scale, dtype as weight; 4 bits: int32 [N/8], [K/g, N/8]
    weight_scale_2              for nvfp4: one number
    input_scale, input_scale_2  with static scales of inputs: one number; for nvfp4 the second

    value = (code - zero) * weight_scale [* weight_scale_2]

An int32 word holds eight neighbours from its lowest bits: in order (pack_method order), or the even ones first, as in
AWQ (reorder). int4 and int8 are signed, and so are their zero points.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.awq import PER_WORD, PLACE, reordered
from bitport.interop.checks import E4M3, E8M0, POWERS, Stored, as_grid, expect
from bitport.interop.codec import WeightNames, check_complete, refuse_lost
from bitport.interop.quark.settings import NO_NUMBERS, READ, Layer, Settings
from bitport.interop.words import to_codes, word_count
from bitport.numerics import FLOATS, Format, Quantized
from bitport.numerics.packing import pack_bits
from bitport.tensor import from_parts

ROLES = (
    *("weight_scale", "weight_scale_2", "weight_zero_point", "input_scale", "input_scale_2", "input_zero_point"),
    *("bias_scale", "bias_zero_point", "output_scale", "output_zero_point", "input_rotation", "input_prescale"),
)
CACHE = re.compile(r"(.*\.)?([qkv]_scale|[qkv]_zero_point|(prob_)?output_scale|output_zero_point)")


class Reader(codec.Reader):
    known = READ | NO_NUMBERS

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.settings = Settings(config)
        self.notes += self.settings.notes
        if config.get("softmax_quant_spec"):
            self.notes.append(
                "softmax_quant_spec: what attention multiplies values with is rounded there, and not here"
            )

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = []
        for name in held:
            module, _, last = name.rpartition(".")
            if last == "weight_scale":
                found.append(self._weight(module, held))
        dropped = self.dropped(held)
        refuse_lost(
            {name: it for name, it in held.items() if name not in dropped},
            found,
            _is_part,
            "weight with a weight_scale that has it",
        )
        return found

    def _weight(self, module: str, held: Mapping[str, FileTensor]) -> WeightNames:
        layer = self.settings.of(module)
        fmt, nvfp4 = layer.scheme.weight, layer.scheme.act == "nvfp4"
        needs = {
            "weight": True,
            "weight_scale": True,
            "weight_scale_2": fmt.global_scale,
            "weight_zero_point": not (layer.symmetric and layer.signed),
            "input_scale_2" if nvfp4 else "input_scale": layer.scheme.static,
        }
        roles = [role for role, needed in needs.items() if needed]
        check_complete(f"{module}.weight_scale", (f"{module}.{role}" for role in roles), held)
        zeros = {"weight_zero_point": fmt.number.kind == "int", "input_zero_point": layer.scheme.act.startswith("int")}
        roles += [role for role, may in zeros.items() if may and role not in roles and f"{module}.{role}" in held]
        return WeightNames(f"{module}.weight", {role: f"{module}.{role}" for role in roles})

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        if not (self.settings.cached or self.config.get("softmax_quant_spec")):
            return {}
        reason = "scales of the cache of keys and values"
        return {name: reason for name, it in held.items() if CACHE.fullmatch(name) and math.prod(it.shape) == 1}

    def read(self, weight: Stored) -> Tensor:
        layer = self.settings.of(weight.name.removesuffix(".weight"))
        scheme = layer.scheme
        integers = scheme.weight.number.kind == "int"
        fmt, parts, shape = (self._integers if integers else self._floats)(layer, weight)
        fixed = None
        if scheme.static:
            role = "input_scale_2" if scheme.act == "nvfp4" else "input_scale"
            fixed = weight.number(role)
        if "input_zero_point" in weight and bool((weight["input_zero_point"] != 0).any()):
            raise CheckpointError(f"{weight.names['input_zero_point']} must be 0, since inputs are symmetric")
        scheme = dataclasses.replace(scheme, weight=fmt)
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype, act_scale=fixed)

    def _floats(self, layer: Layer, weight: Stored) -> tuple[Format, Quantized, tuple[int, int]]:
        fmt = layer.scheme.weight
        data = weight.expect("weight", (fmt.number.storage,), (None, None))
        if data.shape[1] * 8 % fmt.number.bits:
            raise CheckpointError(f"{weight.names['weight']} must have rows of whole codes of {fmt.number.bits} bits")
        shape = (data.shape[0], data.shape[1] * 8 // fmt.number.bits)
        dtypes = {"e4m3": (E4M3,), "e8m0": POWERS}.get(fmt.scale, (*FLOATS, E8M0))
        scale = weight.grid("weight_scale", dtypes, fmt.scale_shape(*shape))
        scale = scale.view(E8M0) if scale.dtype == torch.uint8 else scale
        scale = scale.float() if fmt.scale == "float32" else scale
        second = None
        if fmt.global_scale:
            second = weight.number("weight_scale_2").reshape(1, 1)
        return fmt, Quantized(data.contiguous(), scale, None, second), shape

    def _integers(self, layer: Layer, weight: Stored) -> tuple[Format, Quantized, tuple[int, int]]:
        fmt, upright = layer.scheme.weight, layer.upright
        scale = weight.expect("weight_scale", FLOATS, (None,) * weight["weight_scale"].dim())
        columns = None if upright or not scale.dim() else scale.shape[-1]
        codes = _upright(self._codes(layer, weight["weight"], weight.names["weight"], (None, columns)), upright)
        n, k = codes.shape
        grid = fmt.scale_shape(n, k)
        stored = grid if upright else grid[::-1]
        scale = _upright(weight.grid("weight_scale", FLOATS, stored), upright)
        zero = self._zero(layer, weight, grid)
        plain = bool((zero == 1 << (fmt.number.bits - 1)).all())
        if not plain or not layer.symmetric:
            fmt = dataclasses.replace(fmt, zero="int")
        scale = scale.float() if fmt.scale == "float32" else scale
        stream = pack_bits(codes.contiguous(), fmt.number.bits)
        return fmt, Quantized(stream, scale.contiguous(), zero if fmt.zero == "int" else None), (n, k)

    def _zero(self, layer: Layer, weight: Stored, grid: tuple[int, int]) -> Tensor:
        if (zero := weight.get("weight_zero_point")) is None:
            return torch.full(grid, 1 << (layer.scheme.weight.number.bits - 1), dtype=torch.uint8)
        upright = layer.upright and layer.scheme.weight.number.bits == 8
        zero = zero.unsqueeze(0) if layer.upright and not upright and zero.dim() == 1 else zero
        stored = grid if upright else grid[::-1]
        zero = as_grid(zero, stored)
        return _upright(self._codes(layer, zero, weight.names["weight_zero_point"], stored), upright).contiguous()

    def _codes(self, layer: Layer, tensor: Tensor, name: str, shape: tuple[int | None, int | None]) -> Tensor:
        """Unsigned codes, uint8 of ``shape``: those of 4 bits are packed along columns, with padding in the last
        word."""
        bits = layer.scheme.weight.number.bits
        if bits == 8:
            kind = torch.int8 if layer.signed else torch.uint8
            codes = expect(tensor, name, (kind,), shape).contiguous().view(torch.uint8)
        else:
            columns = shape[1]
            wanted = (shape[0], None if columns is None else word_count(columns, bits))
            words = expect(tensor, name, (torch.int32,), wanted)
            codes = to_codes(words, words.shape[1] * PER_WORD, bits)
            if self.settings.reordered:
                codes = reordered(codes, PLACE)
            codes = codes[:, :columns]
        return codes ^ (1 << (bits - 1)) if layer.signed else codes


def _is_part(name: str, dtype: torch.dtype) -> bool:
    whole = not dtype.is_floating_point or dtype.itemsize == 1
    return name.endswith(ROLES) or (name.endswith(".weight") and whole)


def _upright(tensor: Tensor, lies_so: bool) -> Tensor:
    return tensor if lies_so else tensor.t()
