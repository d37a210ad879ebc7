"""The formats of quantized weights in ComfyUI. In older files, marked by the tensor scaled_fp8, all have the same one::

    <layer>.weight         float8_e4m3fn or float8_e5m2 [N, K]
    <layer>.scale_weight   one number; 1 if absent
    <layer>.scale_input    one number, by which some programs round inputs

In later files ``<layer>.comfy_quant``, JSON in uint8, is ``{"format": ..}``, or _quantization_metadata in the header
has all of them, ``{"layers": {<layer>: {"format": ..}}}``::

    format                       weight                         weight_scale             weight_scale_2
    float8_e4m3fn, float8_e5m2   the same [N, K]                one number
    int8_tensorwise              int8 [N, K]                    one number or [N, 1]
    mxfp8                        float8_e4m3fn [N, K]           e8m0 [N, K/32], tiles
    nvfp4                        uint8 [N, K/2]: e2m1,          e4m3 [N, K/16], tiles    one number
                                 the even one high

    value = weight * weight_scale [* weight_scale_2]

Files of Black Forest Labs do not name the format, and hold one of these::

    weight                         weight_scale                    weight_scale_2
    float8_e4m3fn [N, K]           float [N]
    uint8 [N, K/2]: e2m1,          e4m3 [N, K/16], in rows         one number
    the even one low

For tiles see :mod:`bitport.interop.swizzle`. Inputs are multiplied by ``<layer>.pre_quant_scale`` [K], if present;
ComfyUI rounds them with ``input_scale``, or with their maximum, unless full_precision_matrix_mult is set.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.parse import parsed_object
from bitport.checkpoint.safetensors_reader import SafetensorsReader, Span
from bitport.errors import CheckpointError
from bitport.interop.checks import E4M3, FLOAT8, as_grid, expect, number_in
from bitport.interop.configuration import refuse_unknown
from bitport.interop.diffusers_model import PREFIX
from bitport.interop.swizzle import unswizzled
from bitport.numerics import FLOATS, Format, Quantized
from bitport.numerics.packing import from_signed
from bitport.schemes import Scheme, preset
from bitport.schemes.presets import CHANNEL, TENSOR

BLOCKS = {"mxfp8": preset("mxfp8-wo"), "nvfp4": preset("nvfp4-wo")}
NUMBERS = {
    "float8_e4m3fn": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
    "int8_tensorwise": "int8",
    **{name: scheme.weight.dtype for name, scheme in BLOCKS.items()},
}
"""Format -> number type of its weights."""
SAID = ("format", "full_precision_matrix_mult", "group_size")
MARK = ("scaled_fp8", f"{PREFIX}scaled_fp8")
OLD_SCALE, SCALE, SECOND, BEFORE = "scale_weight", "weight_scale", "weight_scale_2", "pre_quant_scale"
INPUTS = ("scale_input", "input_scale")
DESCRIPTION, METADATA = "comfy_quant", "_quantization_metadata"
FACTORS = (OLD_SCALE, SCALE, SECOND, BEFORE)
ROLES = (*FACTORS, *INPUTS, DESCRIPTION)
VERSION = "1.0"
"""The format_version of METADATA."""
LONGEST = 1 << 16
"""The most bytes of a description."""
Tensors = Callable[[str], Tensor]
"""Returns a tensor by name."""


class ComfyWeight(NamedTuple):
    """A quantized tensor. ``shape``: the logical one, [N, ..]; ``scale``, ``second``, ``before``: names of its other
    tensors; ``unnamed``: whether it is of Black Forest Labs, whose codes of 4 bits and scales lie as in bitport."""

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    scale: str | None = None
    second: str | None = None
    before: str | None = None
    unnamed: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        return (self.shape or (1,))[0], math.prod(self.shape[1:])

    def read(self, tensor: Tensors) -> Quantized:
        fmt, (n, k) = self.scheme.weight, self.matrix
        data = tensor(self.name).reshape(n, k * fmt.number.bits // 8)
        if fmt.number.bits == 4 and not self.unnamed:
            data = data << 4 | data >> 4
        elif data.dtype == torch.int8:
            data = from_signed(data)
        second = None if self.second is None else number_in(tensor(self.second), self.second).reshape(1, 1)
        return Quantized(data, self._scale(tensor, fmt.scale_shape(n, k)), None, second)

    def factors(self, tensor: Tensors) -> Tensor | None:
        """The factors that inputs are multiplied by."""
        return None if self.before is None else expect(tensor(self.before), self.before, FLOATS, self.matrix[1:])

    def _scale(self, tensor: Tensors, grid: tuple[int, int]) -> Tensor:
        if self.scale is None:
            return torch.ones(grid, dtype=torch.float32)
        if grid == (1, 1):
            return number_in(tensor(self.scale), self.scale).reshape(grid)
        scale, wanted = tensor(self.scale), self.scheme.weight.scale_dtype(torch.float32)
        if wanted.itemsize > 1:
            return expect(as_grid(scale, grid), self.scale, FLOATS, grid).float()
        if self.unnamed:
            return expect(scale, self.scale, (wanted,), grid)
        return unswizzled(scale, self.scale, (wanted, torch.uint8), grid).view(wanted)


def stored_in(reader: SafetensorsReader) -> dict[str, ComfyWeight]:
    """The quantized tensors by name. In a file with several models, those of the diffusion model."""
    held = reader.tensors
    prefix = PREFIX if any(name.startswith(PREFIX) for name in held) else ""
    ours = {name: span for name, span in held.items() if name.startswith(prefix)}
    said = {layer: each for layer, each in _said(reader, ours) if layer.startswith(prefix)}
    found = {f"{layer}.weight": _described(layer, each, held) for layer, each in said.items()}
    for name, span in ours.items():
        layer, _, last = name.rpartition(".")
        weight = f"{layer}.weight"
        if last in ROLES and weight not in held:
            raise CheckpointError(f"{name} is there without {weight}; fetch the file again")
        if last in (SCALE, SECOND) and layer not in said:
            found[weight] = _unnamed(layer, held, alone=not said)
        if span.dtype in FLOAT8 and name not in found and last not in ROLES and name not in MARK:
            old = f"{layer}.{OLD_SCALE}"
            scale = old if last == "weight" and old in held else None
            found[name] = ComfyWeight(name, span.shape, _scheme(FLOAT8[span.dtype], TENSOR), scale)

    def described(name: str) -> Tensor:
        return torch.empty(held[name].shape, dtype=held[name].dtype, device="meta")

    for one in found.values():  # mismatches are reported before any data is read
        one.read(described)
        one.factors(described)
    used = {part for one in found.values() for part in (one.scale, one.second, one.before)}
    for name in ours:
        layer, _, last = name.rpartition(".")
        if last not in FACTORS or name in used or (last == OLD_SCALE and number_in(reader.read(name), name) == 1):
            continue
        raise CheckpointError(
            f"{name}: the format of {layer}.weight, {held[f'{layer}.weight'].dtype}, has none: without it the numbers "
            f"may be wrong. Take another file"
        )
    return found


def is_role(name: str) -> bool:
    """Whether the tensor is not part of the model, but describes one that is."""
    return name in MARK or name.rpartition(".")[2] in ROLES


def is_theirs(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor looks like one of a ComfyUI file."""
    return dtype in FLOAT8 or name.endswith(f".{DESCRIPTION}")


