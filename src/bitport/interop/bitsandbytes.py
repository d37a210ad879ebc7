"""bitsandbytes (``quant_method: bitsandbytes``), which has three formats. nf4, for a matrix [N, K] in blocks of b::

    weight                                 [N*K/2 bytes]      row-major, two codes per byte, the even one high
    weight.absmax                          float32 [N*K/b]    one scale per block
    weight.quant_map                       float32 [16]       the table
    weight.quant_state.bitsandbytes__nf4   uint8              JSON: shape, b ..

    value = table[code] * absmax

fp4 is stored alike; the bits of a code are [sign | entry], with entries in the order 0 1 6 7 4 5 2 3 of their sizes.

With nested statistics ("double quantization") absmax is uint8, in blocks of c::

    absmax = nested_quant_map[absmax] * nested_absmax + nested_offset

in float32, rounded at each step as the library does: bitport keeps the result. LLM.int8(), for a matrix [N, K]::

    weight int8 [N, K]     SCB float32 [N]     weight_format uint8, 0 for rows

    value = weight * SCB / 127

It also rounds inputs, with one scale per token, except for columns that have a number of at least llm_int8_threshold; 0
means no exceptions. Configuration allows one format per model, nested or not.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.dtypes import name_of
from bitport.checkpoint.parse import parsed_object
from bitport.checkpoint.source import FileTensor
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored
from bitport.interop.codec import Described, WeightNames, check_complete, grouped, refuse_lost, tensors_of
from bitport.interop.configuration import setting
from bitport.numerics import FLOATS, NUMBER_TYPES, Format, Quantized
from bitport.numerics.format import FLOAT8_SCALES
from bitport.numerics.packing import from_signed, to_signed
from bitport.schemes import Scheme, preset
from bitport.schemes.presets import CHANNEL
from bitport.tensor import QTensor, from_parts

STATE = ".quant_state.bitsandbytes__"
DTYPES = {"nf4": "nf4", "fp4": "bnb_fp4"}
"""Names of 4-bit number types in bitsandbytes -> in bitport."""
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that the bytes of 4-bit codes may be viewed as (bnb_4bit_quant_storage)."""
STATISTICS, NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")
FORMAT = "weight_format"
LONGEST = 1 << 16
"""The most bytes of a quant_state; a few hundred are usual."""
THRESHOLD = 6.0
"""The default of llm_int8_threshold."""
INPUTS = "LLM.int8() rounds inputs to int8, all but outliers"
ROUNDED_INPUTS = f"{INPUTS}; here they are used as they are"
ROUNDED_ROWS = "the scale of a row, SCB / 127, is rounded to float32"
NO_SCB = "for some rows no SCB in float32 has their scale as its 127th; the nearest was written, off by at most 2^-23"


