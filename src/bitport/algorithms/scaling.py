"""Shared by AWQ and SmoothQuant: search scales for the pairs of a block, then for its unpaired weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bitport.algorithms.block import Block, BlockWeight
from bitport.algorithms.gptq import KINDS
from bitport.algorithms.scales_core import Found
from bitport.arguments import check_options


@dataclasses.dataclass(frozen=True)
class Scaling:
    """``steps``: the number of steps of alpha. ``least_gain``: the minimum gain, in dB of output error, for a scale
    that no preceding layer can absorb, because it costs a multiplication of the input at run time."""

    steps: int = 20
    least_gain: float = 0.5
    name: ClassVar[str]
    needs_model: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = False
    """Whether it needs the inputs themselves, which only a block's trial provides."""

    def __post_init__(self) -> None:
        check_options(self, steps=1, least_gain=0.0)

    def factor(self, block: Block, name: str, channels: Tensor) -> Any:
        """Build the argument of ``search`` for one weight."""
        raise NotImplementedError

    def search(self, factors: Sequence[Any], shape: tuple[int, ...]) -> Found:
        raise NotImplementedError

    def refuses(self, weight: BlockWeight) -> str | None:
        """Return why this weight is ignored when choosing a scale, or None."""
        if weight.target.kind not in KINDS:
            return f"a weight of kind {weight.target.kind} takes no scale"
        return None if weight.inputs.any_rows else "no input was seen"

    def model_(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, str]:
        return {}

    def block_(self, block: Block) -> None:
        for weight in block.weights.values():
            if reason := self.refuses(weight):
                weight.notes.append(f"{self.name}: {reason}")
        for pair in block.pairs:
            factors = {
                consumer.name: self.factor(block, consumer.name, consumer.channels(pair.count))
                for consumer in pair.consumers
                if self._counts(block, consumer.name)
            }
            if factors:
                found = self.search(list(factors.values()), pair.shape)
                block.scale_(pair, found.scale)
                for name in factors:
                    block.weights[name].notes.append(f"{self.name}: {pair.label} takes a scale, {found.gain:+.1f} dB")
        for name in block.unpaired():
            if self._counts(block, name):
                self._at_run_time(block, name)

    def _at_run_time(self, block: Block, name: str) -> None:
        weight, why = block.weights[name], block.why_unpaired(name)
        if block.whole and self.needs_rows:
            weight.notes.append(f"{self.name}: it lies in no block")
            return
        k = weight.inputs.gram.shape[-1]
        if weight.target.kind != "linear" or weight.scheme.static or weight.pre_scale is not None:
            weight.notes.append(f"{self.name}: {why}")
            return
        found = self.search([self.factor(block, name, torch.arange(k, device="cpu"))], (k,))
        if found.gain < self.least_gain:
            weight.notes.append(f"{self.name}: {why}; at run time a scale would gain {found.gain:.1f} dB")
            return
        weight.pre_scale = 1 / found.scale
        weight.notes.append(f"{self.name}: its input is multiplied by a scale at run time, {found.gain:+.1f} dB")

    def _counts(self, block: Block, name: str) -> bool:
        return name in block.weights and self.refuses(block.weights[name]) is None
