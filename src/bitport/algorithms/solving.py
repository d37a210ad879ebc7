"""Quantize the weights of a model in place by an algorithm, each calibrated with the inputs that it receives from the
weights that are quantized before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitport.algorithms import AlgorithmLike, algorithm
from bitport.algorithms.algorithm import Algorithm
from bitport.algorithms.apply import Outcome
from bitport.algorithms.preparation import Preparation
from bitport.calibrate.batches import batches_of
from bitport.calibrate.blocks import Measured, measured
from bitport.calibrate.observe import input_scales, scales_without_data
from bitport.errors import ArgumentError, shortened
from bitport.nn.targets import find_targets
from bitport.report.progress import progress as with_progress
from bitport.schemes import Choice, Recipe, RecipeLike, Target
from bitport.schemes.plan import refuse_static
from bitport.schemes.target import by_storage
from bitport.tensor.parts import has_data
from bitport.tensor.sharded import laid_out, whole


def uses_data(by: AlgorithmLike, recipe: RecipeLike) -> bool:
    """Whether calibration data can have an effect: the algorithm looks at inputs, or a scheme has a static scale."""
    return algorithm(by).needs_inputs or Recipe.of(recipe).static


def check_data_used(by: Algorithm, recipe: Recipe, calibrate: object) -> None:
    if calibrate is not None and not uses_data(by, recipe):
        raise ArgumentError(
            f"calibrate would have no effect: {by.name} does not look at inputs, and no rule gives a scheme with a "
            f"static input scale. Leave it out, or choose an algorithm that does, such as algorithm='gptq'"
        )


class Solved(NamedTuple):
    """``targets``: all names of the weight, several if it is tied; ``value``: the weight before rounding, as changed by
    the transforms; ``outcome``: what replaced it."""

    choice: Choice
    targets: Sequence[Target]
    value: Tensor
    outcome: Outcome


class Solving:
    """``chosen``: the part of ``targets``, the targets of ``model``, to quantize; ``calibrate`` and ``device``: as for
    quantize_. Missing data is reported before anything is changed."""

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        chosen: Sequence[Choice],
        by: Algorithm,
        calibrate: Iterable[Any] | Callable[[nn.Module], Any] | None,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.model, self.chosen, self.by, self.calibrate, self.device = model, chosen, by, calibrate, device
        self.targets = {target.name: target for target in targets}
        """By name. Weights that are untied during the run are recorded in ``untied``."""
        self.untied: set[str] = set()
        empty = [choice.name for choice in chosen if not has_data(self.weight(choice.name))]
        self.filled = not empty
        if 0 < len(empty) < len(chosen) and (by.needs_inputs or any(choice.static for choice in chosen)):
            raise ArgumentError(
                f"{len(empty)} of {len(chosen)} weights have no data ({shortened(empty)}), so the model cannot be run, "
                f"as {by.name if by.needs_inputs else 'a static input scale'} needs: load them, or skip them"
            )
        self.runs = by.needs_inputs and self.filled
        if self.filled and calibrate is None:
            refuse_static(chosen, "give calibrate=batches")
        if self.runs and calibrate is None:
            raise ArgumentError(f"{by.name} looks at the inputs of layers; give calibrate=batches to measure them")

    def weight(self, name: str) -> Tensor:
        return self.targets[name].weight(self.model)

    def run(self, *, measure: bool = True, progress: bool | None = None) -> Iterator[Solved]:
        """Yield each weight as it is finished. ``measure``: compute its error."""
        model, by, calibrate = self.model, self.by, self.calibrate
        if self.runs and self.device is not None:
            model.to(self.device)
        batches = batches_of(model, calibrate) if self.runs and calibrate is not None else []
        if self.runs and not batches:
            raise ArgumentError(f"{by.name} looks at the inputs of layers, but calibrate holds no batch")
        prepared = Preparation(model, by, [*self.targets.values()], self.chosen)
        if self.runs:
            before = by_storage(self.targets.values())
            prepared.model_(batches)
            self.targets = {target.name: target for target in find_targets(model)}
            after = by_storage(self.targets.values())
            self.untied = {
                each.name
                for group in before.values()
                for each in group
                if len(after[self.targets[each.name].storage]) < len(group)
            }
        if not self.filled:
            prepared.act_scales |= scales_without_data(prepared.static)
        elif prepared.static and calibrate is not None:
            prepared.act_scales |= input_scales(model, prepared.static, batches or calibrate)
        choices = {choice.name: choice for choice in self.chosen}
        tied = by_storage(self.targets.values())
        wanted = [self.targets[choice.name] for choice in self.chosen]
        work: Measured = ((target, None) for target in wanted)
        if self.runs:
            work = measured(model, wanted, prepared.wanted, batches, prepare=prepared)
        for target, inputs in with_progress(work, len(wanted), "quantizing", progress):
            if target.storage not in tied:
                continue
            value, every = self.weight(target.name), tied.pop(target.storage)
            moved = whole(value) if self.device is None else value.to(self.device)
            outcome = prepared.apply(moved, target, inputs, measure=measure)
            outcome = dataclasses.replace(outcome, q=laid_out(outcome.q, value)).as_parameter()  # type: ignore[arg-type]
            for each in every:  # immediately, so that later blocks are calibrated with it
                each.put(model, outcome.q)
            yield Solved(choices[target.name], every, value, outcome)
