"""4-bit codes in tiles of 32 rows by 32 columns: what the native CPU kernels read.

``data`` is uint8 [N/32][K/32][2][8][32]. Half h of a tile holds its rows 16h .. 16h+15, line p the columns 4p .. 4p+3::

    byte 2i + o of line p    low nibble: row i of the half, column 4p + o      high nibble: column 4p + 2 + o

so that one mask and one shift of a line give two lines of column pairs, as bf16 matrix units want them. The canonical
bytes of four columns become these two by a transposition of their 2x2 nibbles, and so they come back. ``scale`` and
``zero`` are [N/32][K/g][32]. N is filled up to a multiple of 32 with code 0 and scale 0.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import Quantized

TILE = 32
TYPES = ("int4", "nf4", "float4_e2m1")
SCALES = (torch.float32, torch.bfloat16, torch.float16)


class CpuTiles4:
    name = "cpu_tiles4"
    data_ndim = 5

    def __init__(self, devices: tuple[str, ...] = ()) -> None:
        self.devices = devices

    def expects(self, matrix: Matrix) -> Packed:
        tiles = -(-matrix.n // TILE)
        grid = (tiles, matrix.k // matrix.block_k, TILE)
        return Packed(torch.uint8, (tiles, matrix.k // TILE, 2, 8, TILE), grid, grid)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if reason := refuses_matrix(matrix):
            return reason
        if parts.scale2 is not None or parts.scale.dtype not in SCALES:
            return f"scales must be float32, bfloat16 or float16 without a global one, not {parts.scale.dtype}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        batch, tiles, columns = parts.data.shape[:-2], -(-matrix.n // TILE), matrix.k // TILE
        # [batch, tile, half, i, k tile, p, o] -> [batch, tile, k tile, half, p, i, o]
        pairs = _fill_rows(parts.data).reshape(math.prod(batch), tiles, 2, 16, columns, 8, 2)
        lines = transposed_nibbles(pairs).permute(0, 1, 4, 2, 5, 3, 6)
        data = lines.reshape(*batch, tiles, columns, 2, 8, TILE)
        zero = None if parts.zero is None else _to_tiles(parts.zero)
        return Quantized(data, _to_tiles(parts.scale), zero, parts.scale2)

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        *batch, tiles, columns = parts.data.shape[:-3]
        lines = parts.data.reshape(math.prod(batch), tiles, columns, 2, 8, 16, 2).permute(0, 1, 3, 5, 2, 4, 6)
        data = transposed_nibbles(lines).reshape(*batch, tiles * TILE, matrix.k // 2)
        zero = None if parts.zero is None else _from_tiles(parts.zero, matrix.n)
        return Quantized(_first_rows(data, matrix.n), _from_tiles(parts.scale, matrix.n), zero, parts.scale2)


@functools.cache
def refuses_matrix(matrix: Matrix) -> str | None:
    """Why no such matrix is held, whatever the dtypes of its parts."""
    if matrix.dtype not in TYPES:
        return f"it holds {', '.join(TYPES)}, not {matrix.dtype}"
    if matrix.block_n != 1 or matrix.block_k % TILE:
        block = f"{matrix.block_n}x{matrix.block_k}"
        return f"scales must be per row and group of a multiple of {TILE}, not per {block} block"
    if matrix.k % matrix.block_k or not matrix.k:
        return f"K={matrix.k} must be a multiple of the group {matrix.block_k}"
    return None


def take_rows(parts: Quantized, at: Tensor) -> Quantized:
    """Rows ``at`` ([M], integers) of one packed matrix, in the plain layout; nothing else is unpacked."""
    tile, row = at // TILE, at % TILE
    words = parts.data.view(torch.int16)[tile, :, row // 16, :, row % 16]  # [M, K/32, 8]: one row's two bytes of a line
    lines = words.contiguous().view(torch.uint8).unflatten(-1, (8, 2))
    zero = None if parts.zero is None else parts.zero[tile, :, row]
    return Quantized(transposed_nibbles(lines).flatten(1), parts.scale[tile, :, row], zero, parts.scale2)


def transposed_nibbles(pairs: Tensor) -> Tensor:
    """uint8 [.., 2]: the two low nibbles in the first byte, the two high ones in the second. Its own inverse."""
    first, second = pairs.unbind(-1)
    return torch.stack([(first & 0xF) | (second << 4), (first >> 4) | (second & 0xF0)], -1)


def _fill_rows(part: Tensor) -> Tensor:
    missing = -part.shape[-2] % TILE
    return F.pad(part, (0, 0, 0, missing)) if missing else part


def _first_rows(part: Tensor, n: int) -> Tensor:
    return part if part.shape[-2] == n else part[..., :n, :].clone(memory_format=torch.contiguous_format)


def _to_tiles(part: Tensor) -> Tensor:
    """[.., N, K/g] -> [.., N/32, K/g, 32]"""
    return _fill_rows(part).unflatten(-2, (-(-part.shape[-2] // TILE), TILE)).transpose(-1, -2).contiguous()


def _from_tiles(part: Tensor, n: int) -> Tensor:
    return _first_rows(part.transpose(-1, -2).flatten(-3, -2), n)


register_layout(CpuTiles4())
