"""The interface of a peer: another way to compute a linear layer, adapted to a common form by one file in this folder.

A file imports its library at the top: if that fails, the peer is missing, and the error says so. It defines

* ``PACKAGES``: the distributions whose versions are recorded with a result,
* ``VARIANTS``: name -> class, one of ``bench.suites.CLASSES``,
* ``prepare(variant, weight, group, copies)``: a Prepared, or a sentence saying why it does not support this weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def same(value: Any) -> Any:
    return value


def nothing(x: Any) -> str:
    return ""


@dataclasses.dataclass
class Prepared:
    """One weight, stored ``copies`` times at different addresses, so that none stays in the caches."""

    calls: list[Callable[[Any], Any]]
    """Each computes x @ weight.T with its own copy; this is timed."""
    value: Callable[[], Tensor]
    """The weight [n, k] that is effectively used, in float64."""
    nbytes: int
    """Size of one copy, including scales."""
    accept: Callable[[Tensor], Any] = same
    """Convert x [m, k] in bf16 to the input of the calls; not timed, in favour of the peer."""
    output: Callable[[Any], Tensor] = same
    """Convert the result of a call to a tensor [m, n]."""
    note: Callable[[Any], str] = nothing
    """A remark on the call with this input, such as the kernel that runs."""


def int4_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric 4-bit rounding for peers without their own: codes 0..15 (8 is zero) [n, k] and float32 scales
    [n, k / group], with weight = (codes - 8) * scale."""
    n, k = weight.shape
    blocks = weight.float().reshape(n, k // group, group)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (extreme / -8).squeeze(-1).bfloat16().float()
    safe = torch.where(scale == 0, 1.0, scale)[..., None]
    return (blocks / safe).round().clamp(-8, 7).add(8).to(torch.uint8).reshape(n, k), scale


def int4_value(codes: Tensor, scale: Tensor) -> Tensor:
    n, k = codes.shape
    centred = codes.double().sub(8).reshape(n, scale.shape[1], -1)
    return (centred * scale.double()[..., None]).reshape(n, k)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric 8-bit rounding with one scale per row: int8 codes [n, k] and float32 scales [n]."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-12).bfloat16().float()
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int8_value(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.double() * scale.double()[:, None]


def undivided(k: int, group: int) -> str | None:
    return f"{k} columns are not a multiple of its group of {group}" if k % group else None
