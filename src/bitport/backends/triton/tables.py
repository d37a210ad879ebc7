"""Numbers that stand in a table, found without reading memory: a byte of those of four codes at a time.

One instruction of NVIDIA's makes a register of four bytes out of eight, by four indices of 3 bits each: the lower three
of a nibble, so codes of a word as they lie. A table of sixteen is two of eight: the fourth bit of a code picks, by that
instruction again, the byte that came from one or from the other. In float4_e2m1 it is the sign, and is put where the
number has its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import is_cuda

from bitport.numerics import NUMBER_TYPES, decode

FLOAT = "float4_e2m1"
TYPES = {
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
}
TABLES = {
    **{name: torch.tensor(its.table) for name, its in NUMBER_TYPES.items() if its.kind == "codebook" and its.bits == 4},
    FLOAT: decode(torch.arange(8, dtype=torch.uint8), FLOAT),
}
ENTRIES = {
    (name, kind): entries.to(dtype).view(bits).tolist()
    for name, entries in TABLES.items()
    for kind, (dtype, bits) in TYPES.items()
}
"""The bits of what codes mean, rounded to a type; of those of float4 without the sign."""


@triton.constexpr_function
def permutes() -> bool:
    """Whether the device has that instruction."""
    return is_cuda()


@triton.constexpr_function
def bytes_of(number: str, kind: tl.dtype, byte: int, first: int) -> int:
    """That byte of four entries, as int32, the first one's lowest."""
    word = 0
    for at in range(4):
        word += (ENTRIES[number, kind.name][first + at] >> 8 * byte & 0xFF) << 8 * at
    return word - (word >> 31 << 32)


@triton.jit
def _of_eight(
    codes: tl.tensor, NUMBER: tl.constexpr, KIND: tl.constexpr, BYTE: tl.constexpr, FIRST: tl.constexpr
) -> tl.tensor:
    low, high = bytes_of(NUMBER, KIND, BYTE, FIRST), bytes_of(NUMBER, KIND, BYTE, FIRST + 4)
    return libdevice.byte_perm(low, high, codes)


@triton.jit
def byte_of(
    word: tl.tensor, FROM: tl.constexpr, NUMBER: tl.constexpr, KIND: tl.constexpr, BYTE: tl.constexpr
) -> tl.tensor:
    """The BYTE-th byte, the lowest is 0, of what each of the four codes means that begin at bit FROM of ``word``."""
    codes = word >> FROM
    found = _of_eight(codes, NUMBER, KIND, BYTE, 0)
    if NUMBER != "float4_e2m1":
        second = ((codes >> 1) & 0x4444) | 0x3210
        found = libdevice.byte_perm(found, _of_eight(codes, NUMBER, KIND, BYTE, 8), second)
    elif KIND.primitive_bitwidth == 8 * (BYTE + 1):
        signs = libdevice.byte_perm(word << 4, word, 0x5140 if FROM == 0 else 0x7362)
        found |= signs & -0x7F7F7F80  # 0x80808080
    return found


@triton.jit
def pairs_of(word: tl.tensor, FROM: tl.constexpr, NUMBER: tl.constexpr, KIND: tl.constexpr) -> tl.tuple:
    """What those mean in a type of 16 bits: the first and second, the third and fourth of them in a register."""
    low, high = byte_of(word, FROM, NUMBER, KIND, 0), byte_of(word, FROM, NUMBER, KIND, 1)
    return libdevice.byte_perm(low, high, 0x5140), libdevice.byte_perm(low, high, 0x7362)


@triton.jit
def look_up(word: tl.tensor, PLACE: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """float32 that the PLACE-th code of ``word`` means. What several places share the compiler computes once."""
    FROM: tl.constexpr = PLACE // 4 * 16
    PAIR: tl.constexpr = 0x5140 if PLACE % 4 < 2 else 0x7362
    word = word.to(tl.int32, bitcast=True)
    low = libdevice.byte_perm(
        byte_of(word, FROM, NUMBER, tl.float32, 0), byte_of(word, FROM, NUMBER, tl.float32, 1), PAIR
    )
    high = libdevice.byte_perm(
        byte_of(word, FROM, NUMBER, tl.float32, 2), byte_of(word, FROM, NUMBER, tl.float32, 3), PAIR
    )
    return libdevice.byte_perm(low, high, 0x5410 if PLACE % 2 == 0 else 0x7632).to(tl.float32, bitcast=True)
