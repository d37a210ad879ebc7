"""optimum-quanto (``quant_method: quanto``). Its quanto_qmap.json, or quantization_map.json, has for each module
{"weights": .., "activations": ..}; the quantization_config of diffusers has one kind for all. For a weight [N, K, ..]::

    qint8                weight._data int8 [N, K, ..]         weight._scale [N, 1, ..]       value = code * scale
    qfloat8_e4m3fn,
    qfloat8_e5m2         weight._data of that dtype           likewise

    qint4, qint2         weight._data._data uint8 [G/c, g]    weight._scale, _shift [G, 1]

    value = code * scale - shift, or (code - shift) * scale if shift is an integer

G is N*K/g, or N for a weight without groups, whose codes have the shape of the weight. A byte holds c = 2 or 4 codes of
one column that are G/c rows apart (rounded up), the first in the lowest bits.

N and K of weights with groups are not in the files. There are groups if K > 128 and one of 128, 96, 64, 32, in this
order, divides it; N is the length of the bias (a convolution then becomes [N, K]), or else that in the model described
by config.json.

With activations, the input of a linear layer is rounded with input_scale, and outputs, including those of norms, with
output_scale: bitport only rounds inputs. For how shifts become zero points, see :mod:`bitport.interop.shifts`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored, exactly, expect
from bitport.interop.codec import Described, WeightNames, check_complete, refuse_lost
from bitport.interop.configuration import setting
from bitport.interop.shifts import ROUNDED, of_shifts, to_shifts
from bitport.interop.skeleton import shapes_of
from bitport.interop.words import of_rows_apart, to_rows_apart
from bitport.numerics import FLOATS, Quantized
from bitport.numerics.format import FLOAT8_SCALES
from bitport.numerics.packing import from_signed, to_signed, unpack_bits
from bitport.schemes import Scheme, preset
from bitport.schemes.presets import CHANNEL
from bitport.tensor import QTensor, from_parts

WHOLE = {
    "qint8": (torch.int8, "int8"),
    "qfloat8_e4m3fn": (torch.float8_e4m3fn, "fp8-wo"),
    "qfloat8_e5m2": (torch.float8_e5m2, "fp8-e5m2-wo"),
}
"""Kind of weights -> their dtype in the files, and the preset."""
PACKED = {"qint4": 4, "qint2": 2}
"""Kind -> bits."""
ACTS = {"none": "", "qint8": "int8-tensor", "qfloat8_e4m3fn": "fp8-tensor"}
LONG = {"int8": "qint8", "int4": "qint4", "int2": "qint2", "float8": "qfloat8_e4m3fn"}
"""Kinds as named in quantization_config -> in the map."""
COMMON = ("weights_dtype", "weights", "activations")
GROUPS = (128, 96, 64, 32)
MAP = "quanto_qmap.json"
ENDS = {
    "._data._data": ({"data": "._data._data", "scale": "._scale", "shift": "._shift"}, (*PACKED,)),
    "._data": ({"data": "._data", "scale": "._scale"}, (*WHOLE,)),
}
"""Suffix of the name of a weight's codes -> suffixes of all its parts, and the kinds that use it."""
INPUT, OUTPUT = "input_scale", "output_scale"
OUTPUTS = (
    "quanto rounds outputs of layers too (output_scale), and does not round an input again that comes rounded; here "
    "inputs are rounded, with input_scale, and outputs are not"
)

Parts = tuple[Quantized, Scheme, tuple[int, ...]]


class Kinds(NamedTuple):
    weights: str
    activations: str

    @classmethod
    def of(cls, weights: Any, activations: Any, what: str) -> Kinds:
        known = {"weights": ("none", *WHOLE, *PACKED), "activations": (*ACTS,)}
        for key, given in (("weights", weights), ("activations", activations)):
            if given not in known[key]:
                raise CheckpointError(f"{what}: {key} of quanto are {given!r}; {', '.join(known[key])} are read")
        return cls(weights, activations)


