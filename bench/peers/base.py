"""What a peer is: another way to compute a linear layer, brought into one form by one file in this folder.

A file imports its library at its top: where that fails, the peer is missing, and the error says so. It defines

* ``PACKAGES``: the distributions whose versions belong to a result,
* ``VARIANTS``: name -> class (``bench.suites.class_of``), "bf16" for a weight that is not quantized,
* ``prepare(variant, weight, group, copies)``: a Prepared, or a sentence saying why it cannot have this weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


def same(value: Any) -> Any:
    return value


def nothing(x: Any) -> str:
    return ""


@dataclasses.dataclass
class Prepared:
    """One weight, held ``copies`` times at different places, so that none stays in the caches."""

    calls: list[Callable[[Any], Any]]
    """Each computes x @ weight.T with its own copy: this is timed."""
    value: Callable[[], Tensor]
    """The weight [n, k] that is effectively used, as exact as float64 has it."""
    nbytes: int
    """Of one copy, scales included."""
    accept: Callable[[Tensor], Any] = same
    """x [m, k] in bf16, turned into what the calls take: not timed, in favour of the peer."""
    output: Callable[[Any], Tensor] = same
    """What a call returns, as a tensor [m, n]."""
    note: Callable[[Any], str] = nothing
    """What is worth saying about the call with this input, such as which kernel runs."""


class Peer(Protocol):
    PACKAGES: tuple[str, ...]
    VARIANTS: dict[str, str]

    def prepare(self, variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str: ...


def int4_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric 4-bit rounding for peers that leave it to us: codes 0..15 (8 is zero) [n, k], scales [n, k / group] in
    float32: weight = (codes - 8) * scale."""
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
    """Symmetric 8-bit rounding, one scale per row: codes int8 [n, k], scales [n] in float32."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-12).bfloat16().float()
    return (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def undivided(k: int, group: int) -> str | None:
    return f"{k} columns are not a multiple of its group of {group}" if k % group else None
