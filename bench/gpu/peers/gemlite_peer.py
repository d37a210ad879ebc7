"""gemlite's Triton kernels, with weights rounded here.

If it ships no tiling for a number of rows and a shape on this device, the first call tunes among its "fast" ones.
Weight-only int8 is left out: it ships none for that, and tuning takes a minute for each number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from gemlite import core, helper
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, int8_rows, int8_value, undivided

PACKAGES = ("gemlite",)
VARIANTS = {"int4": "4-bit", "int8-dyn": "8-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if variant == "int4" and (reason := undivided(k, group)):
        return reason
    if n % 32 or k % 32:
        return f"{n} outputs or {k} columns are not a multiple of 32"
    place = {"device": str(weight.device), "dtype": torch.bfloat16}
    if variant == "int4":
        codes, scale = int4_groups(weight, group)
        flat = scale.bfloat16().reshape(-1, 1)

        def layer() -> Any:
            return helper.A16Wn(**place).from_weights(codes, flat, torch.full_like(flat, 8), 4, group)

        every = [layer() for _ in range(copies)]
        return Prepared(every, lambda: int4_value(codes, scale), n * k // 2 + 2 * flat.nbytes, note=_kernel(4))
    whole, rows = int8_rows(weight)
    column = rows.reshape(-1, 1)  # in float32, since results are scaled before they are rounded
    every = [helper.A8W8_int8_dynamic(**place).from_weights(whole.clone(), scales=column) for _ in range(copies)]
    nbytes = whole.nbytes + column.nbytes
    return Prepared(every, lambda: int8_value(whole, rows), nbytes, note=_kernel(8))


def _kernel(bits: int) -> Any:
    return lambda x: core.get_matmul_type(x.shape[0], bits).lower()
