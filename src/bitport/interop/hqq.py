"""HQQ (``quant_method: hqq``), as the library itself and transformers 4 write it to safetensors. A layer [N, K] is
reshaped to [R, C], row-major::

    axis 1    [N*K/g, g]    scale, zero float [R, 1]    g consecutive numbers of a row share a scale
    axis 0    [g, N*K/g]    scale, zero float [1, C]    g numbers of a column, N/g rows apart, share one

    value = (code - zero) * scale

    8bit_u8    uint8 [R, C]           8, 6 or 5 bits
    4bit_u8    uint8 [R/2, C]         4 bits
    2bit_u8    uint8 [R/4, C]         2 bits, or the codes 0, 1, 2 (nbits 1.58)
    1bit_u8    uint8 [R/8, C]         1 bit
    3bit_32    int32 [R/10, C], rounded up; padding rows hold no codes

A byte or word of W_q holds codes of one column, R/2, R/4 .. rows apart, the first in the highest bits (in a word: below
the highest two). With view_as_float the same bytes are stored as a float dtype. Every layer repeats all of its settings
in tensors of one number and ASCII strings in uint8; those in config.json have no effect.

Groups of axis 0 are blocks of bitport if g is N: a scale per column. With fewer rows in a group its rows are not
adjacent, for which bitport has no scheme. Zero points that are integers in the whole matrix become integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import Stored, exactly
from bitport.interop.codec import Described, WeightNames, grouped
from bitport.interop.shifts import zero_points
from bitport.interop.words import of_rows_apart, to_rows_apart
from bitport.numerics import FLOATS, Format, Quantized
from bitport.numerics.format import FLOAT8_SCALES
from bitport.numerics.packing import pack_bits, unpack_bits
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts

NEEDED = ("scale", "zero", "nbits", "group_size", "axis", "shape", "packing")
CHECKED = ("view_as_float", "quant_scale", "quant_zero")
STORED = ("unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config")
FOUND = ("channel_wise", "optimize", "round_zero")
"""Settings for choosing scales and zero points."""
ABSENT, THERE = ("quant_scale", "quant_zero", "offload_meta"), ("encoded_state_dict", "stores_quant_config")
"""Settings of written layers that are false, and that are true."""
NESTED = (".scale_q", ".zero_q", ".zero_scale", ".meta_scale", ".meta_zero")


class Packing(NamedTuple):
    nbits: tuple[float, ...]
    width: int
    """Bits per code."""
    codes: int
    """Codes per element of W_q."""
    dtype: torch.dtype

    @property
    def shifts(self) -> range:
        return range(self.width * (self.codes - 1), -1, -self.width)


PACKINGS = {
    "8bit_u8": Packing((8, 6, 5), 8, 1, torch.uint8),
    "4bit_u8": Packing((4,), 4, 2, torch.uint8),
    "3bit_32": Packing((3,), 3, 10, torch.int32),
    "2bit_u8": Packing((2, 1.58), 2, 4, torch.uint8),
    "1bit_u8": Packing((1,), 1, 8, torch.uint8),
}


class Reader(codec.Reader):
    known = ("quant_method", "quant_config", "skip_modules")  # which the layers repeat

    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        if nested := [name for name in held if name.endswith(NESTED)]:
            raise CheckpointError(
                f"{nested[0]}: scales and zero points that are quantized too (quant_scale, quant_zero) or lie in one "
                f"tensor (offload_meta) are not read; quantize the original model: bitport quantize"
            )
        found = grouped(held, "W_q", NEEDED, (*CHECKED, *STORED, *FOUND), telling=("packing", "nbits"))
        if both := [weight.name for weight in found if weight.name in held]:
            raise CheckpointError(f"{both[0]} is there beside the W_q that stands for it; fetch the checkpoint again")
        return found

    def read(self, weight: Stored) -> Tensor:
        its = Layer.of(weight)
        (n, k), name = its.shape, weight.names["W_q"]
        codes = _codes(weight["W_q"], name, its)
        bits = math.ceil(its.nbits)
        if int(codes.max()) >= 1 << bits:
            raise CheckpointError(f"{name} holds the code {int(codes.max())}, which takes more than {bits} bits")
        grid = (its.rows, 1) if its.axis == 1 else (1, its.columns)
        scale = weight.expect("scale", FLOATS, grid)
        zero = weight.expect("zero", (scale.dtype,), grid)
        block = _block(its, name)
        fmt = Format(dtype=f"int{bits}", block=block, zero="float", scale="input")
        scale, zero = (part.reshape(fmt.scale_shape(n, k)).contiguous() for part in (scale, zero))
        if bool(((zero == zero.round()) & (zero >= 0) & (zero < 1 << bits)).all()):
            fmt = Format(dtype=f"int{bits}", block=block, zero="int", scale="input")
            zero = zero.to(torch.uint8)
        parts = Quantized(pack_bits(codes.reshape(n, k), bits), scale, zero)
        return from_parts(parts, Scheme(weight=fmt), shape=(n, k), dtype=self.dtype)


class Writer(codec.Writer):
    """Writes groups along rows (axis 1), in the dtype of the model. The configuration has one scheme for all
    weights."""

    name = "hqq"

    def refuses(self, q: Described) -> str | None:
        fmt = q.scheme.weight
        if wrong := codec.no_layer(q, "HQQ quantizes", conv1d=False):
            return wrong
        if fmt.number.kind != "int" or fmt.block[0] != 1 or fmt.scale in FLOAT8_SCALES or q.scheme.act:
            return "HQQ holds integers of 1 to 8 bits in groups along rows, inputs as they are"
        if extra := codec.no_place(q, "HQQ"):
            return extra
        (n, k), group = q.shape, fmt.block_shape(*q.shape)[1]
        packing = PACKINGS[_packing(fmt)]
        if k % group or (packing.dtype == torch.uint8 and n * k // group % packing.codes):
            return f"HQQ takes whole groups, of {fmt.dtype} a multiple of {packing.codes}, not {n}x{k} of {q.scheme}"
        return self.refuses_another_scheme(q, "HQQ is written in")

    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        module, fmt, group = name.removesuffix(".weight"), q.scheme.weight, q.matrix.block_k
        kind = _packing(fmt)
        packing = PACKINGS[kind]
        codes = unpack_bits(q.qdata, fmt.number.bits, q.matrix.k).reshape(-1, group)
        parts = {"W_q": to_rows_apart(codes, packing.shifts, packing.dtype), "shape": torch.tensor(list(q.shape))}
        for role, part in (("scale", q.scale), ("zero", zero_points(q).to(q.scale.dtype))):
            parts[role] = exactly(part, q.dtype, f"{module}: a {role} of HQQ").reshape(-1, 1)
        texts = {"packing": kind, "compute_dtype": q.dtype, "unpack_view_dtype": packing.dtype}
        parts |= {role: torch.tensor(list(str(text).encode()), dtype=torch.uint8) for role, text in texts.items()}
        said = _params(fmt, group) | dict.fromkeys(ABSENT, False) | dict.fromkeys(THERE, True)
        for role, value in said.items():
            parts[role] = torch.tensor(value, dtype=torch.uint8 if isinstance(value, bool) else torch.int32)
        return {f"{module}.{role}": part for role, part in parts.items()}

    def config(self, left: list[str]) -> dict[str, Any]:
        assert self.scheme is not None
        fmt = self.scheme.weight
        nested = dict.fromkeys(("scale_quant_params", "zero_quant_params"))
        made = {"weight_quant_params": _params(fmt, fmt.block[1] or None), **nested, "offload_meta": False}
        return {"quant_method": self.name, "quant_config": made, "skip_modules": left}


class Layer(NamedTuple):
    """The settings in the tensors of a layer, checked against each other."""

    packing: Packing
    nbits: float
    axis: int
    group: int
    shape: tuple[int, int]
    floated: bool

    @classmethod
    def of(cls, weight: Stored) -> Layer:
        def number(role: str) -> float:
            given = weight.get(role)
            if given is None:
                return 0
            floats = (torch.float32,) if role == "nbits" else ()
            if given.numel() != 1 or given.dtype not in (torch.uint8, torch.int32, torch.int64, *floats):
                raise CheckpointError(
                    f"{weight.names[role]} must be one number, not {given.dtype} {list(given.shape)}; fetch the "
                    f"checkpoint again"
                )
            return round(given.item(), 2)

        said = weight["packing"]
        text = bytes(said.tolist()).decode("ascii", "replace") if _is_text(said) else f"{said.dtype} {list(said.shape)}"
        packing, nbits = PACKINGS.get(text), number("nbits")
        if packing is None or nbits not in packing.nbits:
            known = ", ".join(f"{name} of {' or '.join(map(str, its.nbits))} bits" for name, its in PACKINGS.items())
            raise CheckpointError(f"{weight.names['packing']} is {text!r}, of {nbits} bits; {known} are read")
        for role in ("quant_scale", "quant_zero"):
            if number(role):
                raise CheckpointError(f"{weight.names[role]}: statistics that are themselves quantized are not read")
        n, k = weight.expect("shape", (torch.int64, torch.int32), (2,)).tolist()
        axis, group = number("axis"), number("group_size")
        if n < 1 or k < 1 or axis not in (0, 1) or group < 1 or n * k % group:
            raise CheckpointError(
                f"{weight.names['shape']}: {n}x{k} in groups of {group} along axis {axis} is no matrix in whole groups "
                f"along axis 0 or 1; fetch the checkpoint again"
            )
        return cls(packing, nbits, int(axis), int(group), (n, k), bool(number("view_as_float")))

    @property
    def rows(self) -> int:
        return self.group if self.axis == 0 else self.shape[0] * self.shape[1] // self.group

    @property
    def columns(self) -> int:
        return self.shape[0] * self.shape[1] // self.rows


def _is_text(said: Tensor) -> bool:
    return said.dtype == torch.uint8 and said.dim() == 1 and said.numel() < 32


def _codes(packed: Tensor, name: str, its: Layer) -> Tensor:
    """The codes, uint8 [R, C]."""
    packing, dtypes = its.packing, FLOATS if its.floated else (its.packing.dtype,)
    count = -(-its.rows // packing.codes)
    wanted = count * its.columns * packing.dtype.itemsize
    whole = its.rows % packing.codes == 0 or packing.dtype == torch.int32
    if packed.dtype not in dtypes or packed.dim() != 2 or packed.nbytes != wanted or not whole:
        raise CheckpointError(
            f"{name}: {packed.dtype} {list(packed.shape)} does not hold {its.rows}x{its.columns} codes of {its.nbits} "
            f"bits; it must be {' or '.join(map(str, dtypes))} of {wanted} bytes"
        )
    elements = packed.contiguous().flatten().view(packing.dtype).reshape(count, its.columns)
    return of_rows_apart(elements, packing.shifts, packing.width)[: its.rows]


def _block(its: Layer, name: str) -> tuple[int, int]:
    (n, k), group = its.shape, its.group
    if its.axis == 0 and group == n:
        return n, 1
    if its.axis == 1 and k % group == 0:
        return 1, group if group < k else 0
    if its.axis == 1 and group % k == 0:
        return group // k, 0
    lie = "rows that lie apart" if its.axis == 0 else "parts of several rows"
    raise CheckpointError(
        f"{name}: with axis={its.axis} and group_size={group} a group of {n}x{k} numbers has {lie}, for which there is "
        f"no scheme; axis=1 is read with a group_size that divides {k}, axis=0 with {n}. Quantize the original model: "
        f"bitport quantize"
    )


def _packing(fmt: Format) -> str:
    """The packing with the fewest bits that fits the codes; 7 bits are stored as 8."""
    return next(kind for kind, its in reversed(PACKINGS.items()) if its.nbits[0] >= fmt.number.bits)


def _params(fmt: Format, group: int | None) -> dict[str, Any]:
    bits = 8 if fmt.number.bits == 7 else fmt.number.bits
    found = {"channel_wise": True, "optimize": True, "round_zero": fmt.zero != "float"}
    return {"nbits": bits, "group_size": group, **found, "axis": 1, "view_as_float": False}
