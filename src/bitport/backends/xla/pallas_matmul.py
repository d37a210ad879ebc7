"""Pallas kernel for TPU: x [M, K] times a k_major weight [K, N].

    weight only    x float, w int4 or int8      w is scaled in VMEM, rounded to x's dtype, multiplied in float
    integers       x int8, w int4 or int8       int32 sums per group of K, then scaled

The grid is (M/bm, N/bn, K/bk); a float32 accumulator [bm, bn] in VMEM adds up the steps along K. Blocks of group scales
are [bk/g, bn]: the last two sizes of a block must be multiples of (8, 128) or those of the whole array, which
determines bk. The weight is read from HBM once per bm rows, in its low-bit form.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8


class Tiles(NamedTuple):
    bm: int
    bn: int
    bk: int


def tiles(m: int, n: int, k: int, group: int) -> Tiles | str:
    """Return block sizes for x [m, k] and w [k, n] with ``group`` codes of K per scale, or why there are none.

    x is padded to whole blocks of rows; N and K are not padded. bk covers a multiple of 8 scales, in at most 2048 codes
    so that two blocks of each operand and the weight in float fit into 16 MB; without such a size, all of a K of at
    most 4096."""
    if n % LANES or k % LANES:
        return f"N and K must be multiples of {LANES}, not {n} and {k}"
    if k % group or group % SUBLANES:
        return f"groups must divide K={k} and be multiples of {SUBLANES}, not of {group}"
    bn = next(size for size in (512, 256, LANES) if n % size == 0)
    bk = next((size for size in range(2048, 0, -LANES) if k % size == 0 and size % (group * SUBLANES) == 0), None)
    if group == k:  # one scale for all of K: its block is [1, bn] at every step along K
        bk = next(size for size in range(1024, 0, -LANES) if k % size == 0)
    elif bk is None:
        if k > 4096:
            return f"no block of K={k} holds a multiple of {SUBLANES} groups of {group}"
        bk = k
    return Tiles(min(-(-m // 16) * 16, 256), bn, bk)


def _kernel(x_ref: Any, w_ref: Any, s_ref: Any, z_ref: Any, o_ref: Any, acc_ref: Any, *, group: int) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    x, rows = x_ref[...], w_ref.shape[0]
    groups = -(-rows // group)
    if x.dtype == jnp.int8:
        for at in range(groups):
            here = slice(at * group, min((at + 1) * group, rows))
            part = x[:, here]
            sums = jnp.dot(part, w_ref[here, :].astype(jnp.int8), preferred_element_type=jnp.int32).astype(jnp.float32)
            if z_ref is not None:
                total = jnp.sum(part.astype(jnp.int32), 1, keepdims=True).astype(jnp.float32)
                sums = sums - total * z_ref[at : at + 1, :]
            acc_ref[...] += sums * s_ref[at : at + 1, :]
    else:
        value = w_ref[...].astype(jnp.float32).reshape(groups, rows // groups, w_ref.shape[1])
        if z_ref is not None:
            value = value - z_ref[...][:, None, :]
        value = (value * s_ref[...][:, None, :]).reshape(rows, w_ref.shape[1])
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        acc_ref[...] += jnp.dot(x, value.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


@functools.partial(jax.jit, static_argnames=("group", "shape", "out_dtype", "interpret"))
def matmul(
    x: Array,
    w: Array,
    scale: Array,
    zero: Array | None = None,
    *,
    group: int,
    shape: Tiles,
    out_dtype: Any = None,
    interpret: bool = False,
) -> Array:
    """Compute x [M, K] @ ((w - zero) * scale) [K, N]. scale and zero are float32 [K/group, N]; zero is relative to the
    midpoint of the codes. The result has ``out_dtype``, by default x's own (float32 for int8)."""
    (m, k), n = x.shape, w.shape[1]
    bm, bn, bk = shape
    x = jnp.pad(x, ((0, -m % bm), (0, 0)))
    whole = group >= k
    scales = pl.BlockSpec((1 if whole else bk // group, bn), lambda i, j, step: (0, j) if whole else (step, j))
    operands = [x, w, scale] + ([] if zero is None else [zero])
    specs = [
        pl.BlockSpec((bm, bk), lambda i, j, step: (i, step)),
        pl.BlockSpec((bk, bn), lambda i, j, step: (step, j)),
        *[scales] * (len(operands) - 2),
    ]
    body = functools.partial(_kernel, group=bk if whole else group)
    if zero is None:
        body = functools.partial(_without_zero, body)
    result = jnp.float32 if x.dtype == jnp.int8 else x.dtype
    y = pl.pallas_call(
        body,
        grid=(x.shape[0] // bm, n // bn, k // bk),
        in_specs=specs,
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], n), out_dtype or result),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=2 * x.shape[0] * n * k, bytes_accessed=_nbytes(*operands) + 4 * x.shape[0] * n, transcendentals=0
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*operands)
    return y[:m]


def _nbytes(*arrays: Array) -> int:
    """Size on a TPU, which stores two int4 to a byte."""
    return sum(array.size * (4 if array.dtype == jnp.int4 else 8 * array.dtype.itemsize) // 8 for array in arrays)


def _without_zero(body: Any, x_ref: Any, w_ref: Any, s_ref: Any, *rest: Any) -> None:
    body(x_ref, w_ref, s_ref, None, *rest)
