"""int4pack_mm: the matmul of tinygemm (same contract as ``aten::_weight_int4pack_mm``), on every device.

``self`` bfloat16 [m, k]; ``mat2`` int32 [n/8][k/(inner*16)][32][inner/2], tile packed (see layouts.tile_packed);
``scales_and_zeros`` bfloat16 [k/group][n][2]; weight value = (code - 8) * scale + zero; the result bfloat16 [m, n].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.layouts.tile_packed import GROUPS, pack_tiles, unpack_tiles
from bitport.ops import samples
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample


def _check(x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> None:
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise ArgumentError(f"self must be bfloat16 [m, k], not {x.dtype} {[*x.shape]}")
    if mat2.dtype != torch.int32 or mat2.dim() != 4 or mat2.shape[2] != 32 or mat2.shape[3] not in (1, 2, 4):
        raise ArgumentError(
            f"mat2 must be int32 [n/8, k/(inner*16), 32, inner/2], inner 2, 4 or 8, not {mat2.dtype} {[*mat2.shape]}"
        )
    k, n = 32 * mat2.shape[1] * mat2.shape[3], 8 * mat2.shape[0]
    if x.shape[1] != k:
        raise ArgumentError(f"self has k={x.shape[1]}, mat2 {[*mat2.shape]} holds k={k}")
    if group not in GROUPS or k % group:
        raise ArgumentError(f"group must be one of {GROUPS} and divide k={k}, not {group}")
    if scales_and_zeros.dtype != torch.bfloat16 or tuple(scales_and_zeros.shape) != (k // group, n, 2):
        raise ArgumentError(
            f"scales_and_zeros must be bfloat16 {[k // group, n, 2]}, "
            f"not {scales_and_zeros.dtype} {[*scales_and_zeros.shape]}"
        )
    for name, other in (("mat2", mat2), ("scales_and_zeros", scales_and_zeros)):
        if other.device != x.device:
            raise ArgumentError(f"{name} is on {other.device}, self on {x.device}; move both to one device")


def _dense(mat2: Tensor, group: int, scales_and_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """The float weight [n, k]."""
    codes = unpack_tiles(mat2).to(dtype) - 8
    scale, zero = scales_and_zeros.to(dtype).transpose(0, 1).unbind(-1)
    return (codes.unflatten(1, (-1, group)) * scale[..., None] + zero[..., None]).flatten(1)


def _generic(x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    return x @ _dense(mat2, group, scales_and_zeros, torch.float32).to(x.dtype).T


def _fake(x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 8 * mat2.shape[0])


def _backward(grad: Tensor, x: Tensor, mat2: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    return grad @ _dense(mat2, group, scales_and_zeros, torch.float32).to(grad.dtype)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    if dtype != torch.bfloat16:
        return
    n, k = 16, 256
    for inner in (2, 4, 8):
        for group in GROUPS:
            at = samples.generator(inner, group)
            codes = torch.randint(0, 16, (n, k), generator=at).to(device, torch.uint8)
            pairs = torch.randn(k // group, n, 2, generator=at).to(device, dtype)
            mat2 = pack_tiles(codes, inner)
            for name, m in (("row", 1), ("rows", samples.LARGE_ROWS), ("empty", 0), ("strided", 5)):
                x = samples.rows(device, dtype, m, k)
                if name == "strided":
                    x = samples.by_columns(x)

                def expected(x: Tensor = x, w: Tensor = mat2, g: int = group, p: Tensor = pairs) -> Tensor:
                    return x.cpu().double() @ _dense(w.cpu(), g, p.cpu(), torch.float64).T

                budget = samples.product_budget(dtype, k, m * n)
                yield Sample(f"inner{inner}-g{group}-{name}", (x, mat2, group, pairs), expected, budget)


declare(
    Op(
        "int4pack_mm",
        "(Tensor self, Tensor mat2, int group, Tensor scales_and_zeros) -> Tensor",
        check=_check,
        generic=_generic,
        fake=_fake,
        samples=_samples,
        backward=_backward,
    )
)