class Reader(codec.Reader):
    known = (*COMMON, "quant_method", "modules_to_not_convert")

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        maps = {module: said for module, said in config.items() if isinstance(said, dict)}
        for module, said in maps.items():
            if set(said) != set(Kinds._fields):
                raise CheckpointError(
                    f"{module}: quanto says {list(said)}; {' and '.join(Kinds._fields)} are understood"
                )
        self.own = {it: Kinds.of(said["weights"], said["activations"], it) for it, said in maps.items()}
        whole, older, acts = (setting(self.said, key, str, "none") for key in COMMON)
        weights = older if whole == "none" else whole
        self.common = Kinds.of(LONG.get(weights, weights), LONG.get(acts, acts), "quantization_config")

    def common_settings(self, config: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if not isinstance(value, dict)}

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        self.held = held
        ends = {name: next((end for end in ENDS if name.endswith(end)), None) for name in held}
        found = [self._weight(name, end) for name, end in ends.items() if end]
        names = {weight.name for weight in found}
        for module, its in self.own.items():
            if its.weights != "none" and f"{module}.weight" not in names:
                raise CheckpointError(f"{module} is {its.weights}, and its weight is not there: freeze it first")
        refuse_lost(held, found, lambda name, _: name.endswith(("._scale", "._shift")), "weight that is quantized")
        if any("shift" in weight.parts for weight in found):
            self.notes.append(ROUNDED)
        if any(its.activations != "none" for its in (*self.own.values(), self.common)):
            self.notes.append(OUTPUTS)
        return found

    def _weight(self, name: str, end: str) -> WeightNames:
        parameter, (roles, kinds) = name.removesuffix(end), ENDS[end]
        module, _, last = parameter.rpartition(".")
        parts = {role: parameter + end for role, end in roles.items()}
        check_complete(name, parts.values(), self.held)
        if last != "weight" or parameter in self.held:
            raise CheckpointError(f"{name} must be of a weight, and the only form of it; fetch the checkpoint again")
        if (its := self._of(module).weights) not in kinds:
            raise CheckpointError(f"{name} is of a weight that is said to be {its}, not {' or '.join(kinds)}")
        scales = {role: f"{module}.{role}" for role in (INPUT, OUTPUT) if f"{module}.{role}" in self.held}
        return WeightNames(parameter, parts | scales)

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        norms = [module for module, its in self.own.items() if its.weights == "none"]
        scales = [f"{module}.{end}" for module in norms for end in (INPUT, OUTPUT)]
        return {name: "scales of what norms give (output_scale)" for name in scales if name in held}

    def read(self, weight: Stored) -> Tensor:
        its = self._of(weight.name.rpartition(".")[0])
        parts, scheme, shape = (self._packed if "shift" in weight else self._whole)(weight, its.weights)
        act, act_scale = ACTS[its.activations] if len(shape) == 2 else "", None
        if act:
            if INPUT not in weight:
                raise CheckpointError(f"{weight.name} rounds its inputs, and its {INPUT} is not there")
            act_scale = weight.expect(INPUT, FLOATS, ()).float()
            scheme = dataclasses.replace(scheme, act=act, static=True)
            if its.weights == its.activations == "qint8":
                parts, scheme = parts._replace(scale=parts.scale.float()), preset("int8-static")
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype, act_scale=act_scale)

    def _whole(self, weight: Stored, kind: str) -> Parts:
        (dtype, name), ones = WHOLE[kind], (1,) * max(weight["data"].dim() - 1, 1)
        given = weight.expect("data", (dtype,), (None,) * (1 + len(ones)))
        n, scale = given.shape[0], weight["scale"]
        expect(scale, weight.names["scale"], FLOATS, () if n == 1 and scale.dim() == 0 else (n, *ones))
        data, scale = given.reshape(n, -1).contiguous(), scale.reshape(n, 1).contiguous()
        if kind == "qint8":
            return Quantized(from_signed(data), scale), preset(name), tuple(given.shape)
        return Quantized(data, scale.float()), preset(name), tuple(given.shape)

    def _packed(self, weight: Stored, kind: str) -> Parts:
        bits, ones = PACKED[kind], (1,) * max(weight["data"].dim() - 1, 1)
        scale = weight.expect("scale", FLOATS, (None, *ones))
        count, highest = scale.shape[0], (1 << bits) - 1
        shift = weight.expect("shift", (scale.dtype, torch.uint8, torch.int8), scale.shape)
        rows = (-(-count * bits // 8), *(None,) * len(ones))
        data = weight.expect("data", (torch.uint8,), rows)
        n = (shape := self._shape(weight, count, tuple(data.shape[1:])))[0]
        codes = of_rows_apart(data, range(0, 8, bits), bits)[:count].reshape(n, -1)
        scale, shift = scale.reshape(n, -1), shift.reshape(n, -1)
        if not shift.is_floating_point():
            if int(shift.min()) < 0 or int(shift.max()) > highest:
                raise CheckpointError(f"{weight.names['shift']} must be from 0 to {highest}, as {bits} bits are")
            shift = shift.double() * scale.double()
        parts, fmt = of_shifts(codes, scale, -shift, bits, codes.shape[1] // scale.shape[1])
        return parts, Scheme(weight=fmt if count > n else dataclasses.replace(fmt, block=(1, 0))), shape

    def _shape(self, weight: Stored, count: int, rest: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight with ``count`` rows of codes of shape ``rest``."""
        if len(rest) > 1 or rest[0] not in GROUPS:
            return (count, *rest)
        total, bias = count * rest[0], self.held.get(weight.name.removesuffix("weight") + "bias")
        if bias is None:
            n, k = shape if len(shape := self._shape_of(weight.name) or ()) == 2 else (0, 0)
        else:
            n, k = (bias.shape[0], total // bias.shape[0]) if any(bias.shape) else (0, 0)
        group = _group(k)
        if n * k != total or group != rest[0]:
            raise CheckpointError(
                f"{weight.names['data']}: {count} groups of {rest[0]} make no weight of {n} rows, as its bias has or "
                f"the model that config.json describes"
            )
        return n, k

    @functools.cached_property
    def _shape_of(self) -> Callable[[str], tuple[int, ...] | None]:
        return shapes_of(self.model, len(self.held))

    def _of(self, module: str) -> Kinds:
        return self.own.get(module, self.common)


class Writer(codec.Writer):
    """Writes linear layers in the dtype of the model, without rounding inputs: quanto has one dtype for a weight and
    its scales. config.json says nothing of it, as with quanto itself."""

    name = "quanto"

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}

    def refuses(self, q: Described) -> str | None:
        if wrong := codec.no_layer(q, "quanto is written for", conv1d=False):
            return wrong
        if (kind := _kind(q.scheme)) is None:
            return f"quanto holds int8, fp8-wo and fp8-e5m2-wo, and int4 and int2 in groups, not {q.scheme}"
        if extra := codec.no_place(q, "quanto"):
            return extra
        k, group = q.shape[1], q.scheme.weight.block_shape(*q.shape)[1]
        if kind in PACKED and (k % group or group % _group(k)):
            return f"quanto has groups of {_group(k)} where a row has {k} columns, and {group} is no multiple of it"
        return None

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        module, kind = name.removesuffix(".weight"), _kind(q.scheme)
        assert kind is not None
        self.kinds[module] = kind
        ones = {f"{module}.{end}": torch.ones((), dtype=q.dtype) for end in (INPUT, OUTPUT)}
        if kind in WHOLE:
            data = to_signed(q.qdata) if kind == "qint8" else q.qdata
            scale = exactly(q.scale, q.dtype, f"{name}: a scale of quanto")
            return {f"{name}._data": data, f"{name}._scale": scale, **ones}
        group, bits = _group(q.matrix.k), PACKED[kind]
        codes = unpack_bits(q.qdata, bits, q.matrix.k).reshape(-1, group)
        data = to_rows_apart(codes, range(0, 8, bits))
        parts = {"_scale": exactly(q.scale, q.dtype, f"{name}: a scale of quanto"), "_shift": _shift(q, name, group)}
        times = q.matrix.block_k // group
        spread = {role: part.repeat_interleave(times, -1).reshape(-1, 1) for role, part in parts.items()}
        return {f"{name}._data._data": data, **{f"{name}.{role}": part for role, part in spread.items()}, **ones}

    def config(self, left: list[str]) -> dict[str, Any] | None:
        return None

    def files(self) -> dict[Path, str]:
        said = {module: {"weights": kind, "activations": "none"} for module, kind in self.kinds.items()}
        return {Path(MAP): json.dumps(said, indent=4)}


def _kind(scheme: Scheme) -> str | None:
    fmt = scheme.weight
    if scheme.act or fmt.scale in FLOAT8_SCALES:
        return None
    whole = {preset(name).weight.dtype: kind for kind, (_, name) in WHOLE.items()}
    packed = {f"int{bits}": kind for kind, bits in PACKED.items()}
    found = packed.get(fmt.dtype) if fmt.block[0] == 1 else None
    return found or (whole.get(fmt.dtype) if fmt.block == CHANNEL and fmt.zero == "none" else None)


def _group(k: int) -> int:
    """The group for rows of ``k`` columns."""
    return next((group for group in GROUPS if k % group == 0), k) if k > GROUPS[0] else k


def _shift(q: QTensor, name: str, group: int) -> Tensor:
    """Integer zero points unchanged; others, or the midpoint if there are none, times their scale."""
    bits = q.scheme.weight.number.bits
    if q.scheme.weight.zero == "int":
        assert q.zero is not None
        if (bits, group, q.dtype) == (4, GROUPS[0], torch.bfloat16):
            raise ArgumentError(
                f"{name}: quanto loads no whole zero points of int4 in groups of {group} in bfloat16; quantize it with "
                f"-sym, or in float16"
            )
        if int(q.zero.max()) >= 1 << bits:
            raise ArgumentError(f"{name} has the zero point {int(q.zero.max())}; quanto has {bits} bits for it")
        return q.zero.to(torch.int8)
    _, shift, whole = to_shifts(q)
    if shift.dtype != q.dtype or not whole:
        raise ArgumentError(f"{name}: a zero point times its scale is no {q.dtype}, in which quanto keeps it")
    return -shift
