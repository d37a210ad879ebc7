"""AWQ of a block: scales of channels, taken by what comes before a weight, or multiplied in at run time."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from bitport.algorithms.awq_core import Factor, search
from bitport.algorithms.block import Block

KINDS = ("linear", "experts", "attention")


@dataclasses.dataclass(frozen=True)
class AWQ:
    """``steps``: of alpha. ``least_gain``: dB of the output's error that a scale at run time must bring, where nothing
    before the weight can take it: it costs a multiplication of the input there."""

    steps: int = 20
    least_gain: float = 0.5
    name: ClassVar[str] = "awq"

    def block_(self, block: Block) -> None:
        for pair in block.pairs:
            factors = {
                consumer.name: self._factor(block, consumer.name, consumer.channels(pair.count))
                for consumer in pair.consumers
                if self._counts(block, consumer.name)
            }
            if factors:
                found = search(list(factors.values()), pair.shape, self.steps)
                block.scale_(pair, found.scale)
                for name in factors:
                    block.weights[name].notes.append(f"awq: {pair.label} takes a scale, {found.gain:+.1f} dB")
        for name in block.unpaired():
            if self._counts(block, name):
                self._at_run_time(block, name)

    def _at_run_time(self, block: Block, name: str) -> None:
        weight = block.weights[name]
        k = weight.inputs.gram.shape[-1]
        if weight.target.kind != "linear" or weight.scheme.static or weight.pre_scale is not None:
            weight.notes.append(f"awq: {block.why_unpaired(name)}")
            return
        found = search([self._factor(block, name, torch.arange(k))], (k,), self.steps)
        if found.gain < self.least_gain:
            weight.notes.append(f"awq: {block.why_unpaired(name)}; at run time one would gain {found.gain:.1f} dB")
            return
        weight.pre_scale = 1 / found.scale
        weight.notes.append(f"awq: its input is multiplied by a scale at run time, {found.gain:+.1f} dB")

    @staticmethod
    def _counts(block: Block, name: str) -> bool:
        weight = block.weights.get(name)
        return weight is not None and weight.target.kind in KINDS and weight.inputs.any_rows

    @staticmethod
    def _factor(block: Block, name: str, channels: Tensor) -> Factor:
        weight, value = block.weights[name], block.value(name)
        gram, rows = (each.to(value.device) for each in (weight.inputs.gram, weight.inputs.rows))
        return Factor(value, weight.scheme.weight, gram, rows, channels.to(value.device))
