"""Table lookups of 4-bit codes without reading memory: one byte of the entries of four codes at a time.

NVIDIA's byte permutation (prmt) selects four bytes out of eight by four indices of 3 bits, the lower three of each
nibble, so it takes codes as they are in a word. A table of sixteen is two tables of eight: the fourth bit of a code
selects, by the same instruction, between the bytes found in the two. In float4_e2m1 that bit is the sign, and is moved
to the sign bit of the number.
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
"""(number type, type of the entries) -> bits of the entries, rounded to that type; for float4 without the sign."""


@triton.constexpr_function
def permutes() -> bool:
    """Whether the device has the byte permutation."""
    return is_cuda()


@triton.constexpr_function
def bytes_of(number: str, kind: tl.dtype, byte: int, first: int) -> int:
    """Return byte ``byte`` of four entries from ``first`` on, as int32 with that of the first entry lowest."""
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
    """Return the BYTE-th byte (lowest: 0) of the entries of the four codes that begin at bit FROM of ``word``."""
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
    """Return the 16-bit entries of those four codes in two registers: first and second, third and fourth."""
    low, high = byte_of(word, FROM, NUMBER, KIND, 0), byte_of(word, FROM, NUMBER, KIND, 1)
    return libdevice.byte_perm(low, high, 0x5140), libdevice.byte_perm(low, high, 0x7362)


@triton.jit
def look_up(word: tl.tensor, PLACE: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Return the entry of the PLACE-th code of ``word`` as float32. The compiler computes what places share once."""
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
