"""NVIDIA ModelOpt (``quant_method: modelopt``). For a layer [N, K], by quant_algo, which is common or, with
MIXED_PRECISION, given in quantized_layers for layers, or for modules and all layers in them::

                               weight                   weight_scale                        inputs
    FP8                        e4m3 [N, K]              one number                          input_scale
    FP8_PER_CHANNEL_PER_TOKEN  e4m3 [N, K]              [N]                                 e4m3 per token
    FP8_PB_WO                  e4m3 [N, K]              [N/128, 1, K/128, 1]                not quantized
    MXFP8                      e4m3 [N, K]              uint8 [N, K/32], e8m0               mxfp8
    NVFP4, NVFP4_AWQ           uint8 [N, K/2]: e2m1,    e4m3 [N, K/16]                      nvfp4
    W4A16_NVFP4                the even one low         the same                            not quantized

    value = weight * weight_scale [* weight_scale_2, float32, with nvfp4]

E stacked experts of llama4 and gpt-oss are [E, K, N], with their other tensors under <parameter>_<role>::

    FP8               e4m3 [E, K, N]           one number
    NVFP4 .. as above uint8 [E, K/2, N]        e4m3 [E, K/16, N]     weight_scale_2: one number

input_scale is the static scale of FP8 inputs, and with nvfp4 the second-level scale of inputs. Inputs are multiplied by
pre_quant_scale [K], if present, before they are rounded.
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
from bitport.interop.checks import E4M3, E8M0, Stored, as_grid, expect
from bitport.interop.codec import WeightNames, check_complete, refuse_lost
from bitport.interop.configuration import setting
from bitport.numerics import FLOATS, STATIC, Quantized
from bitport.schemes import PRESETS, Scheme, preset
from bitport.tensor import from_parts

MIXED = "MIXED_PRECISION"
SCHEMES = {
    "FP8": PRESETS["fp8"],
    "FP8_PER_CHANNEL_PER_TOKEN": PRESETS["fp8-row"],
    "FP8_PB_WO": preset("fp8-block-wo"),
    "MXFP8": PRESETS["mxfp8"],
    "NVFP4": PRESETS["nvfp4"],
    "NVFP4_AWQ": PRESETS["nvfp4"],
    "W4A16_NVFP4": preset("nvfp4-wo"),
}
"""quant_algo -> its scheme; for FP8 that of a layer without input_scale."""
READ = ("quant_algo", "group_size", "quantized_layers", "has_zero_point")
SAID_TWICE = ("quant_method", "producer", "config_groups", "ignore", "exclude_modules", "pre_quant_scale")
"""Settings that repeat quant_algo or the names of the tensors."""
CACHE, CACHE_SCALES = ("kv_cache_scheme", "kv_cache_quant_algo"), (".k_scale", ".v_scale")
CACHE_SHIFTS = (".k_proj.k_bias", ".v_proj.v_bias")
"""Offsets subtracted from keys and values before they are rounded."""
STACKED, LYING = ("gate_up_proj", "down_proj"), ("llama4", "llama4_text", "gpt_oss")
"""Stacked experts, and the models in which they are [E, K, N]."""
ROLES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
UNUSED = "left out: input_scale of layers whose inputs are not rounded"


class Reader(codec.Reader):
    known = (*READ, *CACHE, *SAID_TWICE)

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.mixed = setting(self.said, "quant_algo", str).upper() == MIXED
        self.common = None if self.mixed else _scheme(self.said, "quantization_config")
        layers = setting(self.said, "quantized_layers", dict, {}) if self.mixed else {}
        self.own = {
            module: _scheme(setting(layers, module, dict), f"quantized_layers of {module}") for module in layers
        }

    def common_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        inner = setting(config, "quantization", dict, {})
        return {**{key: value for key, value in config.items() if key != "quantization"}, **inner}

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = []
        for name in held:
            module, _, last = name.rpartition(".")
            if last == ROLES[0]:
                found.append(self._weight(f"{module}.weight", f"{module}.", self._of(module), ROLES[2:], held))
            elif last.endswith(f"_{ROLES[0]}"):
                found.append(self._stacked(name.removesuffix(f"_{ROLES[0]}"), held))
        refuse_lost(
            held,
            found,
            lambda name, dtype: dtype in (E4M3, torch.uint8) or name.endswith(ROLES) or ".svdquant_" in name,
            "weight with a weight_scale; fetch the checkpoint again",
        )
        if any("input_scale" in weight.parts and not self._of(weight.name.rpartition(".")[0]).act for weight in found):
            self.notes.append(UNUSED)
        return found

    def _weight(
        self, parameter: str, prefix: str, scheme: Scheme, optional: tuple[str, ...], held: Mapping[str, FileTensor]
    ) -> WeightNames:
        needed = ROLES[: 2 if scheme.weight.global_scale else 1]
        parts = {"weight": parameter, **{role: prefix + role for role in needed}}
        check_complete(prefix + ROLES[0], parts.values(), held)
        return WeightNames(parameter, parts | {role: prefix + role for role in optional if prefix + role in held})

    def _stacked(self, parameter: str, held: Mapping[str, FileTensor]) -> WeightNames:
        module, _, last = parameter.rpartition(".")
        models = [part for part in (self.model, self.model.get("text_config")) if isinstance(part, dict)]
        scheme = self._of(module)
        known = last in STACKED and any(model.get("model_type") in LYING for model in models)
        if not known or not (scheme.weight.block == (0, 0) or scheme.weight.global_scale):
            raise CheckpointError(
                f"{parameter}: of experts that are stacked in one tensor {' and '.join(STACKED)} of {', '.join(LYING)} "
                f"are read, in FP8 and NVFP4; quantize the original model"
            )
        return self._weight(parameter, f"{parameter}_", scheme, ROLES[2:3], held)

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        reason = "scales of a cache of keys and values"
        scales = [name for name, it in held.items() if name.endswith(CACHE_SCALES) and math.prod(it.shape) == 1]
        return dict.fromkeys((*scales, *(name for name in held if name.endswith(CACHE_SHIFTS))), reason)

    def read(self, weight: Stored) -> Tensor:
        scheme, stacked = self._of(weight.name.rpartition(".")[0]), not weight.name.endswith(".weight")
        fmt = scheme.weight
        data = weight.expect("weight", (fmt.number.storage,), (None,) * (3 if stacked else 2))
        scale, name = weight["weight_scale"], weight.names["weight_scale"]
        if stacked:
            data = data.transpose(1, 2)
            scale = scale.transpose(1, 2) if scale.dim() == 3 else scale
        *experts, n, width = data.shape
        k = width * 8 // fmt.number.bits
        grid = (*experts, *fmt.scale_shape(n, k))
        if fmt.scale == "e8m0":
            scale = expect(scale, name, (torch.uint8,), grid).contiguous().view(E8M0)
        elif fmt.scale == "e4m3":
            scale = expect(scale, name, (E4M3,), grid).contiguous()
        else:
            plain = weight.number("weight_scale").expand(grid) if stacked else _plain(scale, grid)
            scale = expect(plain, name, FLOATS, grid).float().contiguous()
        second = None
        if fmt.global_scale:
            second = weight.number("weight_scale_2")
            second = second.expand(*experts, 1, 1).contiguous()
        before = weight.expect("pre_quant_scale", FLOATS, (k,)) if "pre_quant_scale" in weight else None
        fixed = None
        if scheme.act in STATIC and "input_scale" in weight:
            fixed = weight.number("input_scale")
            scheme = Scheme(weight=fmt, act=scheme.act, static=True)
        return from_parts(
            Quantized(data.contiguous(), scale, None, second),
            scheme,
            shape=(*experts, k, n) if stacked else (n, k),
            dtype=self.dtype,
            transposed=stacked,
            pre_scale=before,
            act_scale=fixed,
        )

    def has(self, name: str) -> bool:
        """Whether quantized_layers has the module of the tensor ``name``, or a module that contains it."""
        return self._named(name) in self.own

    def _named(self, module: str) -> str:
        while module and module not in self.own:
            module = module.rpartition(".")[0]
        return module

    def _of(self, module: str) -> Scheme:
        scheme = self.own.get(self._named(module), self.common)
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


def _plain(scale: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Reshape [rows, 1, columns, 1] for blocks, [N] for rows or one number to the grid [rows, columns]."""
    blocks = scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1
    return scale.squeeze(-1).squeeze(1) if blocks else as_grid(scale, grid)
