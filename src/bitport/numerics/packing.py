"""Pack codes of b bits into a dense byte stream along the last axis, least significant bits first, and unpack them.

Element i of a row holds bits [i*b, i*b + b) of the row read as one little-endian number; the last byte is padded
with zero bits. For b = 4 and b = 3 (bits of a byte drawn from highest to lowest):

    byte 0      byte 1           byte 0      byte 1      byte 2
    1111 0000 | 3333 2222        22 111 000| 5 444 333 2| 777 666 55

The pattern repeats every p = 8/gcd(8, b) elements, which fill q = b/gcd(8, b) bytes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.numerics.types import NumberType


def packed_size(k: int, bits: int) -> int:
    """Bytes of a packed row of k codes."""
    return (k * bits + 7) // 8


def _period(bits: int) -> tuple[int, int]:
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, got bits={bits}")
    common = math.gcd(8, bits)
    return 8 // common, bits // common


def _split_last(x: Tensor, length: int) -> Tensor:
    """[..., k] to [..., ceil(k/length), length], zero-padded."""
    k = x.shape[-1]
    if k % length:
        x = F.pad(x, (0, -k % length))
    return x.reshape(*x.shape[:-1], -(-k // length), length)


def _require_uint8(x: Tensor, what: str) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{what} must be uint8, got {x.dtype}")


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., k], each below 2^bits, into uint8 [..., ceil(k*bits/8)]."""
    _require_uint8(codes, "codes")
    elements, size = _period(bits)
    if bits == 8:
        return codes
    columns = _split_last(codes, elements)
    packed = []
    for byte in range(size):
        first, last = byte * 8 // bits, (byte * 8 + 7) // bits
        packed.append(_merge([_shifted(columns[..., i], i * bits - byte * 8, bits) for i in range(first, last + 1)]))
    return torch.stack(packed, -1).flatten(-2)[..., : packed_size(codes.shape[-1], bits)].contiguous()


def unpack_bits(data: Tensor, bits: int, k: int) -> Tensor:
    """Unpack uint8 [..., ceil(k*bits/8)] into uint8 codes [..., k]."""
    _require_uint8(data, "packed data")
    elements, size = _period(bits)
    if data.shape[-1] != packed_size(k, bits):
        raise ValueError(
            f"{k} codes of {bits} bits take {packed_size(k, bits)} bytes, the data's last axis has {data.shape[-1]}"
        )
    if bits == 8:
        return data
    columns = _split_last(data, size)
    mask = (1 << bits) - 1
    codes = []
    for i in range(elements):
        first, last = i * bits // 8, (i * bits + bits - 1) // 8
        parts = [_shifted(columns[..., byte], byte * 8 - i * bits, 8) for byte in range(first, last + 1)]
        codes.append(_merge(parts) & mask)
    return torch.stack(codes, -1).flatten(-2)[..., :k].contiguous()


def _shifted(values: Tensor, places: int, bits: int) -> Tensor:
    """values * 2^places modulo 256. Bits that would overflow the byte are masked off before the shift, so the result
    does not depend on a device's overflow behaviour."""
    if places < 0:
        return values >> -places
    if places + bits > 8:
        values = values & (0xFF >> places)
    return values << places if places else values


def _merge(parts: list[Tensor]) -> Tensor:
    merged = parts[0]
    for part in parts[1:]:
        merged = merged | part
    return merged


def as_bytes(part: Tensor) -> Tensor:
    """View a tensor of an 8-bit dtype as uint8; return any other unchanged. Not every op on every device supports int8
    and the 8-bit floats."""
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def from_bytes(part: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The inverse of :func:`as_bytes`: ``dtype`` is the original dtype; None or a wider dtype makes it a no-op."""
    return part.view(dtype) if dtype is not None and dtype.itemsize == 1 and part.dtype == torch.uint8 else part


def to_signed(codes: Tensor) -> Tensor:
    """uint8 codes of the type int8 (midpoint 128) as the int8 values they mean."""
    return (codes ^ 0x80).view(torch.int8)


def from_signed(numbers: Tensor) -> Tensor:
    """The inverse of :func:`to_signed`: int8 values as uint8 codes."""
    return numbers.view(torch.uint8) ^ 0x80


def to_storage(codes: Tensor, number: NumberType) -> Tensor:
    """Codes in their storage form: torch's own 8-bit float dtype (the same bytes), else the dense bit stream."""
    return pack_bits(codes, number.bits) if number.storage == torch.uint8 else codes.view(number.storage)


def from_storage(data: Tensor, number: NumberType, k: int) -> Tensor:
    """The inverse of :func:`to_storage`: uint8 codes [..., k]."""
    return unpack_bits(data, number.bits, k) if number.storage == torch.uint8 else data.view(torch.uint8)
