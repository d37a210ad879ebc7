"""MLX (no ``quant_method``; ``quantization`` of config.json, repeated as ``quantization_config``), and ``quant_method:
metal`` of transformers, which only has the first mode. For a module [N, K], by ``mode``::

                                                                            bits              g
    affine   scales, biases float [N, K/g]    value = code * scale + bias   1 .. 6, 8         any that divides K
    mxfp4    scales uint8 [N, K/32], e8m0     value = e2m1(code) * scale    4                 32
    mxfp8    scales uint8 [N, K/32], e8m0     value = e4m3(code) * scale    8                 32
    nvfp4    scales uint8 [N, K/16], e4m3     value = e2m1(code) * scale    4                 16
             and rarely: global_scale         value = .. * global_scale / 2688

    weight uint32 [N, K * bits / 32]: codes along K, least significant bits first, crossing word boundaries

The E experts of a layer are stacked, [E, N, ..] and global_scale [E], under <block>.switch_mlp.gate_proj, up_proj and
down_proj; transformers concatenates the rows of the first two as <block>.experts.gate_up_proj, and has
<block>.experts.down_proj.

Metal calls the biases qbiases. Modules may have their own settings, under their path. For how biases become zero
points, see :mod:`bitport.interop.shifts`.

Tensors that are not quantized are as in PyTorch if the metadata of the files say so (format pt), as bitport's do.
Else convolutions have their channels last and some norms differ, which is not read. mlx-lm tells the two forms by the
shapes of convolutions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored
from bitport.interop.codec import Described, WeightNames, check_complete, refuse_lost, same_numbers
from bitport.interop.configuration import refuse_unknown, setting
from bitport.interop.shifts import ROUNDED, ROUNDED_BACK, of_shifts, to_shifts
from bitport.interop.words import from_codes, from_stream, to_codes, to_stream
from bitport.numerics import FLOATS, Format, Quantized
from bitport.numerics.codec import block_scale
from bitport.numerics.format import FLOAT8_SCALES
from bitport.numerics.packing import unpack_bits
from bitport.schemes import Scheme, preset
from bitport.tensor import QTensor, from_parts

BITS = (1, 2, 3, 4, 5, 6, 8)
GROUPS = (128, 64, 32)
"""The groups that MLX has kernels for: the first that divides a group of the weight is written."""
AFFINE = "affine"
FIXED = {"mxfp4": (32, 4, "mxfp4-wo"), "mxfp8": (32, 8, "mxfp8-wo"), "nvfp4": (16, 4, "nvfp4-wo")}
"""Mode -> its fixed group and bits, and its preset."""
GLOBAL = "global_scale"
SETTINGS = ("group_size", "bits", "mode", GLOBAL)
LARGEST = 2688
"""The largest product of e2m1 and e4m3: a global scale is the largest number of its matrix."""
APART = (
    "experts whose gate and up projections have global scales that differ get a scale in float32 for 16 weights, 6 "
    "bits for each"
)
INPUTS = "quantize_input"


SWITCH = ".switch_mlp."
JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameter of transformers -> the stacked projections that it consists of."""
STACKING = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe")
"""Models whose other tensors are the same as in transformers."""


@dataclasses.dataclass(frozen=True)
class Settings:
    group: int
    bits: int
    mode: str
    scaled: bool = False
    """Whether the settings announce a global scale; without them, the presence of the tensor decides."""

    @classmethod
    def of(cls, said: Mapping[str, Any], what: str) -> Settings:
        mode = setting(said, "mode", str, AFFINE)
        group, bits = FIXED.get(mode, (64, 4, ""))[:2]
        scaled = setting(said, GLOBAL, bool, False)
        its = cls(setting(said, "group_size", int, group), setting(said, "bits", int, bits), mode, scaled)
        if mode != AFFINE and (mode not in FIXED or (its.group, its.bits) != (group, bits)):
            fixed = ", ".join(f"{name} of {bits} bits in groups of {group}" for name, (group, bits, _) in FIXED.items())
            raise CheckpointError(
                f"{what}: {mode!r} of {its.bits} bits in groups of {its.group}; {AFFINE}, {fixed} are read"
            )
        if its.bits not in BITS or its.group < 1:
            raise CheckpointError(
                f"{what}: {its.bits} bits in groups of {its.group}; {', '.join(map(str, BITS))} bits are read"
            )
        if its.scaled and mode != "nvfp4":
            raise CheckpointError(f"{what}: {GLOBAL} with {mode!r}; nvfp4 alone has one")
        return its

    def said(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits} | ({} if self.mode == AFFINE else {"mode": self.mode})


