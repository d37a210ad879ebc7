"""NVIDIA ModelOpt (``quant_method: modelopt``). Of a layer [N, K], by the quant_algo of all or of its own
(MIXED_PRECISION with quantized_layers, which names layers, or modules for all layers in them)::

                               weight                   weight_scale                        inputs
    FP8                        e4m3 [N, K]              one number                          input_scale
    FP8_PER_CHANNEL_PER_TOKEN  e4m3 [N, K]              [N]                                 e4m3 by token
    FP8_PB_WO                  e4m3 [N, K]              [N/128, 1, K/128, 1]                as they are
    MXFP8                      e4m3 [N, K]              uint8 [N, K/32], e8m0               mxfp8
    NVFP4, NVFP4_AWQ           uint8 [N, K/2]: e2m1,    e4m3 [N, K/16]                      nvfp4
    W4A16_NVFP4                the even one low         the same                            as they are

    value = weight * weight_scale [* weight_scale_2, float32, with nvfp4]

input_scale is the fixed scale of FP8 inputs, with nvfp4 the second level of theirs. Inputs are multiplied by
pre_quant_scale [K], where it is there, before they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import Held
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import expect
from bitport.interop.codec import Weight, setting
from bitport.numerics import STATIC, Quantized
from bitport.schemes import PRESETS, Scheme, preset
from bitport.tensor import from_parts
from bitport.tensor.parts import FLOATS

E4M3, MIXED = torch.float8_e4m3fn, "MIXED_PRECISION"
SCHEMES = {
    "FP8": PRESETS["fp8"],
    "FP8_PER_CHANNEL_PER_TOKEN": PRESETS["fp8-row"],
    "FP8_PB_WO": preset("fp8-block-wo"),
    "MXFP8": PRESETS["mxfp8"],
    "NVFP4": PRESETS["nvfp4"],
    "NVFP4_AWQ": PRESETS["nvfp4"],
    "W4A16_NVFP4": preset("nvfp4-wo"),
}
"""quant_algo -> its scheme, that of FP8 for a layer without input_scale."""
READ = ("quant_algo", "group_size", "quantized_layers", "has_zero_point")
SAID_TWICE = ("quant_method", "producer", "config_groups", "ignore", "exclude_modules", "pre_quant_scale")
"""What quant_algo says too, or the names of the tensors."""
CACHE, CACHE_SCALES = ("kv_cache_scheme", "kv_cache_quant_algo"), (".k_scale", ".v_scale")
ROLES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
UNUSED = "left out: input_scale of layers whose inputs are not rounded"


class Reader(codec.Reader):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        inner = setting(config, "quantization", dict, {})
        said = {**{key: value for key, value in config.items() if key != "quantization"}, **inner}
        known = (*READ, *CACHE, *SAID_TWICE)
        if unknown := [key for key, value in said.items() if key not in known and value]:
            raise CheckpointError(f"quantization_config: {unknown[0]} is not understood; known are {', '.join(known)}")
        self.mixed = setting(said, "quant_algo", str).upper() == MIXED
        self.common = None if self.mixed else _scheme(said, "quantization_config")
        layers = setting(said, "quantized_layers", dict, {}) if self.mixed else {}
        self.own = {
            module: _scheme(setting(layers, module, dict), f"quantized_layers of {module}") for module in layers
        }

    def weights(self, held: Mapping[str, Held]) -> list[Weight]:
        if stacked := [name for name in held if name.endswith("_weight_scale")]:
            raise CheckpointError(
                f"{stacked[0]}: experts that are stacked in one tensor are not read; quantize the original model"
            )
        found = []
        for name in held:
            module, _, last = name.rpartition(".")
            if last != "weight_scale":
                continue
            wanted = ["weight", *ROLES[: 2 if self._of(module).weight.global_scale else 1]]
            if lost := [role for role in wanted if f"{module}.{role}" not in held]:
                raise CheckpointError(f"{name} is there without {module}.{lost[0]}; fetch the checkpoint again")
            wanted += [role for role in ROLES[2:] if f"{module}.{role}" in held]
            found.append(Weight(f"{module}.weight", {role: f"{module}.{role}" for role in wanted}))
        known = {name for weight in found for name in weight.parts.values()}
        for name, it in held.items():
            packed = it.dtype in (E4M3, torch.uint8) or name.endswith(ROLES)
            if name not in known and (packed or ".svdquant_" in name):
                raise CheckpointError(f"{name} belongs to no weight with a weight_scale; fetch the checkpoint again")
        if any("input_scale" in weight.parts and not self._act_of(weight) for weight in found):
            self.notes.append(UNUSED)
        return found

    def dropped(self, held: Mapping[str, Held]) -> dict[str, str]:
        reason = "scales of a cache of keys and values"
        return {name: reason for name, it in held.items() if name.endswith(CACHE_SCALES) and math.prod(it.shape) == 1}

    def read(self, weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
        scheme = self._of(weight.name.removesuffix(".weight"))
        fmt = scheme.weight
        data = expect(tensors["weight"], weight.parts["weight"], (fmt.number.storage,), (None, None))
        shape = (data.shape[0], data.shape[1] * 8 // fmt.number.bits)
        scale, name = tensors["weight_scale"], weight.parts["weight_scale"]
        grid = fmt.scale_shape(*shape)
        if fmt.scale == "e8m0":
            scale = expect(scale, name, (torch.uint8,), grid).contiguous().view(torch.float8_e8m0fnu)
        elif fmt.scale == "e4m3":
            scale = expect(scale, name, (E4M3,), grid).contiguous()
        else:
            scale = expect(_plain(scale, grid), name, FLOATS, grid).float().contiguous()
        second = self._number(weight, tensors, "weight_scale_2") if fmt.global_scale else None
        before, fixed = tensors.get("pre_quant_scale"), None
        if before is not None:
            expect(before, weight.parts["pre_quant_scale"], FLOATS, (shape[1],))
        if scheme.act in STATIC and "input_scale" in tensors:
            fixed = self._number(weight, tensors, "input_scale").reshape(())
            scheme = Scheme(weight=fmt, act=scheme.act, static=True)
        parts = Quantized(data.contiguous(), scale, None, second)
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype, pre_scale=before, act_scale=fixed)

    def _number(self, weight: Weight, tensors: dict[str, Tensor], role: str) -> Tensor:
        found = tensors[role]
        return expect(found, weight.parts[role], FLOATS, (1,) * found.dim()).float().reshape(1, 1)

    def _act_of(self, weight: Weight) -> str:
        return self._of(weight.name.removesuffix(".weight")).act

    def _of(self, module: str) -> Scheme:
        named = module
        while named and named not in self.own:
            named = named.rpartition(".")[0]
        scheme = self.own.get(named, self.common)
        if scheme is None:
            raise CheckpointError(f"{module} has a weight_scale, and quantized_layers does not say of which numbers")
        return scheme


def _scheme(said: Mapping[str, Any], what: str) -> Scheme:
    algorithm = setting(said, "quant_algo", str)
    if algorithm.upper() not in SCHEMES:
        raise CheckpointError(f"{what}: quant_algo {algorithm!r}; {', '.join(SCHEMES)} and {MIXED} are read")
    scheme = SCHEMES[algorithm.upper()]
    group = scheme.weight.block[1]
    if (size := setting(said, "group_size", int, group)) not in (group, 0):
        raise CheckpointError(f"{what}: {algorithm} with group_size {size}; it always has {group}")
    if said.get("has_zero_point"):
        raise CheckpointError(f"{what}: {algorithm} with zero points; floats have none")
    return scheme


def _plain(scale: Tensor, grid: tuple[int, int]) -> Tensor:
    """[rows, 1, columns, 1] of blocks, [N] of rows and one number as the grid [rows, columns]."""
    blocks = scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1
    return scale.reshape(grid) if (blocks or scale.dim() < 2) and scale.numel() == math.prod(grid) else scale
