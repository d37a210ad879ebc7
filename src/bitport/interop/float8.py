"""Float8 (``quant_method: fp8``, ``mxfp8``) of DeepSeek, transformers and vLLM. For a layer [N, K], or E stacked ones::

    weight              float8_e4m3fn [.., N, K]
    weight_scale_inv    one scale per block of weight_block_size (rows, columns), rounded up at the edges; without
    or weight_scale     blocks one per tensor or per row
    or scale
    activation_scale    with activation_scheme static: one number for the input of the layer
    or input_scale

    value = weight * scale

even if the name says "inv", except for GPTQModel, which divides and says so: weight_scale_semantics inverse. Scales are
floats, or powers of two: e8m0, or the same as uint8, as in mxfp8, whose blocks are [1, 32]. The scales of a parameter
that is not called weight are ``<name>_scale_inv``. Experts of DeepSeek-V4 are mxfp4 (expert_dtype fp4)::

    weight              int8 [N, K/2]: two e2m1 codes per byte, the even one low
    scale               e8m0 [N, K/32]

Modules listed in quantized_layers (with moe_quant_algo) are in the format of ModelOpt.

With activation_scheme dynamic, the default, inputs have a scale per 128 columns, or, if the weight has no blocks, per
token. With null, which AMD Quark writes, inputs are not quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import codec, gptq, modelopt
from bitport.interop.checks import E4M3, E8M0, POWERS, Stored, expect
from bitport.interop.codec import Described, WeightNames, refuse_lost
from bitport.interop.configuration import one_of, refuse_unknown, setting
from bitport.numerics import FLOATS, Format, Quantized
from bitport.schemes import PRESETS, Scheme
from bitport.schemes.presets import CHANNEL, TENSOR
from bitport.tensor import QTensor, from_parts

OTHERS = (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALES, INPUT_SCALES = ("_scale_inv", "_scale"), ("activation_scale", "input_scale")
BARE = "scale"
"""The name of the scales of weight in DeepSeek-V4."""
LONGEST = 1 << 16
"""The most rows or columns of a block."""
CACHE = re.compile(r".*attn.*\.(([qkv]|kv|prob)_scale|(prob_)?output_scale)")
"""Scales of a quantized key-value cache, one number each."""
SEMANTICS = "weight_scale_semantics"
DIVISORS = (
    "scales of weights divide there, and are kept as their reciprocals, rounded to float32; inputs, which GPTQModel "
    "rounds on some processors, are used as they are"
)
BLOCK, MX, FP4 = PRESETS["fp8-block"], PRESETS["mxfp8"], PRESETS["mxfp4"].weight


class Reader(codec.Reader):
    known = (
        *("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype", SEMANTICS),
        *("quant_algo", "moe_quant_algo", "quantized_layers", *modelopt.CACHE, *modelopt.SAID_TWICE),
        *("ignored_layers", "modules_to_convert", "dequantize", "extra_config", "packing_format", "export"),
        *("method", "format", "checkpoint_format", "weight_scale_method", "bits", "group_size", "sym", "data_type"),
        *("act_bits", "pack_dtype", "dynamic", *gptq.CHOOSING),
    )

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn"))
        one_of(config, "expert_dtype", ("fp8", "fp4"))
        dynamic = setting(config, "dynamic", dict, {})
        for pattern in dynamic:  # an exclusion has no settings
            refuse_unknown(setting(dynamic, pattern, dict, {}), (), f"dynamic of {pattern!r}")
        self.beside = _beside(config, dtype)
        """The reader for weights that are not float8."""
        mx = config.get("quant_method") == "mxfp8"
        powers = one_of(config, "scale_fmt", ("float", "ue8m0")) == "ue8m0" or mx
        self.static = one_of(config, "activation_scheme", ("dynamic", "static")) == "static"
        self.block = _block_size(config)
        if mx:
            if self.block not in (None, MX.weight.block):
                raise CheckpointError(f"mxfp8 with weight_block_size {[*self.block]}: {[*MX.weight.block]} is read")
            self.block = MX.weight.block
        self.divides = SEMANTICS in config and one_of(config, SEMANTICS, ("inverse",)) == "inverse"
        if self.divides:
            self.act = ""
            self.notes.append(DIVISORS)
        elif self.static:
            self.act = "fp8-tensor"
        elif config.get("activation_scheme", "dynamic") is None:
            self.act = ""
        elif self.block is None:
            self.act = "fp8"
            self.notes.append("inputs are rounded with one scale a token; some programs take one for all tokens")
        elif self.block[1] == 128:
            self.act = "fp8-128"
        elif self.block == MX.weight.block and powers:
            self.act = MX.act
        else:
            self.act = ""
            self.notes.append(
                f"inputs are used as they are: no scheme rounds them in blocks of {self.block[1]} columns"
            )
        if powers and self.act not in ("", MX.act) and not self.static:
            self.notes.append("scales of inputs are any float32; scale_fmt ue8m0 rounds them up to powers of two")

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        theirs = {name: it for name, it in held.items() if self.beside and self.beside.has(name)}
        held = {name: it for name, it in held.items() if name not in theirs}
        found = self._weights(held)
        if self.beside:
            found += self.beside.weights(theirs)
            self.notes += self.beside.notes
        return found

    def _weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        found = []
        for name, it in held.items():
            if it.dtype in OTHERS:
                raise CheckpointError(f"{name} is {it.dtype}; {E4M3} is read")
            if it.dtype == E4M3 or _is_fp4(name, held):
                found.append(WeightNames(name, self._parts(name, held)))
        refuse_lost(held, found, _is_part, f"weight in {E4M3}, nor in fp4 with scales in {E8M0}: those are read")
        return found

    def _parts(self, name: str, held: Mapping[str, FileTensor]) -> dict[str, str]:
        module = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
        scales = [name + end for end in SCALES if name + end in held]
        if not scales and module + BARE in held and name.endswith(".weight"):
            scales = [module + BARE]
        inputs = [module + end for end in INPUT_SCALES if module + end in held]
        if len(scales) != 1 or len(inputs) != self.static:
            wanted = "one scale" + (f" and one of its input ({' or '.join(INPUT_SCALES)})" if self.static else "")
            scheme = "static" if self.static else "dynamic"
            raise CheckpointError(
                f"{name} must have {wanted} with activation_scheme {scheme}, not {', '.join(scales + inputs) or 'none'}"
            )
        return {"weight": name, "scale": scales[0], **({"input": inputs[0]} if inputs else {})}

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        reason = "scales of a cache of keys and values in float8"
        return {name: reason for name, it in held.items() if CACHE.fullmatch(name) and math.prod(it.shape) == 1}

    def read(self, weight: Stored) -> Tensor:
        if self.beside and self.beside.has(weight.name):
            return self.beside.read(weight)
        fmt, parts, shape = (self._fp4 if weight["weight"].dtype == torch.int8 else self._fp8)(weight)
        act_scale = weight.grid("input", FLOATS, (1,)).float() if self.static else None
        scheme = Scheme(weight=fmt, act=self.act, static=self.static)
        return from_parts(parts, scheme, shape=shape, dtype=self.dtype, act_scale=act_scale)

    def _fp8(self, weight: Stored) -> tuple[Format, Quantized, tuple[int, ...]]:
        rank = 3 if weight["weight"].dim() == 3 else 2
        data = weight.expect("weight", (E4M3,), (None,) * rank)
        fmt, scale = self._scale(weight["scale"], weight.names["scale"], data.shape)
        return fmt, Quantized(data.contiguous(), scale), tuple(data.shape)

    def _fp4(self, weight: Stored) -> tuple[Format, Quantized, tuple[int, ...]]:
        codes = weight.expect("weight", (torch.int8,), (None, None))
        shape = (codes.shape[0], 2 * codes.shape[1])
        scale = weight.expect("scale", (E8M0,), FP4.scale_shape(*shape))
        return FP4, Quantized(codes.contiguous().view(torch.uint8), scale.contiguous()), shape

    def _scale(self, scale: Tensor, name: str, shape: torch.Size) -> tuple[Format, Tensor]:
        """(format of the weight, scales [.., blocks of rows, blocks of columns])."""
        *batch, n, k = shape
        if self.block is not None:
            rows, columns = self.block
            expect(scale, name, (*FLOATS, *POWERS), (*batch, -(-n // rows), -(-k // columns)))
            block = self.block
        else:
            if not batch and scale.dim() < 2:
                scale = scale.reshape(-1, 1)
            block = TENSOR if scale.dim() > 1 and scale.shape[-2] == 1 else CHANNEL
            expect(scale, name, (*FLOATS, *POWERS), (*batch, n if block == CHANNEL else 1, 1))
        exponents = scale.contiguous().view(E8M0) if scale.dtype == torch.uint8 else scale.contiguous()
        if exponents.dtype == E8M0 and block == MX.weight.block and not self.divides:
            return MX.weight, exponents
        scale = exponents.to(torch.float32)
        return Format(dtype="float8_e4m3", block=block), 1 / scale if self.divides else scale


class Writer(codec.Writer):
    """Writes the form of DeepSeek: blocks of 128x128, inputs in blocks of 128, float32 scales."""

    name = "fp8"

    def refuses(self, q: Described) -> str | None:
        if wrong := codec.no_layer(q, "fp8 is written for"):
            return wrong
        if q.scheme != BLOCK:
            return f"fp8 is written in the scheme {BLOCK} alone, not {q.scheme}"
        return codec.no_place(q, "fp8")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        return {name: q.qdata, f"{name}_scale_inv": q.scale}

    def config(self, left: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK.weight.block),
            "modules_to_not_convert": left,
        }


def _is_fp4(name: str, held: Mapping[str, FileTensor]) -> bool:
    scale = held.get(name.removesuffix("weight") + BARE)
    return name.endswith(".weight") and held[name].dtype == torch.int8 and scale is not None and scale.dtype == E8M0


def _is_part(name: str, dtype: torch.dtype) -> bool:
    packed = name.endswith(".weight") and dtype in (torch.int8, torch.uint8)
    return packed or dtype == E8M0 or name.endswith(("_scale_inv", "weight_scale", *INPUT_SCALES))


def _beside(config: Mapping[str, Any], dtype: torch.dtype) -> modelopt.Reader | None:
    other = str(config.get("moe_quant_algo") or config.get("quant_algo") or "fp8")
    if other.lower().startswith("fp8"):
        return None
    if not setting(config, "quantized_layers", dict, {}):
        raise CheckpointError(f"fp8 beside layers in a format of ModelOpt ({other}), and no quantized_layers name them")
    said = {"quant_algo": modelopt.MIXED, "quantized_layers": config["quantized_layers"]}
    return modelopt.Reader(said, dtype)


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    said = setting(config, "weight_block_size", list, None)
    if said is None:
        return None
    if len(said) != 2 or not all(type(size) is int and 1 <= size <= LONGEST for size in said):
        raise CheckpointError(f"fp8 with weight_block_size {said!r}: two whole numbers from 1 to {LONGEST} are read")
    return said[0], said[1]