class Reader(codec.Reader):
    known = (
        *("quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
        *("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"),
        *("llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload"),
        "llm_int8_has_fp16_weight",
    )

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.outliers = setting(config, "llm_int8_threshold", (int, float), THRESHOLD) != 0

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        int8 = grouped(held, "SCB", ("weight",), (FORMAT,))
        found = _of_4_bits(held) + int8
        ends = tuple(f".{part}" for part in (*STATISTICS, *NESTED, FORMAT))
        refuse_lost(
            held,
            found,
            lambda name, dtype: (
                name.endswith(ends) or (name.endswith(".weight") and dtype in (torch.int8, torch.uint8))
            ),
            "weight with a quant_state (4 bits) or SCB (int8); fetch the checkpoint again",
        )
        if sum(len(weight.parts) for weight in found) != len(tensors_of(found)):
            raise CheckpointError("a weight has both a quant_state (4 bits) and SCB (int8); fetch the checkpoint again")
        if int8:
            self.notes += [*([ROUNDED_INPUTS] if self.outliers else []), ROUNDED_ROWS]
        return found

    def read(self, weight: Stored) -> Tensor:
        return self._int8(weight) if "SCB" in weight else self._4_bits(weight)

    def _4_bits(self, weight: Stored) -> Tensor:
        state = State.of(weight["state"], weight.names["state"])
        n, k = state.shape
        codes, name = weight["weight"], weight.names["weight"]
        if codes.dtype not in STORAGE or 2 * codes.nbytes != n * k:
            raise CheckpointError(f"{name}: {codes.nbytes} bytes of {codes.dtype} are no {n}x{k} codes of 4 bits")
        table = weight.expect("quant_map", (torch.float32,), (16,))
        if not torch.equal(table, _table(state.kind)):
            raise CheckpointError(f"{weight.names['quant_map']} is not the table of {state.kind}, which alone is read")
        pairs = codes.contiguous().flatten().view(torch.uint8).reshape(n, k // 2)
        pairs = _ranks_of_fp4(pairs) if state.kind == "fp4" else pairs
        stream = (pairs & 15) << 4 | pairs >> 4
        scale = _absmax(weight, n * k // state.block, state).reshape(n, k // state.block)
        scheme = Scheme(weight=Format(dtype=DTYPES[state.kind], block=(1, state.block), scale="input"))
        return from_parts(Quantized(stream, scale), scheme, shape=(n, k), dtype=self.dtype)

    def _int8(self, weight: Stored) -> Tensor:
        codes = weight.expect("weight", (torch.int8,), (None, None))
        n, k = codes.shape
        statistics = weight.expect("SCB", FLOATS, (n,))
        said = weight.get(FORMAT)
        if said is not None and (said.dtype != torch.uint8 or said.numel() != 1 or int(said) != 0):
            raise CheckpointError(f"{weight.names[FORMAT]} must be 0, for rows as they are: save the model again")
        scale = statistics.to(torch.float32).reshape(n, 1) / 127
        parts = Quantized(from_signed(codes.contiguous()), scale)
        scheme = preset("int8" if self.outliers else "int8-dyn")
        return from_parts(parts, scheme, shape=(n, k), dtype=self.dtype)


class Writer(codec.Writer):
    """Writes nf4, fp4 without nested statistics, or LLM.int8(), the same for all weights. ``int8-dyn`` is LLM.int8()
    without outliers."""

    name = "bitsandbytes"

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, Any] | None = None
        self.dtype = ""

    def refuses(self, q: Described) -> str | None:
        if wrong := codec.no_layer(q, "bitsandbytes quantizes"):
            return wrong
        if (said := _settings(q.scheme)) is None:
            return "bitsandbytes holds nf4 and bnb_fp4 in blocks of a row, int8 with one scale a row (int8, int8-dyn)"
        if extra := codec.no_place(q, "bitsandbytes"):
            return extra
        block = q.scheme.weight.block_shape(*q.shape)[1]
        if "load_in_4bit" in said and (block not in BLOCKS or q.shape[1] % block):
            whole = f"whole ones of {', '.join(map(str, BLOCKS))} columns"
            return f"blocks of {_kind(said)} are {whole}, not {block} of {q.shape[1]}"
        self.said = self.said or said
        if said != self.said:
            return f"a model of bitsandbytes is all of one kind, {_kind(self.said)} or {_kind(said)}"
        return None

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        self.dtype = name_of(q.dtype)
        if q.scheme.weight.dtype == "int8":
            if not q.scheme.act:
                self.tell(INPUTS)
            module = name.removesuffix(".weight")
            scb = self._statistics(q.scale.flatten().float(), name)
            weight = to_signed(q.qdata)
            return {name: weight, f"{module}.SCB": scb, f"{module}.{FORMAT}": torch.tensor(0, dtype=torch.uint8)}
        assert self.said is not None
        kind = _kind(self.said)
        said = {"quant_type": kind, "blocksize": q.matrix.block_k, "dtype": self.dtype, "shape": list(q.shape)}
        stream = _fp4_of_ranks(q.qdata) if kind == "fp4" else q.qdata
        return {
            name: (stream << 4 | stream >> 4).reshape(-1, 1),
            f"{name}.absmax": q.scale.flatten().float(),
            f"{name}.quant_map": _table(kind),
            f"{name}{STATE}{kind}": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
        }

    def _statistics(self, scale: Tensor, name: str) -> Tensor:
        """SCB for rows with that scale: exact for scales of up to 17 bits; if the scale was read as SCB / 127, the
        product with 127 or a neighbour of it."""
        found = nearest = 127 * scale
        for end in (torch.inf, -torch.inf):
            near = torch.nextafter(nearest, torch.tensor(end, dtype=torch.float32))
            found = torch.where((found / 127 != scale) & (near / 127 == scale), near, found)
        if bool((found.isinf() & scale.isfinite()).any()):
            raise ArgumentError(f"{name} has the scale {scale.max().item():g}; 127 times of it is no float32")
        if bool((found / 127 != scale).any()):
            self.tell(NO_SCB)
        return found

    def config(self, left: list[str]) -> dict[str, Any]:
        assert self.said is not None
        said = {**self.said, "bnb_4bit_compute_dtype": self.dtype, "llm_int8_skip_modules": left}
        return {"quant_method": self.name, **said}


@dataclasses.dataclass(frozen=True)
class State:
    """The JSON of a quant_state. ``nested``: (block, offset) of absmax if that is quantized."""

    kind: str
    shape: tuple[int, int]
    block: int
    nested: tuple[int, float] | None

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> State:
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > LONGEST:
            raise CheckpointError(f"{name} must be JSON in uint8, not {tensor.dtype} {list(tensor.shape)}")
        said = parsed_object(bytes(tensor.tolist()), name)
        shape, block, kind = said.get("shape"), said.get("blocksize"), name.rpartition(STATE)[2]
        if said.get("quant_type") != kind or type(block) is not int or block not in BLOCKS:
            raise CheckpointError(
                f"{name}: {_told(said, 'quant_type', 'blocksize')}; {kind} is read, in blocks of "
                f"{', '.join(map(str, BLOCKS))}"
            )
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            raise CheckpointError(f"{name}: {_told(said, 'shape')}; that of a matrix is read")
        if shape[1] % block:
            raise CheckpointError(
                f"{name}: blocks of {block} cross the rows of {shape[0]}x{shape[1]}, for which bitport has no scheme; "
                f"quantize the original model"
            )
        return cls(kind, (shape[0], shape[1]), block, _nested(said, name))


def _settings(scheme: Scheme) -> dict[str, Any] | None:
    """The quantization_config for weights in this scheme; None if the library has no such format."""
    fmt = scheme.weight
    if fmt.scale in FLOAT8_SCALES or fmt.zero != "none":
        return None
    for kind, dtype in DTYPES.items():
        if fmt.dtype == dtype and fmt.block[0] == 1 and not scheme.act:
            return {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    if fmt.dtype == "int8" and fmt.block == CHANNEL and scheme.act in ("", "int8"):
        return {"load_in_8bit": True, "llm_int8_threshold": 0.0 if scheme.act else THRESHOLD}
    return None


def _kind(said: Mapping[str, Any]) -> str:
    return said.get("bnb_4bit_quant_type") or f"int8 with a threshold of {said['llm_int8_threshold']:g}"


def _table(kind: str) -> Tensor:
    """The table in the code order of bitsandbytes."""
    table = torch.tensor(NUMBER_TYPES[DTYPES[kind]].table, dtype=torch.float32)
    return table[_ranks_of_fp4(torch.arange(16, dtype=torch.uint8)).int() & 15] if kind == "fp4" else table


def _ranks_of_fp4(pairs: Tensor) -> Tensor:
    """Convert two fp4 codes per byte to positions in the sorted table: a positive entry is as far after the middle as
    the negative one is before it, by its rank, which is the entry with the bit of 4 toggled if the bit of 2 is set."""
    ranks = pairs ^ (pairs & 0x22) << 1
    return ranks ^ 0x88 ^ _sevens(pairs & 0x88)


def _fp4_of_ranks(pairs: Tensor) -> Tensor:
    codes = pairs ^ 0x88
    codes = codes ^ _sevens(codes & 0x88)
    return codes ^ (codes & 0x22) << 1


def _sevens(signs: Tensor) -> Tensor:
    """The three bits below each set sign bit."""
    return signs >> 1 | signs >> 2 | signs >> 3


def _nested(said: dict[str, Any], name: str) -> tuple[int, float] | None:
    keys = ("nested_blocksize", "nested_offset", "nested_dtype")
    if not any(key in said for key in keys):
        return None
    block, offset = said.get("nested_blocksize"), said.get("nested_offset")
    if type(block) is int and 1 <= block <= BLOCKS[-1] and type(offset) is float and said.get(keys[2]) == "float32":
        return block, offset
    raise CheckpointError(f"{name}: {_told(said, *keys)}; float32 in blocks of 1 to {BLOCKS[-1]} is read")


def _told(said: dict[str, Any], *keys: str) -> str:
    return ", ".join(f"{key}={reprlib.repr(said.get(key))}" for key in keys)


def _absmax(weight: Stored, count: int, state: State) -> Tensor:
    if (state.nested is None) != ("nested_absmax" not in weight):
        names = f"{weight.names['state']} and the tensors of {weight.names['absmax']}"
        raise CheckpointError(f"{names} disagree about whether it is nested")
    if state.nested is None:
        return weight.expect("absmax", FLOATS, (count,))
    block, offset = state.nested
    codes = weight.expect("absmax", (torch.uint8,), (count,))
    outer = weight.expect("nested_absmax", (torch.float32,), (-(-count // block),))
    table = weight.expect("nested_quant_map", (torch.float32,), (256,))
    inner = table[codes.int()] * outer.repeat_interleave(block)[:count]
    return inner + torch.tensor(offset, dtype=torch.float32)


def _of_4_bits(held: Mapping[str, FileTensor]) -> list[WeightNames]:
    found = []
    for name in held:
        parameter, mark, kind = name.rpartition(STATE)
        if not mark:
            continue
        if kind not in DTYPES:
            raise CheckpointError(f"{name}: {kind} of bitsandbytes is not read; {' and '.join(DTYPES)} are")
        nested = any(f"{parameter}.{role}" in held for role in NESTED)
        roles = STATISTICS + NESTED if nested else STATISTICS
        parts = {"weight": parameter, "state": name, **{role: f"{parameter}.{role}" for role in roles}}
        check_complete(name, parts.values(), held)
        found.append(WeightNames(parameter, parts))
    return found
