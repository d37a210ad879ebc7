"""A block of a model about to be quantized: still in float, with its inputs measured, and open to change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bitport.algorithms.pair import Pair
from bitport.algorithms.pairs import find_pairs
from bitport.algorithms.scales_core import evenly
from bitport.algorithms.trial import Trial
from bitport.calibrate.contexts import writable
from bitport.calibrate.inputs import Inputs
from bitport.schemes import Scheme, Target


@dataclasses.dataclass
class BlockWeight:
    """A weight to quantize. ``pre_scale``: the factor that its input is multiplied by at run time."""

    target: Target
    scheme: Scheme
    inputs: Inputs
    pre_scale: Tensor | None = None
    notes: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Block:
    """``weights``: by name within ``module``, tied ones under the first name. ``batches``: the inputs that it runs on.
    ``fixed``: parameters that are also used outside the block. ``whole``: the block is the whole model, for weights
    that are in no block."""

    module: nn.Module
    weights: dict[str, BlockWeight]
    batches: Iterable[Any]
    fixed: Collection[str] = ()
    whole: bool = False

    @functools.cached_property
    def trial(self) -> Trial:
        return Trial(self.module, self.batches)

    @functools.cached_property
    def _found(self) -> tuple[list[Pair], dict[str, str]]:
        return ([], {}) if self.whole else find_pairs(self.trial, self.fixed)

    @property
    def pairs(self) -> list[Pair]:
        return self._found[0]

    def why_unpaired(self, name: str) -> str:
        return self._found[1].get(name, "nothing before it takes a scale")

    def value(self, name: str) -> Tensor:
        """The weight as [.., N, K]."""
        param = self.module.get_parameter(name).detach()
        return param.mT if self.weights[name].target.transposed else param

    def unpaired(self) -> list[str]:
        paired = {consumer.name for pair in self.pairs for consumer in pair.consumers}
        return [name for name in self.weights if name not in paired]

    def scale_(self, pair: Pair, scale: Tensor) -> None:
        """Divide the producer by ``scale``, multiply the consumers, and divide their measured inputs accordingly."""
        scale = pair.storable(self.module, scale)
        with writable(self.module):
            pair.scale_(self.module, scale)
        pair.scale_(self.trial.block, scale)
        for consumer in pair.consumers:
            own = scale[..., consumer.channels(pair.count).to(scale.device)]
            for index, rows in self.trial.before.rows[consumer.name].calls:
                rows /= own[index] if own.dim() > 1 else own
            if consumer.name in self.weights:
                weight = self.weights[consumer.name]
                weight.inputs.gram = weight.inputs.divided(own).gram

    def rows(self, name: str, limit: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """(matrix index, inputs [M, K]) of a weight in the trial's batches, with at most ``limit`` rows per matrix."""
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for index, rows in self.trial.before.rows[name].calls:
            found.setdefault(index, []).append(rows)
        return [(index, evenly(torch.cat(parts), limit)) for index, parts in found.items()]


@runtime_checkable
class Transform(Protocol):
    """A change to a model that preserves its float outputs and reduces the error of rounding."""

    name: ClassVar[str]
    needs_model: ClassVar[bool]
    """Whether model_() changes the model, which must then be entirely in memory."""

    def model_(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, str]:
        """Change the model in place, before any of its blocks. Returns, by name of the weight, what was done or why
        nothing was."""

    def block_(self, block: Block) -> None:
        """Change a block in place, and record in the notes of its weights what was done or why nothing was."""
