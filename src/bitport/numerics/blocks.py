"""A matrix [..., N, K] seen as blocks [..., SN, bn, SK, bk], with SN = ceil(N/bn), SK = ceil(K/bk).

`block` is (bn, bk) with 0 for the whole axis, as in Format: always one block, even for an empty axis. In the blocked
view a scale [..., SN, SK] broadcasts as [..., SN, 1, SK, 1] without being expanded to the size of the matrix. Only
short edge blocks cost a padded copy.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Block = tuple[int, int]


def _split(size: int, block: int) -> tuple[int, int, int]:
    """(number of blocks, block length, elements missing in the last block) of an axis. A block longer than the axis is
    clamped to it, without padding. One of one element never is longer: a program that knows the size only when it runs
    cannot be traced past that question."""
    if block == 0 or (block > 1 and block > size > 0):
        length = max(size, 1)
        return 1, length, length - size
    return -(-size // block), block, -size % block


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """[..., N, K] to [..., SN, bn, SK, bk]; short edge blocks are zero-padded."""
    if x.ndim < 2:
        raise ValueError(f"blocks are cut from matrices [..., N, K], got shape {tuple(x.shape)}")
    row_blocks, rows, short_rows = _split(x.shape[-2], block[0])
    column_blocks, columns, short_columns = _split(x.shape[-1], block[1])
    if short_rows or short_columns:
        x = F.pad(x, (0, short_columns, 0, short_rows))
    return x.reshape(*x.shape[:-2], row_blocks, rows, column_blocks, columns)


def from_blocks(x: Tensor, n: int, k: int) -> Tensor:
    """The inverse of :func:`to_blocks`, [..., n, k]. A short last block is concatenated to the full ones instead of
    slicing the padded matrix: in a loop over k with an index k // block, inductor (torch 2.13, CPU) iterates over full
    blocks only."""
    *leading, row_blocks, rows, column_blocks, columns = x.shape
    if column_blocks > 1 and (short := k % columns):
        whole = x[..., :-1, :].reshape(*leading, row_blocks * rows, k - short)
        last = x[..., -1, :short].reshape(*leading, row_blocks * rows, short)
        return torch.cat([whole, last], -1)[..., :n, :].contiguous()
    return x.reshape(*leading, row_blocks * rows, column_blocks * columns)[..., :n, :k].contiguous()


def spread(scale: Tensor) -> Tensor:
    """[..., SN, SK] to [..., SN, 1, SK, 1], which broadcasts over the blocked view."""
    return scale[..., :, None, :, None]


def expand(scale: Tensor, block: Block, n: int, k: int) -> Tensor:
    """[..., SN, SK] to [..., N, K]: the scale of each element. A view if each axis is one block or has blocks of one
    element, else a copy."""
    row_blocks, rows, _ = _split(n, block[0])
    column_blocks, columns, _ = _split(k, block[1])
    if scale.shape[-2:] != (row_blocks, column_blocks):
        raise ValueError(
            f"blocks of {block} in a matrix of {(n, k)} have {(row_blocks, column_blocks)} scales, "
            f"got {tuple(scale.shape[-2:])}"
        )
    leading = scale.shape[:-2]
    if (row_blocks == 1 or rows == 1) and (column_blocks == 1 or columns == 1):
        return scale.expand(*leading, n, k)
    blocked = spread(scale).expand(*leading, row_blocks, rows, column_blocks, columns)
    return from_blocks(blocked, n, k)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Largest magnitude of each block, in x's dtype; NaN for a block that contains one."""
    return to_blocks(x.abs(), block).amax((-3, -1))
