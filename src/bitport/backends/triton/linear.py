"""Host side of the products: choose block sizes, operand types and splits, and launch the kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from bitport.backends.triton import gemv as few
from bitport.backends.triton import product
from bitport.backends.triton.configs import Blocks, Config
from bitport.backends.triton.fusion import FUSED
from bitport.backends.triton.operand import WeightTraits, operand, reach, span, weight_traits
from bitport.backends.triton.rounding import Rounded, plain_rows, rounded
from bitport.backends.triton.sizes import cdiv, next_power
from bitport.numerics import NUMBER_TYPES
from bitport.ops import Weight

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FLOAT8 = ("float8_e4m3", "float8_e5m2")
LONGEST_INT = 1 << 16
"""Most columns for which a sum of int8 products is sure to fit int32."""
SHORTEST = 32
"""Columns of the shortest step: what matrix units take of int8."""
X_BLOCK = 128
"""Columns per scale of x, where that is applied to partial sums."""


class RoundedTraits(NamedTuple):
    """The properties of a Rounded that a launch depends on."""

    dtype: torch.dtype
    scale: bool
    scale2: bool
    place: str


class Launch(NamedTuple):
    """Launch parameters of a kind of product; cached, since computing them takes longer than a call."""

    grid: tuple[int, ...]
    splits: int
    per_split: int
    constants: dict[str, Any]


def gemv(x: Rounded, weight: Weight, bias: Tensor | None, dtype: torch.dtype, config: Config) -> Tensor:
    """Multiply few rows, with float32 sums for any dtype of x."""
    m, traits = x.rows.shape[0], weight_traits(weight)
    launch, held = _gemv(traits, m, config), operand(weight, traits, config.float8)
    out, target = outputs(launch.splits, m, weight.n, dtype, x.rows.device)
    few.gemv[launch.grid](
        *(x.rows, x.scale, x.scale2, bias if launch.splits == 1 else None, target, m, x.rows.stride(0)),
        *(launch.per_split, weight.n, weight.k, *held.pointers, *held.sizes),
        **held.fixed,
        **launch.constants,
    )
    return combined(target, bias, out, launch.splits)


@functools.lru_cache(4096)
def _gemv(weight: WeightTraits, m: int, config: Config) -> Launch:
    blocks = config.gemv
    bk = min(blocks["BK"], max(64, next_power(weight.k)))
    tiles_n = cdiv(weight.n, blocks["BN"])
    splits, per_split = splits_of(tiles_n * m, cdiv(weight.k, bk), m, weight, blocks)
    constants = {
        **reach(weight, bk),
        "EVEN": weight.k % bk == 0,
        "BN": blocks["BN"],
        "BK": bk,
        "num_warps": blocks["num_warps"],
        "STAGES": blocks["num_stages"],
        **FUSED,
    }
    return Launch((tiles_n, splits, m), splits, per_split, constants)


def tiles(
    x: Rounded, weight: Weight, bias: Tensor | None, dtype: torch.dtype, config: Config, ends: Tensor | None = None
) -> Tensor:
    """Multiply any number of rows; with ``ends`` rows grouped by expert, and zeros for rows without one."""
    m, traits, experts = x.rows.shape[0], weight_traits(weight), None if ends is None else ends.shape[0]
    launch = _tiles(traits, rounded_traits(x), m, experts, dtype, config)
    held = operand(weight, traits, config.float8)
    out, target = outputs(launch.splits, m, weight.n, dtype, x.rows.device, zeros=ends is not None)
    product.tiles[launch.grid](
        *(x.rows, x.scale, x.scale2, bias if launch.splits == 1 else None, ends, target, m, x.rows.stride(0)),
        *(cdiv(weight.k, X_BLOCK), experts or 1, launch.per_split),
        *(weight.n, weight.k, *held.pointers, *held.sizes),
        **held.fixed,
        **launch.constants,
    )
    return combined(target, bias, out, launch.splits)


@functools.lru_cache(4096)
def _tiles(
    weight: WeightTraits, x: RoundedTraits, m: int, experts: int | None, dtype: torch.dtype, config: Config
) -> Launch:
    blocks = config.tiles(cdiv(m, experts or 1))
    bk = _step(x, weight, blocks, config.halves)
    place = {"row": "end", "tile": "tile"}.get(span(weight, bk), "fold")
    grid, per_split = grid_of(m, weight, bk, blocks, experts)
    dot = dot_of(x, weight, place, dtype, config.int8)
    constants = {
        **reach(weight, bk),
        "PLACE": place,
        "ROUNDED": x.place,
        "PAIRS": _pairs(weight, place, bk, dot, config),
        "CONVERTS": config.float8,
        "DOT": dot,
        "EVEN": weight.k % bk == 0,
        "EXPERTS": next_power(experts or 1),
        **{name: blocks[name] for name in ("BM", "BN", "num_warps")},
        "BK": bk,
        "num_stages": _stages(blocks, bk),
        **FUSED,
    }
    return Launch(grid, grid[1], per_split, constants)


def rounded_traits(x: Rounded) -> RoundedTraits:
    return RoundedTraits(x.rows.dtype, x.scale is not None, x.scale2 is not None, x.place)


def _step(x: RoundedTraits, weight: WeightTraits, blocks: Blocks, halves: bool) -> int:
    """Return the columns per step: the table's BK, which assumes two bytes per column, or fewer so that a scale block
    is a whole number of steps; X_BLOCK if x has a scale per X_BLOCK columns. Codebook entries that are looked up as
    16-bit numbers are already rounded, so their scale must be applied to the sum."""
    table = halves and NUMBER_TYPES[weight.dtype].kind == "codebook"
    if x.place == "tile":
        return X_BLOCK
    if x.dtype == torch.float32:
        return max(SHORTEST, blocks["BK"] // 2)
    if not x.scale and not x.scale2 and not table:
        return blocks["BK"]
    fitting = (step for step in (blocks["BK"], 128, 64, SHORTEST) if weight.block_k % step == 0)
    return blocks["BK"] if weight.block_k >= weight.k else next(fitting, blocks["BK"])


def _stages(blocks: Blocks, bk: int) -> int:
    """Return the pipeline stages: fewer if steps are longer than the table's, so that no more columns are in shared
    memory, which the table's sizes may already fill."""
    ahead = (blocks["num_stages"] - 1) * blocks["BK"] // bk
    return min(blocks["num_stages"], 1 + max(1, ahead))


