"""MLX (no ``quant_method``; ``quantization`` of config.json, which is there again as ``quantization_config``), and
``quant_method: metal`` of transformers, which has the first mode alone. Of a module [N, K], by its ``mode``::

                                                                            bits              g
    affine   scales, biases float [N, K/g]    value = code * scale + bias   1 .. 6, 8         any that divides K
    mxfp4    scales uint8 [N, K/32], e8m0     value = e2m1(code) * scale    4                 32
    mxfp8    scales uint8 [N, K/32], e8m0     value = e4m3(code) * scale    8                 32
    nvfp4    scales uint8 [N, K/16], e4m3     value = e2m1(code) * scale    4                 16

    weight uint32 [N, K * bits / 32]: codes along K, least significant bits first, over the borders of words

Metal calls the biases qbiases. Modules may have settings of their own, under their path. How biases become zero points:
:mod:`bitport.interop.shifts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import Held
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import expect
from bitport.interop.codec import Weight, setting
from bitport.interop.shifts import ROUNDED, of_shifts
from bitport.interop.words import to_codes, to_stream
from bitport.numerics import Quantized
from bitport.schemes import Scheme, preset
from bitport.tensor import from_parts
from bitport.tensor.parts import FLOATS

BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE = "affine"
FIXED = {"mxfp4": (32, 4, "mxfp4-wo"), "mxfp8": (32, 8, "mxfp8-wo"), "nvfp4": (16, 4, "nvfp4-wo")}
"""Mode -> the group and bits it always has, and its preset."""
SETTINGS = ("group_size", "bits", "mode")
NO_NUMBERS = ("quant_method", "modules_to_not_convert")
"""Settings that change no number: a module is quantized if it has scales."""
INPUTS = "quantize_input"


@dataclasses.dataclass(frozen=True)
class Settings:
    group: int
    bits: int
    mode: str

    @classmethod
    def of(cls, said: Mapping[str, Any], what: str, known: tuple[str, ...] = SETTINGS) -> Settings:
        if unknown := [key for key in said if key not in known]:
            raise CheckpointError(f"{what}: {unknown[0]} is not understood; {', '.join(known)} are")
        mode = setting(said, "mode", str, AFFINE)
        group, bits = FIXED.get(mode, (64, 4, ""))[:2]
        its = cls(setting(said, "group_size", int, group), setting(said, "bits", int, bits), mode)
        if mode != AFFINE and (mode not in FIXED or (its.group, its.bits) != (group, bits)):
            fixed = ", ".join(f"{name} of {bits} bits in groups of {group}" for name, (group, bits, _) in FIXED.items())
            raise CheckpointError(
                f"{what}: {mode!r} of {its.bits} bits in groups of {its.group}; {AFFINE}, {fixed} are read"
            )
        if its.bits not in BITS or its.group < 1:
            raise CheckpointError(
                f"{what}: {its.bits} bits in groups of {its.group}; {', '.join(map(str, BITS))} bits are read"
            )
        return its


class Reader(codec.Reader):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        metal = config.get("quant_method") == "metal"
        self.shift = "qbiases" if metal else "biases"
        self.channels_last = not metal
        """Whether the tensors beside the quantized ones are as MLX has them, and not as transformers does."""
        common = {key: value for key, value in config.items() if key in SETTINGS or not isinstance(value, (dict, bool))}
        self.common = Settings.of(common, "quantization", (*SETTINGS, *NO_NUMBERS))
        self.own = {
            path: Settings.of(said, f"quantization of {path}")
            for path, said in config.items()
            if isinstance(said, dict)
        }
        """Path of a module -> its settings. Beside them are true and false, for modules with the common ones and with
        none."""
        if config.get(INPUTS):
            raise CheckpointError(f"quantization: {INPUTS} rounds inputs too, in a way that is not read")

    def weights(self, held: Mapping[str, Held]) -> list[Weight]:
        found: list[Weight] = []
        known: set[str] = set()
        for name in held:
            module, _, last = name.rpartition(".")
            if last == "scales":
                ends = ["weight", "scales", *([self.shift] if self._of(module).mode == AFFINE else [])]
                parts = {end: f"{module}.{end}" for end in ends}
                if lost := [part for part in parts.values() if part not in held]:
                    raise CheckpointError(f"{name} is there without {lost[0]}; fetch the checkpoint again")
                if len(held[name].shape) == 3:
                    raise CheckpointError(
                        f"{module}: MLX stacks the experts of a layer, under a name of its own; these are not read"
                    )
                found.append(Weight(f"{module}.weight", parts))
                known.update(parts.values())
        for name, it in held.items():
            if name not in known and (it.dtype == torch.uint32 or name.endswith(f".{self.shift}")):
                raise CheckpointError(f"{name} belongs to no module with scales; fetch the checkpoint again")
            if self.channels_last and name.endswith(".weight") and len(it.shape) > 2 and it.dtype.is_floating_point:
                raise CheckpointError(
                    f"{name}: MLX keeps convolutions with their channels last, and the models that have them differ in "
                    f"other tensors too (norms, names); these are not read"
                )
        if any(self.shift in weight.parts for weight in found):
            self.notes.append(ROUNDED)
        return found

    def read(self, weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
        its = self._of(weight.name.removesuffix(".weight"))
        words = expect(tensors["weight"], weight.parts["weight"], (torch.uint32,), (None, None)).view(torch.int32)
        n, k = words.shape[0], words.shape[1] * 32 // its.bits
        if k % its.group or words.shape[1] * 32 % its.bits:
            raise CheckpointError(
                f"{weight.parts['weight']}: rows of {words.shape[1]} words are no whole groups of {its.group} codes of "
                f"{its.bits} bits"
            )
        grid = (n, k // its.group)
        if its.mode != AFFINE:
            return self._floats(weight, tensors, to_stream(words, k, its.bits), its, (n, k))
        scale = expect(tensors["scales"], weight.parts["scales"], FLOATS, grid)
        shift = expect(tensors[self.shift], weight.parts[self.shift], FLOATS, grid)
        parts, fmt = of_shifts(to_codes(words, k, its.bits), scale, shift, its.bits, its.group)
        return from_parts(parts, Scheme(weight=fmt), shape=(n, k), dtype=self.dtype)

    def _floats(
        self, weight: Weight, tensors: dict[str, Tensor], stream: Tensor, its: Settings, shape: tuple[int, int]
    ) -> Tensor:
        scheme = preset(FIXED[its.mode][2])
        grid = scheme.weight.scale_shape(*shape)
        scale = expect(tensors["scales"], weight.parts["scales"], (torch.uint8,), grid).contiguous()
        second = torch.ones(1, 1) if scheme.weight.global_scale else None
        parts = Quantized(
            stream.view(scheme.weight.number.storage), scale.view(scheme.weight.scale_dtype(self.dtype)), None, second
        )
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype)

    def _of(self, module: str) -> Settings:
        return self.own.get(module, self.common)