class Reader(codec.Reader):
    known = (*SETTINGS, "quant_method", "modules_to_not_convert")  # a module is quantized if it has scales

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.shift = "qbiases" if config.get("quant_method") == "metal" else "biases"
        self.common = Settings.of(self.said, "quantization")
        self.own: dict[str, Settings] = {}
        """Path of a module -> its settings. The configuration also has true and false, for modules with the common
        settings and for those that are not quantized."""
        for path, said in config.items():
            if isinstance(said, dict):
                refuse_unknown(said, SETTINGS, f"quantization of {path}")
                self.own[path] = Settings.of(said, f"quantization of {path}")
        if config.get(INPUTS):
            raise CheckpointError(f"quantization: {INPUTS} rounds inputs too, in a way that is not read")

    def common_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key in SETTINGS or not isinstance(value, (dict, bool))}

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found: list[WeightNames] = []
        known: set[str] = set()
        for name in held:
            module, _, last = name.rpartition(".")
            if last == "scales":
                weight = (self._stacked if len(held[name].shape) == 3 else self._weight)(module, held)
                check_complete(name, weight.parts.values(), held)
                if not known.issuperset(weight.parts.values()):
                    found.append(weight)
                known.update(weight.parts.values())
        refuse_lost(
            held,
            found,
            lambda name, dtype: dtype == torch.uint32 or name.endswith(f".{self.shift}"),
            "module with scales; fetch the checkpoint again",
        )
        channels_last = self.shift == "biases" and self.metadata.get("format") != "pt"
        for name, it in held.items():
            if channels_last and name.endswith(".weight") and len(it.shape) > 2 and it.dtype.is_floating_point:
                raise CheckpointError(
                    f"{name}: MLX keeps convolutions with their channels last, and the models that have them differ in "
                    f"other tensors too (norms, names); these are not read"
                )
        if any(role.endswith(self.shift) for weight in found for role in weight.parts):
            self.notes.append(ROUNDED)
        if any(len([role for role in weight.parts if role.endswith(GLOBAL)]) > 1 for weight in found):
            self.notes.append(APART)
        return found

    def _weight(self, module: str, held: Mapping[str, FileTensor]) -> WeightNames:
        return WeightNames(f"{module}.weight", {end: f"{module}.{end}" for end in self._ends([module], held)})

    def _ends(self, modules: Iterable[str], held: Mapping[str, FileTensor]) -> list[str]:
        """Suffixes of the tensors that each of ``modules``, which form one parameter, has."""
        ends = ["weight", "scales"]
        for module in modules:
            its = self._of(module)
            scaled = its.scaled or (its.mode == "nvfp4" and f"{module}.{GLOBAL}" in held)
            more = {self.shift: its.mode == AFFINE, GLOBAL: scaled}
            ends += [end for end, there in more.items() if there and end not in ends]
        return ends

    def _stacked(self, module: str, held: Mapping[str, FileTensor]) -> WeightNames:
        """The parameter that contains the stacked experts ``module``, with all its parts."""
        block, switch, last = module.rpartition(SWITCH)
        found = next(((name, parts) for name, parts in JOINED.items() if last in parts), None)
        kind = self.model.get("model_type")
        if not switch or found is None or kind not in STACKING:
            raise CheckpointError(
                f"{module}: MLX stacks the experts of a layer, under names of its own; read are those of "
                f"{', '.join(STACKING)}, and this is a model of the kind {kind!r}"
            )
        name, projections = found
        modules = {each: f"{block}{SWITCH}{each}" for each in projections}
        if len({self._of(path) for path in modules.values()}) > 1:
            raise CheckpointError(f"{' and '.join(modules.values())} are one parameter, and have different settings")
        ends = self._ends(modules.values(), held)
        parts = {f"{each}.{end}": f"{path}.{end}" for each, path in modules.items() for end in ends}
        return WeightNames(f"{block}.experts.{name}", parts)

    def read(self, weight: Stored) -> Tensor:
        its, rank = self._of(next(iter(weight.names.values())).rpartition(".")[0]), 2
        if not weight.name.endswith(".weight"):
            weight, rank = _below_each_other(weight), 3
        words = weight.expect("weight", (torch.uint32,), (None,) * rank).view(torch.int32)
        *stack, n, width = words.shape
        k = width * 32 // its.bits
        if k % its.group or width * 32 % its.bits:
            raise CheckpointError(
                f"{weight.names['weight']}: rows of {width} words are no whole groups of {its.group} codes of "
                f"{its.bits} bits"
            )
        grid = (*stack, n, k // its.group)
        if its.mode == AFFINE:
            scale = weight.expect("scales", FLOATS, grid)
            shift = weight.expect(self.shift, FLOATS, grid)
            parts, fmt = of_shifts(to_codes(words, k, its.bits), scale, shift, its.bits, its.group)
        else:
            parts, fmt = self._floats(weight, to_stream(words, k, its.bits), its.mode, grid)
        return from_parts(parts, Scheme(weight=fmt), shape=(*stack, n, k), dtype=self.dtype)

    def _floats(self, weight: Stored, stream: Tensor, mode: str, grid: tuple[int, ...]) -> tuple[Quantized, Format]:
        fmt = preset(FIXED[mode][2]).weight
        scale = weight.expect("scales", (torch.uint8,), grid).contiguous()
        data, scale = stream.view(fmt.number.storage), scale.view(fmt.scale_dtype(self.dtype))
        if not fmt.global_scale:
            return Quantized(data, scale), fmt
        if (largest := weight.get(GLOBAL)) is None:
            return Quantized(data, scale, None, torch.ones(*grid[:-2], 1, 1, dtype=torch.float32)), fmt
        largest = largest if len(grid) > 2 else weight.number(GLOBAL).reshape(1, 1)
        rows = largest.float() / LARGEST
        second = rows[..., :1, :].contiguous()
        if bool((rows == second).all()):
            return Quantized(data, scale, None, second), fmt
        return Quantized(data, block_scale(scale, rows)), dataclasses.replace(fmt, scale="float32", global_scale=False)

    def _of(self, module: str) -> Settings:
        return self.own.get(module, self.common)


def _below_each_other(weight: Stored) -> Stored:
    """Stacked experts, [E, rows, ..], with the rows of all projections of an expert concatenated and global scales
    repeated for each row."""
    projections, ends = ([*dict.fromkeys(role.rpartition(".")[at] for role in weight.names)] for at in (0, 2))
    rows = {each: weight.expect(f"{each}.weight", (torch.uint32,), (None,) * 3).shape[1] for each in projections}
    first = projections[0]
    experts = len(weight[f"{first}.weight"])

    def part(projection: str, end: str) -> Tensor:
        role, like, n = f"{projection}.{end}", weight[f"{first}.{end}"], rows[projection]
        if end == GLOBAL:
            return weight.expect(role, FLOATS, (experts,)).float().reshape(-1, 1, 1).expand(-1, n, 1)
        return weight.expect(role, (like.dtype,), (experts, n, *like.shape[2:]))

    joined = {end: torch.cat([part(each, end) for each in projections], 1) for end in ends}
    return Stored(weight.name, dict.fromkeys(joined, next(iter(weight.names.values()))), joined)


class Writer(codec.Writer):
    """config.json holds the most common settings, and those of the other modules by path."""

    name = "mlx"
    keys: ClassVar[tuple[str, ...]] = ("quantization", "quantization_config")

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, Settings] = {}

    def refuses(self, q: Described) -> str | None:
        if wrong := codec.no_layer(q, "MLX quantizes", embeddings=True, conv1d=False):
            return wrong
        if q.scheme.act:
            return f"MLX uses inputs as they are, and {q.scheme} rounds them"
        if (its := _settings(q.scheme, q.shape[1])) is None:
            fixed = ", ".join(name for _, _, name in FIXED.values())
            return (
                f"MLX holds integers in groups of rows that are multiples of {GROUPS[-1]} columns, and {fixed}, not "
                f"{q.scheme} of {q.shape[1]} columns"
            )
        if q.shape[1] % its.group or q.shape[1] % q.scheme.weight.block_shape(*q.shape)[1]:
            return f"MLX has whole groups, and {q.shape[1]} columns do not divide into those of {q.scheme}"
        return codec.no_place(q, "MLX")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        module, k, its = name.removesuffix(".weight"), q.matrix.k, _settings(q.scheme, q.matrix.k)
        assert its is not None
        self.own[module] = its
        if its.mode != AFFINE:
            if q.scale2 is not None and not bool((q.scale2 == 1).all()):
                raise ArgumentError(f"{name} has the global scale {q.scale2.max().item():g}; nvfp4 of MLX has none")
            words = from_stream(q.qdata.view(torch.uint8), k, its.bits)
            return {name: words.view(torch.uint32), f"{module}.scales": q.scale.view(torch.uint8)}
        scale, shift, whole = to_shifts(q)
        if not whole:
            self.tell(ROUNDED_BACK)
        codes = unpack_bits(q.qdata, q.scheme.weight.number.bits, k)
        times = q.matrix.block_k // its.group
        return {
            name: from_codes(codes, its.bits).view(torch.uint32),
            f"{module}.scales": scale.repeat_interleave(times, -1),
            f"{module}.biases": shift.repeat_interleave(times, -1),
        }

    def config(self, left: list[str]) -> dict[str, Any]:
        common = Counter(self.own.values()).most_common(1)[0][0]
        return {**common.said(), **{module: its.said() for module, its in self.own.items() if its != common}}


def _settings(scheme: Scheme, k: int) -> Settings | None:
    """The settings for a matrix of ``k`` columns; None if MLX has none for the scheme."""
    fmt = scheme.weight
    for mode, (group, bits, name) in FIXED.items():
        if same_numbers(fmt, preset(name).weight):
            return Settings(group, bits, mode)
    size = fmt.block[1] or k
    group = next((group for group in GROUPS if size % group == 0), 0)
    if fmt.number.kind != "int" or fmt.block[0] != 1 or fmt.scale in FLOAT8_SCALES or not group:
        return None
    return Settings(group, min(bits for bits in BITS if bits >= fmt.number.bits), AFFINE)
