"""Codes of 1 to 8 bits in tiles of 32 rows by 32 columns: the layout of the native CPU kernels.

``data`` is uint8 [N/32][K/32][128 * bits]; N and K are padded to multiples of 32 with code 0. A tile has 16 lines of 64
codes: line 8h + p holds rows 16h .. 16h+15 and columns 4p .. 4p+3, and in it

    code 32 (c // 2) + 2 r + c % 2      belongs to row 16h + r, column 4p + c

which is two lines of column pairs, the operand layout of bf16 matrix units. The bits of a code are split, from the
lowest, into digits of 8, 4, 2 and 1 bits that add up to ``bits``: 6 = 4 + 2, 5 = 4 + 1. Each digit has its own plane,
the widest first: 16 lines of D = 8 * digit bytes, where byte j of a line holds the digits of codes j, j + D, j + 2D ..
from the lowest bits up; for 1-bit digits, bit q of the 64-bit line belongs to code q.

``scale`` and ``zero`` are [N/32][groups][32], one entry per row; values shared by several rows are repeated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.layouts.base import Matrix, Packed, register_layout
from bitport.numerics import NUMBER_TYPES, SCALES, ZEROS, Quantized, from_storage, to_storage
from bitport.numerics.packing import as_bytes

TILE = 32
DIGITS = (8, 4, 2, 1)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""The storage of floats of 8 bits that the kernels decode by their fields. They take every integer, and look up codes
of other types in a table if those have up to 4 bits, or 6."""
UNIT = 16
"""The group size must be a multiple of this many columns."""


