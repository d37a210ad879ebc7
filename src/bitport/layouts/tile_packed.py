"""int4 for tensor cores: the 4-D layout of tinygemm (``aten::_weight_int4pack_mm`` on CUDA).

``data`` is int32 [N/8][K/(inner*16)][32][inner/2]. Lane t of a warp owns row ``8*tile + t//4`` and, in each pair of
16-wide k-tiles, the eight columns that an m16n8k16 MMA expects in its registers::

    base = (k_outer * inner + 2*pair) * 16 + 2*(t % 4)
    v    = base + (0, 1, 8, 9, 16, 17, 24, 25)
    word = v7<<28 | v5<<24 | v3<<20 | v1<<16 | v6<<12 | v4<<8 | v2<<4 | v0

N is padded to a multiple of 8 with rows of code 0 and scale 0. ``scale`` is bfloat16 [K/g][N'][2], pairs (s, z) with
value = (code - 8) * s + z, so z = (8 - zero) * s. Because z is rounded, the canonical ``zero`` is kept as well, so that
nothing is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import Quantized, pack_bits, unpack_bits

GROUPS = (32, 64, 128, 256)
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit position in its word of the column base + (0, 1, 8, 9, 16, 17, 24, 25)."""


class TilePacked:
    devices: tuple[str, ...] = () if torch.version.hip else ("cuda",)
    """ROCm also calls its device type cuda, but has no kernel for this layout. Where Triton's kernels are registered,
    that removes their device (bitport.backends.triton.kernels): they read int4 in row-major layouts."""
    weight_only = True
    data_ndim = 4

    def __init__(self, inner: int) -> None:
        self.inner = inner
        self.name = f"tile_packed_{inner}"

    def expects(self, matrix: Matrix) -> Packed:
        tiles, outer = -(-matrix.n // 8), matrix.k // (16 * self.inner)
        return Packed(torch.int32, (tiles, outer, 32, self.inner // 2), (matrix.k // matrix.block_k, 8 * tiles, 2))

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if reason := refuses_groups(matrix, 16 * self.inner):
            return reason
        if parts.scale.dtype != torch.bfloat16:
            return f"scales must be bfloat16, not {parts.scale.dtype}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        codes = _fill_rows(unpack_bits(parts.data, 4, matrix.k))
        return parts._replace(data=pack_tiles(codes, self.inner), scale=_filled_pairs(parts))

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        codes = unpack_tiles(parts.data)[..., : matrix.n, :]
        scale = parts.scale[..., : matrix.n, 0].transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return parts._replace(data=pack_bits(codes, 4), scale=scale)


def refuses_groups(matrix: Matrix, unit: int) -> str | None:
    """Why PyTorch's int4pack kernels cannot take the matrix, or None; ``unit``: K must be a multiple of it."""
    if matrix.dtype != "int4":
        return f"it holds int4, not {matrix.dtype}"
    if matrix.block_n != 1 or matrix.block_k not in GROUPS:
        return f"scales must be per row and group of {GROUPS}, not per {matrix.block_n}x{matrix.block_k} block"
    if matrix.k % matrix.block_k or matrix.k % unit:
        return f"K={matrix.k} must be a multiple of the group {matrix.block_k} and of {unit}"
    return None


def pack_tiles(codes: Tensor, inner: int) -> Tensor:
    """uint8 codes [..., N, K] -> int32 [..., N/8, K/(inner*16), 32, inner/2]; N % 8 == 0, K % (inner*16) == 0."""
    *batch, n, k = codes.shape
    tiles = codes.reshape(*batch, n // 8, 8, k // (16 * inner), inner // 2, 4, 4, 2)
    # [tile, row, k_outer, pair, quad, lane%4, odd] -> [tile, k_outer, row, lane%4, pair, quad, odd]
    at = len(batch)
    order = [*range(at), *(at + i for i in (0, 2, 1, 5, 3, 4, 6))]
    columns = tiles.permute(order).reshape(*batch, n // 8, k // (16 * inner), 32, inner // 2, 8).to(torch.int32)
    word = columns[..., 0]
    for i, shift in enumerate(SHIFTS[1:], 1):
        word = word | (columns[..., i] << shift)
    return word


def unpack_tiles(data: Tensor) -> Tensor:
    """The inverse of :func:`pack_tiles`."""
    *batch, tiles, outer, _, pairs = data.shape
    columns = torch.stack([(data >> shift) & 0xF for shift in SHIFTS], -1).to(torch.uint8)
    parts = columns.reshape(*batch, tiles, outer, 8, 4, pairs, 4, 2)
    at = len(batch)
    order = [*range(at), *(at + i for i in (0, 2, 1, 4, 5, 3, 6))]
    return parts.permute(order).reshape(*batch, 8 * tiles, 32 * outer * pairs)


def _fill_rows(codes: Tensor) -> Tensor:
    missing = -codes.shape[-2] % 8
    return torch.cat([codes, codes.new_zeros(*codes.shape[:-2], missing, codes.shape[-1])], -2) if missing else codes


def pairs(parts: Quantized) -> Tensor:
    """[..., N, K/g, 2] in float32: value = (code - 8) * s + z."""
    scale = parts.scale.float()
    shift = torch.zeros_like(scale) if parts.zero is None else (8 - parts.zero.float()) * scale
    return torch.stack([scale, shift], -1)


def _filled_pairs(parts: Quantized) -> Tensor:
    filled = _fill_rows(pairs(parts).flatten(-2)).unflatten(-1, (-1, 2))
    return filled.transpose(-3, -2).to(parts.scale.dtype).contiguous()


for _inner in (2, 4, 8):
    register_layout(TilePacked(_inner))