def dot_of(x: RoundedTraits, weight: WeightTraits, place: str, dtype: torch.dtype, int8: bool) -> tl.dtype:
    """Return the operand type of the product: x's own if x was not rounded. A rounded x, and codes, are small numbers
    that int8 and bfloat16 hold exactly. If anything else is folded into an operand, a scale or a non-integer zero
    point, the type is float32, unless the result is bfloat16, where one more rounding is acceptable."""
    if x.dtype != torch.int8 and x.dtype == dtype and not x.scale and not x.scale2 and not x.place:
        return TYPES[dtype]
    number = NUMBER_TYPES[weight.dtype]
    whole = weight.zero is None or not weight.zero.is_floating_point
    bytes_only = int8 and x.dtype == torch.int8 and number.kind == "int" and whole and place != "fold"
    if bytes_only and 1 < number.bits < (9 if weight.zero is None else 8) and weight.k <= LONGEST_INT:
        return tl.int8
    if x.dtype == torch.float8_e4m3fn and weight.dtype == "float8_e4m3" and place != "fold":
        return tl.float8e4nv
    exact = whole and number.kind != "codebook" and (place != "fold" or weight.scale.itemsize == 1)
    return tl.bfloat16 if exact or dtype == torch.bfloat16 else tl.float32


def _pairs(weight: WeightTraits, place: str, bk: int, dot: tl.dtype, config: Config) -> bool:
    """Whether several codes at a time can be decoded to type ``dot`` without additional rounding: a scale that is
    folded in must have that type or be exact in it."""
    number, scale = NUMBER_TYPES[weight.dtype], weight.scale
    if not config.halves or (weight.zero is not None and weight.zero.is_floating_point):
        return False
    if dot == tl.int8:
        return number.kind == "int" and number.bits == 4 and bk > SHORTEST  # in 32 Triton finds no layout on sm100
    if dot not in (tl.bfloat16, tl.float16):
        return False
    if weight.dtype in FLOAT8:
        by_bits = weight.words and span(weight, bk) != "column"
        return config.float8 or weight.dtype == "float8_e5m2" or by_bits
    if number.bits not in (2, 3, 4) or (number.kind != "int" and bk == SHORTEST):  # as above
        return False
    held = TYPES.get(scale) == dot or scale == torch.float8_e4m3fn
    held |= scale == torch.float8_e8m0fnu and dot == tl.bfloat16
    return place != "fold" or (span(weight, bk) == "unit" and held and number.kind != "codebook")


def grid_of(m: int, weight: WeightTraits, bk: int, blocks: Blocks, experts: int | None) -> tuple[tuple[int, int], int]:
    """Return ((tiles, splits of K), steps per split). The last tile of each expert may be partly empty; if rows belong
    to fewer experts, some tiles are empty. Products of experts are not split."""
    steps = cdiv(weight.k, bk)
    tiles = min(m, cdiv(m, blocks["BM"]) + (experts or 1) - 1) * cdiv(weight.n, blocks["BN"])
    splits, per_split = splits_of(tiles, steps, m, weight, blocks) if experts is None else (1, steps)
    return (tiles, splits), per_split


def splits_of(tiles: int, steps: int, m: int, weight: WeightTraits, blocks: Blocks) -> tuple[int, int]:
    """Return (splits of K, steps per split): enough programs for the device, but no empty split, and no more traffic
    for partial sums, written and read in float32, than bytes of the weight."""
    most = weight.k * NUMBER_TYPES[weight.dtype].bits // 8 // (8 * m)
    wanted = max(1, min(blocks["programs"] // tiles, steps, most))
    per_split = cdiv(steps, wanted)
    return cdiv(steps, per_split), per_split


def outputs(
    splits: int, m: int, n: int, dtype: torch.dtype, device: torch.device, zeros: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate (the result, the tensor that the product writes): partial sums if there are splits."""
    out = (torch.zeros if zeros else torch.empty)(m, n, dtype=dtype, device=device)
    return out, out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=device)


def combined(parts: Tensor, bias: Tensor | None, out: Tensor, splits: int) -> Tensor:
    if splits > 1:
        count, block = out.numel(), 1024
        product.combine[(cdiv(count, block),)](parts, bias, out, count, out.shape[1], splits, BLOCK=block, **FUSED)
    return out


def prepared(x: Tensor, act: str, act_scale: Tensor | None, float8: bool = False) -> Rounded:
    return rounded(plain_rows(x), act, act_scale, float8) if act else Rounded(plain_rows(x))