class CpuTiles:
    """``pack_codes`` and ``unpack_codes`` are faster equivalents of :func:`pack_tiles` and :func:`unpack_tiles` for
    tensors on the CPU."""

    name = "cpu_tiles"
    data_ndim = 3
    weight_only = False

    def __init__(
        self,
        devices: tuple[str, ...] = (),
        pack_codes: Callable[[Matrix, Tensor], Tensor] | None = None,
        unpack_codes: Callable[[Matrix, Tensor], Tensor] | None = None,
    ) -> None:
        self.devices = devices
        self._pack, self._unpack = pack_codes or pack_tiles, unpack_codes or unpack_tiles

    def expects(self, matrix: Matrix) -> Packed:
        tiles = -(-matrix.n // TILE)
        grid = (tiles, matrix.grid[1], TILE)
        return Packed(torch.uint8, (tiles, *_tile_shape(matrix)), grid, grid)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        if reason := refuses_matrix(matrix):
            return reason
        if parts.scale.dtype not in SCALES:
            return f"scales must be float32, bfloat16, float16, e8m0 or e4m3, not {parts.scale.dtype}"
        if parts.zero is not None and parts.zero.dtype not in ZEROS:
            return f"zeros must be uint8, float32, bfloat16 or float16, not {parts.zero.dtype}"
        return None

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        pack = self._pack if parts.data.device.type == "cpu" else pack_tiles
        zero = None if parts.zero is None else _to_tiles(matrix, parts.zero)
        return Quantized(pack(matrix, parts.data), _to_tiles(matrix, parts.scale), zero, parts.scale2)

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        unpack = self._unpack if parts.data.device.type == "cpu" else unpack_tiles
        zero = None if parts.zero is None else _from_tiles(matrix, parts.zero)
        return Quantized(unpack(matrix, parts.data), _from_tiles(matrix, parts.scale), zero, parts.scale2)

    def rows(self, matrix: Matrix, parts: Quantized, start: int, stop: int) -> Quantized | None:
        """The parts of rows start .. stop as views, if these are whole tiles. None for a batch of matrices: their rows
        would not be contiguous, which kernels require."""
        borders = start % TILE == 0 and (stop % TILE == 0 or stop == matrix.n)
        if not borders or start == stop or parts.data.dim() > self.data_ndim:
            return None
        first, count = start // TILE, -(-stop // TILE) - start // TILE
        data, scale, zero = (None if part is None else part.narrow(-3, first, count) for part in parts[:3])
        return Quantized(data, scale, zero, parts.scale2)  # type: ignore[arg-type]


@functools.lru_cache(4096)
def refuses_matrix(matrix: Matrix) -> str | None:
    """Why the layout cannot hold such a matrix, whatever the dtypes of its parts, or None."""
    if matrix.dtype not in NUMBER_TYPES:
        return f"{matrix.dtype} is for states of optimizers; no product takes it"
    number = NUMBER_TYPES[matrix.dtype]
    if number.kind != "int" and number.bits > 4 and number.bits != 6 and number.storage not in FLOAT8:
        return f"the native kernels do not decode {matrix.dtype}"
    if matrix.block_k % UNIT and matrix.block_k < matrix.k:
        return f"a group must be a multiple of {UNIT} columns or the whole row, not {matrix.block_k} of {matrix.k}"
    return None if matrix.k and matrix.n else f"an empty matrix has no tiles: {matrix.n}x{matrix.k}"


def pack_tiles(matrix: Matrix, data: Tensor) -> Tensor:
    """Convert canonical data [.., N, bytes] to tiles."""
    codes = from_storage(data, NUMBER_TYPES[matrix.dtype], matrix.k)
    batch = codes.shape[:-2]
    filled = F.pad(codes, (0, -matrix.k % TILE, 0, -matrix.n % TILE))
    tiles, steps = filled.shape[-2] // TILE, filled.shape[-1] // TILE
    # [batch, tile, half, r, step, p, c // 2, c % 2] -> [batch, tile, step, half, p, c // 2, r, c % 2]
    lines = filled.reshape(math.prod(batch), tiles, 2, 16, steps, 8, 2, 2).permute(0, 1, 4, 2, 5, 6, 3, 7)
    lines = lines.reshape(*batch, tiles, steps, 16, 64)
    planes, below = [], 0
    for digit in _digits(matrix):
        part = (lines >> below) & ((1 << digit) - 1)
        below += digit
        planes.append(_merged(part, digit).flatten(-2))
    return torch.cat(planes, -1)


def unpack_tiles(matrix: Matrix, tiles: Tensor) -> Tensor:
    """Convert tiles to canonical data."""
    lines = unpack_lines(matrix, tiles)
    *batch, count, steps, _, _ = lines.shape
    order = lines.reshape(math.prod(batch), count, steps, 2, 8, 2, 16, 2).permute(0, 1, 3, 6, 2, 4, 5, 7)
    codes = order.reshape(*batch, count * TILE, steps * TILE)[..., : matrix.n, : matrix.k]
    return to_storage(codes.contiguous(), NUMBER_TYPES[matrix.dtype])


def unpack_lines(matrix: Matrix, tiles: Tensor) -> Tensor:
    """Tiles [.., 128 * bits] to codes [.., 16, 64]."""
    codes, below, start = torch.zeros((), dtype=torch.uint8, device=tiles.device), 0, 0
    for digit in _digits(matrix):
        size = 16 * 8 * digit
        plane = tiles[..., start : start + size].unflatten(-1, (16, 8 * digit))
        codes = codes | (_split(plane, digit) << below)
        below, start = below + digit, start + size
    return codes


def _merged(part: Tensor, digit: int) -> Tensor:
    """Merge the digits of codes [.., 64] into bytes [.., 8 * digit]."""
    fields = part.unflatten(-1, (8, 8)).transpose(-1, -2) if digit == 1 else part.unflatten(-1, (8 // digit, -1))
    merged = fields[..., 0, :]
    for i in range(1, 8 // digit):
        merged = merged | (fields[..., i, :] << (i * digit))
    return merged


def _split(plane: Tensor, digit: int) -> Tensor:
    """The inverse of :func:`_merged`."""
    fields = [(plane >> (i * digit)) & ((1 << digit) - 1) for i in range(8 // digit)]
    return torch.stack(fields, -1 if digit == 1 else -2).flatten(-2)


def _digits(matrix: Matrix) -> list[int]:
    return [digit for digit in DIGITS if NUMBER_TYPES[matrix.dtype].bits & digit]


def _tile_shape(matrix: Matrix) -> tuple[int, int]:
    return -(-matrix.k // TILE), 128 * NUMBER_TYPES[matrix.dtype].bits


def _to_tiles(matrix: Matrix, part: Tensor) -> Tensor:
    """[.., N / block_n, groups] -> [.., N/32, groups, 32]"""
    raw = as_bytes(part)
    rows = raw.repeat_interleave(matrix.block_n, -2)[..., : matrix.n, :] if matrix.block_n > 1 else raw
    filled = F.pad(rows, (0, 0, 0, -matrix.n % TILE))
    return filled.unflatten(-2, (-1, TILE)).transpose(-1, -2).contiguous().view(part.dtype)


def _from_tiles(matrix: Matrix, part: Tensor) -> Tensor:
    rows = as_bytes(part).transpose(-1, -2).flatten(-3, -2)[..., : matrix.n : matrix.block_n, :]
    return rows.clone(memory_format=torch.contiguous_format).view(part.dtype)


register_layout(CpuTiles())
