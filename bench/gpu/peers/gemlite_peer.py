"""gemlite's Triton kernels, with weights that were rounded here."""

from __future__ import annotations

from typing import Any

import torch
from gemlite import helper
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, int8_rows, undivided

PACKAGES = ("gemlite",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit", "int8-dyn": "8-bit x int8"}


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

        return Prepared(
            [layer() for _ in range(copies)], lambda: int4_value(codes, scale), n * k // 2 + 2 * flat.nbytes
        )
    whole, rows = int8_rows(weight)
    column = rows.bfloat16().reshape(-1, 1)
    made = helper.A16W8 if variant == "int8" else helper.A8W8_int8_dynamic
    every = [made(**place).from_weights(whole.clone(), scales=column) for _ in range(copies)]
    return Prepared(every, lambda: whole.double() * rows.double()[:, None], whole.nbytes + column.nbytes)
