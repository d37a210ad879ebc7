"""attention: softmax(scale Q K^T + mask) V with quantized K and V.

Keys and values are weight operands with batch dimensions (sequences, key heads) and one row per token. A block of one
row is a scale per token (or per group of channels of a token); a block of 32 rows and one column is a scale per channel
over 32 tokens. The tokens of a sequence are in this order, the dense ones in q's dtype:

    ``first`` dense tokens | quantized tokens | the other dense tokens

The query rows are the newest tokens: with ``causal``, row i of T sees the tokens up to S - T + i of S. Query head h
reads key head h // (query heads / key heads). A row that sees no token gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, quantize
from bitport.ops import samples
from bitport.ops.reference import value_of
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample
from bitport.ops.weight import SCHEMA, Weight, check_weight
from bitport.schemes import preset


def _prefixed(prefix: str) -> str:
    return ", ".join(f"{kind} {prefix}_{name}" for kind, name in (each.split() for each in SCHEMA.split(", ")))


class AttentionArgs(NamedTuple):
    """The arguments of the op, regrouped."""

    q: Tensor
    keys: Weight
    values: Weight
    dense_keys: Tensor | None
    dense_values: Tensor | None
    first: int
    mask: Tensor | None
    causal: bool
    scale: float

    @classmethod
    def of(cls, q: Tensor, *rest: Any) -> AttentionArgs:
        dense_keys, dense_values, first, mask, causal, scale = rest[20:]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return cls(q, Weight(*rest[:10]), Weight(*rest[10:20]), dense_keys, dense_values, first, mask, causal, scale)

    @property
    def tokens(self) -> int:
        return self.keys.n + (0 if self.dense_keys is None else self.dense_keys.shape[2])

    def args(self) -> tuple[Any, ...]:
        return (self.q, *self.keys, *self.values, *self[3:])


def _check(q: Tensor, *rest: Any) -> None:
    if q.dtype not in FLOATS or q.dim() != 4 or not q.shape[3]:
        raise ArgumentError(
            f"q must be float32, bfloat16 or float16 [batch, heads, rows, width] of a width that is not 0, "
            f"not {q.dtype} {[*q.shape]}"
        )
    call = AttentionArgs.of(q, *rest)
    keys, values = call.keys, call.values
    for weight in (keys, values):
        check_weight(*weight)
    batch, heads, _, width = q.shape
    of_keys, of_values = keys.batch, values.batch
    if len(of_keys) != 2 or of_keys[0] != batch or not of_keys[1] or heads % of_keys[1] or keys.k != width:
        raise ArgumentError(
            f"keys must be [{batch}, a divisor of {heads}, tokens, {width}] for q {[*q.shape]}, "
            f"not {[*of_keys, keys.n, keys.k]}"
        )
    if of_values != of_keys or values.n != keys.n:
        raise ArgumentError(
            f"values must be {[*of_keys, keys.n, '...']} as the keys are, not {[*of_values, values.n, values.k]}"
        )
    if keys.data.device != q.device or values.data.device != q.device:
        raise ArgumentError(f"q is on {q.device}, keys on {keys.data.device}, values on {values.data.device}")
    _check_dense(call)
    _check_mask(call)
    if not 0 < call.scale < math.inf:
        raise ArgumentError(f"scale must be a positive number, not {call.scale}")


def _check_dense(call: AttentionArgs) -> None:
    q, keys, values, dense_keys, dense_values, first = call[:6]
    if (dense_keys is None) != (dense_values is None):
        raise ArgumentError("give dense keys and dense values, or neither")
    count = 0
    if dense_keys is not None and dense_values is not None:
        count = dense_keys.shape[2] if dense_keys.dim() == 4 else 0
        for name, part, width in (("keys", dense_keys, keys.k), ("values", dense_values, values.k)):
            shape = (*keys.batch, count, width)
            if part.shape != shape or part.dtype != q.dtype or part.device != q.device:
                raise ArgumentError(
                    f"dense {name} must be {q.dtype} {[*shape]} on {q.device}, "
                    f"not {part.dtype} {[*part.shape]} on {part.device}"
                )
    if not 0 <= first <= count:
        raise ArgumentError(f"first must be from 0 to the {count} dense tokens, not {first}")


def _check_mask(call: AttentionArgs) -> None:
    q, mask, tokens = call.q, call.mask, call.tokens
    rows = q.shape[2]
    if not tokens or (call.causal and rows > tokens):
        raise ArgumentError(f"{rows} rows need at least {rows if call.causal else 1} tokens to look at, not {tokens}")
    if mask is None:
        return
    wanted = (*q.shape[:3], tokens)
    fits = mask.dim() == 4 and all(size in (1, most) for size, most in zip(mask.shape, wanted, strict=True))
    if not fits or (mask.dtype != torch.bool and mask.dtype not in FLOATS) or mask.device != q.device:
        raise ArgumentError(
            f"mask must be bool or float, {[*wanted]} or 1 along some axes, on {q.device}, "
            f"not {mask.dtype} {[*mask.shape]} on {mask.device}"
        )


def joined(weight: Weight, dense: Tensor | None, first: int, dtype: torch.dtype) -> Tensor:
    """Dequantize and concatenate all tokens in sequence order, [batch, heads, tokens, width]."""
    quantized = weight.dense(dtype)
    if dense is None:
        return quantized
    return torch.cat([dense[:, :, :first].to(dtype), quantized, dense[:, :, first:].to(dtype)], 2)


def mask_steps(mask: Tensor | None) -> tuple[int, ...]:
    """The strides of a mask; 0 along axes of one entry, which is for all."""
    if mask is None:
        return (0,) * 4
    return tuple(stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True))


def not_by_token(call: AttentionArgs) -> str | None:
    """Why kernels that decode tokens one by one, as the native ones do, cannot read these; or None."""
    for name, weight, blocks in (("keys", call.keys, True), ("values", call.values, False)):
        if weight.layout != "plain":
            return f"{name} must be in layout plain, not {weight.layout}"
        if weight.scale2 is not None:
            return f"{name} with a second scale are not taken"
        if weight.block_n > 1 and not (blocks and weight.block_k == 1):
            kinds = "token or, of keys, a channel" if blocks else "token"
            return f"{name} must have scales of one {kinds}, not of blocks of {weight.block_n}x{weight.block_k}"
        if weight.block_n == 1 and weight.block_k % 16 and weight.block_k < weight.k:
            return f"{name} must have groups of a multiple of 16, or whole tokens, not of {weight.block_k}"
    return None


def bool_or_float32(mask: Tensor | None) -> Tensor | None:
    """``mask`` in a dtype that the native kernels read."""
    return mask if mask is None or mask.dtype == torch.bool else mask.float()


def rows_together(part: Tensor) -> Tensor:
    """``part`` [batch, heads, rows, width] with the rows of each head contiguous; heads may have any strides."""
    together = part.stride(3) == 1 and part.stride(2) == part.shape[3]
    return part if together or not part.numel() else part.contiguous()


def seen(call: AttentionArgs) -> Tensor | None:
    """Combine ``mask`` and ``causal`` into one mask."""
    rows = call.q.shape[2]
    if not call.causal or rows == 1:
        return call.mask
    past = torch.ones(rows, call.tokens, dtype=torch.bool, device=call.q.device).tril(call.tokens - rows)
    if call.mask is None:
        return past[None, None]
    return call.mask & past if call.mask.dtype == torch.bool else call.mask.masked_fill(~past, -math.inf)


def attend(call: AttentionArgs, dtype: torch.dtype) -> Tensor:
    """Compute attention with keys, values and sums in ``dtype``."""
    keys = joined(call.keys, call.dense_keys, call.first, dtype)
    values = joined(call.values, call.dense_values, call.first, dtype)
    mask = seen(call)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    y = F.scaled_dot_product_attention(call.q.to(dtype), keys, values, mask, scale=call.scale, enable_gqa=True)
    return y.to(call.q.dtype).contiguous()


def _generic(*args: Any) -> Tensor:
    return attend(AttentionArgs.of(*args), torch.float32)


def _fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], rest[16])


FORMATS = {
    "int8": ("int8", "int8"),
    "int4": ("int4-g32", "int4-g16-sym"),
    "int2": ("int2-b8x1", "int2-g16"),
    "fp8": ("fp8-wo", "fp8-wo"),
    "nf4": ("nf4-g16", "int3-g16-fzero"),
}
"""Sample name -> schemes of keys and values."""


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for name, (keys, values) in FORMATS.items():
        for kind, change in (
            ("row", {"rows": 1}),
            ("rows", {"causal": True, "apart": True}),
            ("masked", {"mask": "bool", "tokens": 300, "scale": 8.0, "causal": True}),
            ("added", {"mask": "float", "causal": True}),
            ("dense", {"dense": 7, "first": 3, "mask": "bool", "causal": True, "apart": True}),
            ("fresh", {"tokens": 0, "dense": 9, "causal": True}),
        ):
            yield sample(f"cache-{name}-{kind}", device, dtype, keys, values, **change)


def sample(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    keys: str,
    values: str,
    *,
    shape: tuple[int, int, int, int] = (2, 4, 2, 32),
    value_width: int = 48,
    rows: int = 3,
    tokens: int = 37,
    dense: int = 0,
    first: int = 0,
    mask: str = "",
    causal: bool = False,
    scale: float | None = None,
    apart: bool = False,
) -> Sample:
    """Make a sample. ``shape``: sequences, query heads, key heads, width of keys; ``apart``: in q and the dense tokens
    the heads of a token are adjacent in memory, behind other heads, as a projection returns them. A bool mask hides all
    tokens from the first row; a float mask is in float32, differs per head, and its heads are adjacent."""
    batch, heads, groups, width = shape
    total = tokens + dense

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=samples.generator(name, *sizes)).to(device, dtype)

    def per_head(batch: int, heads: int, rows: int, width: int) -> Tensor:
        if not apart:
            return draw(batch, heads, rows, width)
        return draw(batch, rows, 2 * heads, width)[:, :, heads:].transpose(1, 2)

    def quantized(scheme: str, wide: int) -> Weight:
        fmt = preset(scheme).weight
        return Weight.of(quantize(draw(batch, groups, tokens, wide), fmt), fmt, tokens, wide)

    added = None
    if mask == "float":
        added = draw(batch, rows, total, heads).float().permute(0, 3, 1, 2)
    elif mask == "bool":
        added = draw(batch, 1, rows, total) > -0.5
        added[:, :, 0] = False
    call = AttentionArgs(
        per_head(batch, heads, rows, width),
        quantized(keys, width),
        quantized(values, value_width),
        per_head(batch, groups, dense, width) if dense else None,
        per_head(batch, groups, dense, value_width) if dense else None,
        first,
        added,
        causal,
        width**-0.5 if scale is None else scale,
    )
    expected, square = judge(call)
    budget = samples.product_budget(dtype, round(width * square) + total, expected.numel())
    return Sample(name, (*call.args()[:-1], scale), lambda: expected, budget)


def judge(call: AttentionArgs) -> tuple[Tensor, float]:
    """(the result in float64 on the CPU, the factor by which squared errors of scores count in it).

    A score is a float32 sum of ``width`` products: its squared error is ``width`` times that of rounding a number of
    its size, and it changes the weight of its token by the same relative amount. Tokens contribute to the result by the
    squares of their weights, so the factor is the mean square of the scores weighted by these."""

    def whole(weight: Weight, dense: Tensor | None) -> Tensor:
        value = value_of(weight.plain(), *weight.matrix)
        if dense is not None:
            dense = dense.cpu().double()
            value = torch.cat([dense[:, :, : call.first], value, dense[:, :, call.first :]], 2)
        return value.repeat_interleave(call.q.shape[1] // value.shape[1], 1)

    keys, values = whole(call.keys, call.dense_keys), whole(call.values, call.dense_values)
    score = call.q.cpu().double() @ keys.mT * call.scale
    rows, tokens = score.shape[2:]
    if call.causal:
        score = score.masked_fill(torch.arange(tokens) > torch.arange(tokens - rows, tokens)[:, None], -math.inf)
    if call.mask is not None:
        mask = call.mask.cpu()
        score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask.double()
    weights = score.softmax(-1).nan_to_num(0)  # NaN for a row that sees no token
    squares = weights.square()
    return weights @ values, float((squares * score.nan_to_num(0, neginf=0).square()).sum() / squares.sum())


ATTENTION = Op(
    "attention",
    f"(Tensor q, {_prefixed('k')}, {_prefixed('v')}, Tensor? dense_keys, Tensor? dense_values, int first, "
    "Tensor? mask, bool causal, float? scale) -> Tensor",
    check=_check,
    generic=_generic,
    fake=_fake,
    samples=_samples,
    composed=True,
)

declare(ATTENTION)