def _said(reader: SafetensorsReader, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (layer, its description); a description next to the weight comes last, and takes precedence."""
    if METADATA in reader.metadata:
        every = parsed_object(reader.metadata[METADATA], METADATA)
        if str(version := every.get("format_version", VERSION)) != VERSION:
            raise CheckpointError(f"{METADATA} has the format_version {reprlib.repr(version)}; {VERSION} is read")
        layers = every.get("layers")
        if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
            raise CheckpointError(f'{METADATA} must be {{"layers": {{name: {{"format": ..}}}}}}; fetch the file again')
        yield from layers.items()
    for name in names:
        layer, _, last = name.rpartition(".")
        if last == DESCRIPTION:
            span = reader.tensors[name]
            if span.dtype != torch.uint8 or span.end - span.start > LONGEST:
                raise CheckpointError(f"{name} must be uint8, up to {LONGEST} bytes, not {span.dtype} {[*span.shape]}")
            yield layer, parsed_object(bytes(reader.read(name).flatten().tolist()), name)


def _described(layer: str, said: Mapping[str, Any], held: Mapping[str, Span]) -> ComfyWeight:
    name, form = f"{layer}.weight", said.get("format")
    if not isinstance(form, str) or form not in NUMBERS:
        raise CheckpointError(f"{layer} has the format {form!r}; {', '.join(NUMBERS)} are read: take another file")
    refuse_unknown(said, SAID, layer)
    parts = {role: f"{layer}.{role}" for role in ((SCALE, SECOND) if form == "nvfp4" else (SCALE,))}
    if lost := [part for part in (name, *parts.values()) if part not in held]:
        raise CheckpointError(f"{layer} has the format {form}, and {lost[0]} is missing; fetch the file again")
    span, before = held[name], f"{layer}.{BEFORE}"
    rows = math.prod(held[parts[SCALE]].shape) > 1
    scheme = BLOCKS.get(form) or _scheme(NUMBERS[form], CHANNEL if form == "int8_tensorwise" and rows else TENSOR)
    number = scheme.weight.number
    dtype = torch.int8 if form == "int8_tensorwise" else number.storage
    if span.dtype != dtype or len(span.shape) != 2 or not math.prod(span.shape):
        raise CheckpointError(f"{name} must be {dtype} [N, K] for {form}, not {span.dtype} {[*span.shape]}")
    if (group := said.get("group_size")) not in (None, 0, scheme.weight.block[1]):
        raise CheckpointError(f"{layer}: {form} with group_size {group!r}; it always has {scheme.weight.block[1]}")
    shape = (span.shape[0], span.shape[1] * 8 // number.bits)
    return ComfyWeight(name, shape, scheme, parts[SCALE], parts.get(SECOND), before if before in held else None)


def _unnamed(layer: str, held: Mapping[str, Span], alone: bool) -> ComfyWeight:
    """A weight of Black Forest Labs. ``alone``: whether the file names no format of others, as theirs do not."""
    name, scale, second = (f"{layer}.{role}" for role in ("weight", SCALE, SECOND))
    weight, its = held[name], held.get(scale)
    if alone and its and len(weight.shape) == 2 and all(weight.shape):
        n, k = weight.shape
        if second in held and (weight.dtype, its.dtype) == (torch.uint8, E4M3):
            return ComfyWeight(name, (n, 2 * k), BLOCKS["nvfp4"], scale, second, unnamed=True)
        if second not in held and weight.dtype == E4M3 and its.shape == (n,):
            return ComfyWeight(name, (n, k), _scheme(FLOAT8[E4M3], CHANNEL), scale, unnamed=True)
    raise CheckpointError(
        f"{scale if its else second}: neither {layer}.{DESCRIPTION} nor {METADATA} says in which format, and it is "
        f"neither of Black Forest Labs, who name none: float8 with a scale for each row, nvfp4 with scales in rows"
    )


def _scheme(number: str, block: tuple[int, int]) -> Scheme:
    return Scheme(weight=Format(dtype=number, block=block))
