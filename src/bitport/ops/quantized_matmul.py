"""quantized_matmul: the op of the PyTorch/XLA quantization page, on every device.

``w`` holds signed codes, unpacked, one per byte; the arguments select one of::

    block_size -1   w int8 [N, K]         scaler [N]         zero_point [N]
    block_size b    w int8 [K/b, b, N]    scaler [K/b, N]    zero_point [K/b, N]

    y[.., n] = sum over c of  scaler[c, n] * sum_s x[.., c, s] * w[c, s, n]  -  zero_point[c, n] * sum_s x[.., c, s]

so ``zero_point`` is in units of the result: it is (zero in codes) * scaler, a float. ``quantize_activation`` rounds
each row of x to int8 first (symmetric, scale = amax / 127); both sums above then run over the rounded row.
``int4_weight`` means that the codes are in -8..7, so that a device may pack them.

Unlike the original, this op also supports blocks together with quantize_activation; its result has x's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, fake_quantize
from bitport.ops import samples
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample

SCHEMA = (
    "(Tensor x, Tensor w, Tensor scaler, Tensor? zero_point=None, int? block_size=-1, "
    "bool? int4_weight=False, bool? quantize_activation=False) -> Tensor"
)


def _check(
    x: Tensor,
    w: Tensor,
    scaler: Tensor,
    zero_point: Tensor | None = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> None:
    if x.dtype not in FLOATS or x.dim() == 0:
        raise ArgumentError(f"x must be float32, bfloat16 or float16 [..., K], not {x.dtype} {[*x.shape]}")
    if w.dtype != torch.int8:
        raise ArgumentError(f"w must be int8 (one code in a byte, also for int4_weight), not {w.dtype}")
    k = x.shape[-1]
    per_channel = block_size is None or block_size == -1
    if not per_channel and (block_size < 1 or k % block_size):  # type: ignore[operator]
        raise ArgumentError(f"block_size {block_size} must be -1 or divide K={k}")
    wanted = (None, k) if per_channel else (k // block_size, block_size, None)  # type: ignore[operator]
    if w.dim() != len(wanted) or any(size not in (None, have) for size, have in zip(wanted, w.shape, strict=True)):
        shape = ["N" if size is None else size for size in wanted]
        raise ArgumentError(f"w must have shape {shape} for K={k}, block_size={block_size}, not {[*w.shape]}")
    n = w.shape[0] if per_channel else w.shape[2]
    scales = (n,) if per_channel else (w.shape[0], n)
    affine = [("scaler", scaler), *([] if zero_point is None else [("zero_point", zero_point)])]
    for name, part in affine:
        if tuple(part.shape) != scales or not part.is_floating_point():
            raise ArgumentError(f"{name} must be float {[*scales]}, not {part.dtype} {[*part.shape]}")
    for name, other in (("w", w), *affine):
        if other.device != x.device:
            raise ArgumentError(f"{name} is on {other.device}, x on {x.device}; move both to one device")


def _generic(
    x: Tensor,
    w: Tensor,
    scaler: Tensor,
    zero_point: Tensor | None = None,
    block_size: int | None = -1,
    int4_weight: bool | None = False,
    quantize_activation: bool | None = False,
) -> Tensor:
    rows = fake_quantize(x, "int8") if quantize_activation else x.float()
    y = rows @ _dense(w, scaler, zero_point)
    return y.to(x.dtype)


def _dense(w: Tensor, scaler: Tensor, zero_point: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The float weight [K, N]: code * scaler - zero_point."""
    blocks = w.t()[None] if w.dim() == 2 else w
    value = blocks.to(dtype) * scaler.to(dtype).reshape(-1, 1, blocks.shape[-1])
    if zero_point is not None:
        value = value - zero_point.to(dtype).reshape(-1, 1, blocks.shape[-1])
    return value.flatten(0, 1)


def _fake(x: Tensor, w: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0] if w.dim() == 2 else w.shape[2]))


def _backward(grad: Tensor, x: Tensor, w: Tensor, scaler: Tensor, zero_point: Tensor | None, *rest: object) -> Tensor:
    return (grad.float() @ _dense(w, scaler, zero_point).T).to(x.dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Every row of the page's table: per channel and blockwise, sym and asym, W8 and W4, A16 and A8, each on rows that
    are contiguous, strided, and none."""
    n, k, block = 24, 64, 16
    for blockwise, asym, int4, dynamic in itertools.product((False, True), repeat=4):
        at = samples.generator(blockwise, asym, int4, dynamic)
        low, high = (-8, 8) if int4 else (-128, 128)
        codes = torch.randint(low, high, (k // block, block, n) if blockwise else (n, k), generator=at).to(torch.int8)
        grid = (k // block, n) if blockwise else (n,)
        scaler = (torch.rand(grid, generator=at) + 0.5).to(device, dtype)
        zero = (torch.randint(-4, 4, grid, generator=at).to(device) * scaler).to(dtype) if asym else None
        codes = codes.to(device)

        name = "-".join(
            (
                "blockwise" if blockwise else "channel",
                "asym" if asym else "sym",
                f"w{4 if int4 else 8}a{8 if dynamic else 16}",
            )
        )
        rest = (codes, scaler, zero, block if blockwise else -1, int4, dynamic)
        for kind, x in _inputs(device, dtype, k):

            def expected(
                x: Tensor = x, w: Tensor = codes, s: Tensor = scaler, z: Tensor | None = zero, d: bool = dynamic
            ) -> Tensor:
                rows = fake_quantize(x, "int8") if d else x
                return rows.cpu().double() @ _dense(w.cpu(), s.cpu(), None if z is None else z.cpu(), torch.float64)

            budget = samples.product_budget(dtype, k, x.numel() // k * n)
            yield Sample(name + kind, (x, *rest), expected, budget)


def _inputs(device: torch.device, dtype: torch.dtype, k: int) -> Iterator[tuple[str, Tensor]]:
    yield "", samples.rows(device, dtype, 3, k)
    yield "-strided", samples.rows(device, dtype, 6, 2 * k).reshape(2, 3, 2 * k)[..., 1::2]
    yield "-empty", samples.rows(device, dtype, 0, k)


declare(
    Op("quantized_matmul", SCHEMA, check=_check, generic=_generic, fake=_fake, samples=_samples, backward=_backward)
)
