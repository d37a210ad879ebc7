"""int4 and int8 weights by many rows of x on Hopper: launches kernels/many_rows.cu with a fitting block size.

Decoding the weight costs little next to the products, but keeps the tensor cores less busy than the library's own
kernels do: from some number of rows on it is faster to dequantize the weight once and multiply by that.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.backends import aten
from bitport.backends.cuda import capability, compiled, operand
from bitport.backends.cuda.compiled import Function, address, missing
from bitport.numerics import NUMBER_TYPES
from bitport.ops import Weight

STEP = 64
"""Columns of x that are multiplied at a time."""
MOST_ROWS = 1024
"""With more rows a dense product was as fast, for every weight measured on an H100."""


class Size(NamedTuple):
    """Size of a block; the .cu file explains the fields. ``blocks``: how many a multiprocessor has registers for."""

    rows: int
    warpgroups: int
    stages: int
    blocks: int
    splits: int = 1

    @property
    def columns(self) -> int:
        return 64 * self.warpgroups

    def shared(self, bits: int) -> int:
        """Bytes of shared memory: the prefetched stages, or the sums; and padding to align them to 1024."""
        copied = self.stages * (self.rows * 2 * STEP + self.columns * STEP * bits // 8)
        return max(copied, self.rows * (self.columns + 4) * 4) + 1024


class Form(NamedTuple):
    """What the source is compiled for besides the size."""

    bits: int
    flip: int
    per_step: int
    """Scales per STEP columns; 0: one for the row."""
    dtype: torch.dtype


COSTS = {
    "int4": ((Size(64, 1, 6, 2), 0.24), (Size(128, 2, 4, 1), 0.52), (Size(256, 2, 4, 1), 0.74)),
    "int8": (
        *((Size(16, 1, 8, 2), 0.41), (Size(64, 1, 6, 2), 0.45)),
        *((Size(128, 2, 4, 1), 0.77), (Size(256, 2, 4, 1), 0.85)),
    ),
}
"""Microseconds per step, measured on an H100: block sizes are chosen by the estimated time of the product."""
BEGIN = {1: 2.0, 2: 4.0}
SMALL_BEGIN = {1: 2.0, 2: 1.5, 4: 3.0}
"""Splits -> microseconds before the first step and after the last. SMALL_BEGIN is for blocks of at most 64 rows: two of
them fit on a multiprocessor, and splitting K is what provides the second."""


def refuses(number: str, x: Tensor, *rest: Any) -> str | None:
    """``number``: int4 or int8; the number of rows from which the kernel is the fastest differs between them."""
    weight = Weight(*rest[:10])
    if reason := operand.refuses(number, x, weight, STEP):
        return reason
    if weight.block_k % STEP and weight.block_k != STEP // 2:
        return f"blocks of the scale must have {STEP // 2} columns or a multiple of {STEP}, not {weight.block_k}"
    m = x.numel() // weight.k
    if m > MOST_ROWS:
        return f"it is chosen for 1 to {MOST_ROWS} rows; x has {m}"
    return capability.other_than(x.device, 9) or missing()


def run(x: Tensor, *rest: Any) -> Tensor:
    weight = Weight(*rest[:10])
    m, multiprocessors = x.numel() // weight.k, capability.multiprocessors(x.device)
    return product(x, weight, rest[10], size_of(weight.dtype, m, weight.n, weight.k, multiprocessors))


@functools.cache
def size_of(number: str, m: int, n: int, k: int, multiprocessors: int) -> Size:
    return min(sizes(number, m, n, k, multiprocessors))[1]


def sizes(number: str, m: int, n: int, k: int, multiprocessors: int) -> list[tuple[float, Size]]:
    """Return all (estimated microseconds, size)."""
    every = []
    for size, cost in COSTS[number]:
        for splits, begin in (SMALL_BEGIN if size.blocks > 1 else BEGIN).items():
            blocks = -(-n // size.columns) * -(-m // size.rows) * splits
            steps = -(-k // (STEP * splits))
            every.append((begin + cost * steps * math.ceil(blocks / multiprocessors), size._replace(splits=splits)))
    return every


def product(x: Tensor, weight: Weight, bias: Tensor | None, size: Size) -> Tensor:
    n, k, groups = weight.n, weight.k, weight.k // weight.block_k
    rows, data = aten.rows(x), aten.aligned(weight.data)
    m, y = rows.shape[0], x.new_empty(*x.shape[:-1], n)
    parts = weight.scale, weight.zero, None if bias is None else bias.to(x.dtype)
    held = [None if part is None else part.contiguous() for part in parts]
    per_step = 0 if groups == 1 else 2 if weight.block_k < STEP else 1
    form = Form(NUMBER_TYPES[weight.dtype].bits, operand.FLIPPED[weight.layout], per_step, x.dtype)
    with torch.cuda.device(x.device):
        _function(size, form, x.device)(
            *map(address, (rows, data, *held, y)),
            *map(ctypes.c_int, (m, n, k, groups, max(1, weight.block_k // STEP))),
            grid=(-(-n // size.columns), -(-m // size.rows), size.splits),
            threads=128 * size.warpgroups,
            shared=size.shared(form.bits),
        )
    return y


@functools.cache
def _function(size: Size, form: Form, device: torch.device) -> Function:
    return Function(compiled.binary(source(size, form), "90a"), "many_rows", size.shared(form.bits))


def source(size: Size, form: Form) -> str:
    values = {
        **{"BITS": form.bits, "FLIP": form.flip, "BM": size.rows, "WARPGROUPS": size.warpgroups},
        **{"STAGES": size.stages, "SPLITS": size.splits, "BLOCKS": size.blocks, "PER_STEP": form.per_step},
        **{"HALF": int(form.dtype == torch.float16), "CLUSTERS": 1},
    }
    return compiled.source("many_rows", values, instruction(size.rows, operand.TYPES[form.dtype]))


def instruction(rows: int, dtype: str) -> str:
    """Define WGMMA(d, a, b): 64 rows of W from registers by ``rows`` rows of x from shared memory, 16 columns of each;
    a thread holds ``rows`` / 2 of the sums."""
    sums = rows // 2
    named = ", ".join(f"%{each}" for each in range(sums))
    first = ", ".join(f"%{sums + each}" for each in range(4))
    bound = ", ".join(f'"+f"((d)[{each}])' for each in range(sums))
    given = ", ".join(f'"r"((a)[{each}])' for each in range(4))
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{dtype}.{dtype}"
    code = f"{name} {{{named}}}, {{{first}}}, %{sums + 4}, 1, 1, 1, 0;"
    return f'#ifndef EMULATED\n#define WGMMA(d, a, b) asm volatile("{code}" : {bound} : {given}, "l"(b))\n#endif\n'
