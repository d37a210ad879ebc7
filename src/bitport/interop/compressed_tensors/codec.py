"""compressed-tensors (``quant_method: compressed-tensors``), as written by llm-compressor and AutoRound. For a layer::

    pack-quantized                     weight_packed int32 [N, K*b/32]: codes along K; weight_shape int64: N, K
    int-, float-, naive-quantized      weight int8 or float8_e4m3 [N, K]
    mxfp8-quantized                    weight float8_e4m3 [N, K]
    nvfp4-, mxfp4-, mxfp6-pack-..      weight_packed uint8 [N, K*b/8]: the bit stream of bitport
    all of them                        weight_scale [1], [N, 1], [N, K/g] or [N/rows, K/columns]
    with zero points                   weight_zero_point int8, as weight_scale; packed: int32 [N*b/32, K/g], along N
    with static scales of inputs       input_scale [1]; for nvfp4 input_global_scale [1]

    value = (code - zero) * scale      nvfp4: code * (weight_scale / weight_global_scale)

Integers and their zero points are signed; packed ones have 2^(b-1) added, which makes them the codes of bitport. Before
version 0.17 packed codes did not cross word boundaries: the number of words tells, or the version if that is ambiguous.
Files of that time may have the group of each column (weight_g_idx); current versions of the library ignore it, so it is
read but not written.

All numbers are preserved but one: a global scale of nvfp4 divides here and multiplies in bitport. Its reciprocal is
rounded to float32, so that values are off by a relative 2^-22 at most. When writing, a number is chosen whose
reciprocal is the scale in bitport, if there is one, as for everything that was read from such a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.interop import codec
from bitport.interop.checks import Stored
from bitport.interop.codec import Described, WeightNames
from bitport.interop.compressed_tensors.arguments import FORMATS, PACKED, formats_of
from bitport.interop.compressed_tensors.groups import MIXED, NO_NUMBERS, READ, Groups, group_of, is_embedding
from bitport.interop.compressed_tensors.parts import Parts, roles_of
from bitport.interop.configuration import setting
from bitport.interop.words import from_codes, from_stream
from bitport.numerics import Quantized
from bitport.numerics.packing import from_storage, to_storage, unpack_bits
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

CACHE = re.compile(r"(.*\.)?([qkv]|output)_(scale|zero_point|global_scale)")
"""Scales of keys and values; older versions treated these as outputs of k_proj and v_proj."""
DENSE_SINCE = (0, 17)
ROUNDED = "the global scales of nvfp4 divide there: some have no reciprocal in float32, and the nearest was written"


class Reader(codec.Reader):
    known = READ | NO_NUMBERS

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.groups = Groups(config)
        version = re.match(r"(\d{1,9})\.(\d{1,9})", setting(config, "version", str, ""))
        self.padded = version is not None and (int(version[1]), int(version[2])) < DENSE_SINCE
        if config.get("kv_cache_scheme"):
            self.notes.append("kv_cache_scheme: the cache of keys and values is quantized there, and not by bitport")
        schemes = [group.scheme for group in self.groups.groups.values() if group is not None]
        if any(scheme.weight.global_scale for scheme in schemes):
            self.notes.append("the global scales of nvfp4 are kept as their reciprocals, rounded to float32")

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found: dict[str, None] = {}
        for name, tensor in held.items():
            last = name.rpartition(".")[2]
            if last in ("weight_packed", "weight_scale") or (last == "weight" and tensor.dtype.itemsize == 1):
                found[name.removesuffix(last)] = None
        return [self._weight(prefix, held) for prefix in found]

    def read(self, weight: Stored) -> Tensor:
        group = self.groups.of(_module(weight.name))
        scheme, parts = group.scheme, Parts(group, weight, self.padded)
        data, n, k = parts.codes()
        grid = scheme.weight.scale_shape(n, k)
        perm, number = parts.perm(k), scheme.weight.number
        if perm is not None:
            data = to_storage(from_storage(data, number, k)[:, perm.long()], number)
        scale2 = parts.scale2() if scheme.weight.global_scale else None
        quantized = Quantized(data, parts.scale(grid), parts.zero(n, grid), scale2)
        return from_parts(quantized, scheme, shape=(n, k), dtype=self.dtype, perm=perm, act_scale=parts.act_scale())

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        if not self.config.get("kv_cache_scheme"):  # else they may be parameters of the model
            return {}
        return {name: "scales of the cache of keys and values" for name in held if CACHE.fullmatch(name)}

    def _weight(self, prefix: str, held: Mapping[str, FileTensor]) -> WeightNames:
        group = self.groups.of(prefix.removesuffix("."))
        needed, optional = roles_of(group)
        if missing := [prefix + role for role in sorted(needed) if prefix + role not in held]:
            raise CheckpointError(
                f"{prefix}weight is in the format {group.format} and lacks {shortened(missing)}: fetch the checkpoint "
                f"again; if its weights were not compressed when it was saved, save it so"
            )
        roles = sorted(needed | {role for role in optional if prefix + role in held})
        return WeightNames(f"{prefix}weight", {role: prefix + role for role in roles})


class Writer(codec.Writer):
    """Writes a group for each scheme, in the format that the library chooses for it: integers are packed if inputs are
    not rounded, and bytes if they are."""

    name = "compressed-tensors"

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[Scheme, list[str]] = {}

    def refuses(self, q: Described) -> str | None:
        scheme, fmt = q.scheme, q.scheme.weight
        if wrong := codec.no_layer(q, "it is written for", embeddings=True):
            return wrong
        if not formats_of(fmt) or (fmt.dtype == "int1" and fmt.zero == "none"):
            return f"none of its formats ({', '.join(FORMATS)}) has the numbers of this scheme"
        if fmt.block[0] == 1 and fmt.block[1] and q.shape[1] % fmt.block[1]:
            return f"its groups have one size, and {q.shape[1]} columns are no multiple of {fmt.block[1]}"
        if "perm" in q.parts:
            return "its columns have no order of their own (act-order) since version 0.20; quantize without it"
        if "pre_scale" in q.parts:
            return "it has no scales that inputs are multiplied by (pre_scale)"
        if scheme.act == "nvfp4" and not scheme.static:
            return "it has nvfp4 inputs with a fixed global scale alone (nvfp4-static, nvfp4-wo)"
        if scheme.static != ("act_scale" in q.parts):
            return "it has a scale of inputs (act_scale) where the scheme says static, and there alone"
        return None

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        module, fmt, number, k = _module(name), q.scheme.weight, q.scheme.weight.number, q.matrix.k
        self.modules.setdefault(q.scheme, []).append(module)
        stored = _stored(q.scheme)
        parts = {"weight": q.qdata, "weight_scale": q.scale}
        if stored == PACKED:
            parts = {
                "weight_packed": from_stream(q.qdata, k, number.bits),
                "weight_shape": torch.tensor(list(q.shape)),
                "weight_scale": q.scale,
            }
        elif number.kind == "int":
            parts["weight"] = _signed(unpack_bits(q.qdata, number.bits, k), number.bits)
        elif number.storage == torch.uint8:
            parts["weight_packed"] = parts.pop("weight")
        if fmt.scale == "e8m0":
            parts["weight_scale"] = q.scale.view(torch.uint8)
        if q.zero is not None:
            if int(q.zero.max()) > number.qmax:
                raise ArgumentError(
                    f"{name} has the zero point {int(q.zero.max())}; {number.bits} bits hold {number.qmax}"
                )
            along_n = stored == PACKED and fmt.block[0] == 1
            parts["weight_zero_point"] = (
                from_codes(q.zero.t().contiguous(), number.bits).t().contiguous()
                if along_n
                else _signed(q.zero, number.bits)
            )
        if fmt.block == (0, 0):
            parts.update(
                {role: parts[role].reshape(1) for role in ("weight_scale", "weight_zero_point") if role in parts}
            )
        if q.scale2 is not None:
            parts["weight_global_scale"] = self._divisor(q.scale2, name)
        if q.act_scale is not None and q.scheme.act == "nvfp4":
            parts["input_global_scale"] = self._divisor(q.act_scale, name)
        elif q.act_scale is not None:
            parts["input_scale"] = q.act_scale.reshape(1)
        return {f"{module}.{role}": part for role, part in parts.items()}

    def _divisor(self, factor: Tensor, name: str) -> Tensor:
        """A number whose reciprocal is ``factor``, or the nearest if there is none."""
        nearest = 1 / factor.reshape(1)
        if not 0 < float(nearest) < float("inf"):
            raise ArgumentError(f"{name}: {float(factor):g}, its global scale, has no reciprocal in float32")
        ends = torch.tensor([0.0, float("inf")], dtype=torch.float32)
        candidates = torch.cat([nearest, torch.nextafter(nearest, ends)])
        exact = candidates[1 / candidates == factor.reshape(1)]
        if not exact.numel():
            self.tell(ROUNDED)
        return exact[:1] if exact.numel() else nearest

    def config(self, left: list[str]) -> dict[str, Any]:
        alone = len(self.modules) == 1 and not any(map(is_embedding, *self.modules.values()))
        groups = {
            f"group_{at}": group_of(scheme, ["Linear"] if alone else modules, _stored(scheme))
            for at, (scheme, modules) in enumerate(self.modules.items())
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": self.name,
            "quantization_status": "compressed",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "config_groups": groups,
            "ignore": left,
        }


def _module(weight: str) -> str:
    return weight.removesuffix("weight").removesuffix(".")


def _stored(scheme: Scheme) -> str:
    first, *others = formats_of(scheme.weight)
    return others[0] if first == PACKED and scheme.act else first


def _signed(codes: Tensor, bits: int) -> Tensor:
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
