"""A model prepared for an algorithm: transformed around its weights, then ready to have each of them quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitport.algorithms.algorithm import Algorithm
from bitport.algorithms.apply import Outcome, apply
from bitport.algorithms.block import Block, BlockWeight, Transform
from bitport.algorithms.pairs import shared_parameters
from bitport.calibrate.batches import run_fresh
from bitport.calibrate.contexts import no_autocast
from bitport.calibrate.inputs import Inputs
from bitport.calibrate.observe import input_scales
from bitport.errors import ArgumentError
from bitport.schemes import Choice, Target
from bitport.schemes.plan import static_inputs


class Preparation:
    """Applies an algorithm to a model in stages: its transforms to the model and to each block, then the rest to each
    weight.

    ``act_scales``: static input scales by weight, measured again where a transform may have changed the input.
    """

    def __init__(
        self,
        model: nn.Module,
        by: Algorithm,
        targets: Sequence[Target],
        choices: Iterable[Choice],
    ) -> None:
        self.model, self.by = model, by
        self.act_scales: dict[str, Tensor] = {}
        self.transforms: tuple[Transform, ...] = getattr(by, "transforms", ())
        if self.transforms:
            _check_apart(model, by.name)
        self.targets = {target.name: target for target in targets}
        self.choices = tuple(choices)
        self.schemes = {choice.name: choice.scheme for choice in self.choices if choice.scheme is not None}
        self.pre_scales: dict[str, Tensor] = {}
        self.notes: dict[str, list[str]] = {}

    @property
    def static(self) -> dict[Target, str]:
        return static_inputs(self.choices, self.targets)

    @property
    def wanted(self) -> set[str]:
        """Names of the weights whose inputs the algorithm needs."""
        return {
            name
            for name, scheme in self.schemes.items()
            if self.by.needs_inputs and not self.by.refuses(scheme.weight, self.targets[name].kind)
        }

    def model_(self, batches: Iterable[Any]) -> None:
        """Run the whole-model part of the transforms, in place."""
        for transform in self.transforms:
            with no_autocast():
                told = transform.model_(self.model, batches)
            if not isinstance(told, dict):
                raise ArgumentError(
                    f"model_ of the transform {transform.name} has returned {type(told).__name__}, not a dict of notes "
                    "by the names of weights, which may be empty"
                )
            for name, note in told.items():
                self.notes.setdefault(name, []).append(f"{transform.name}: {note}")

    def __call__(self, name: str, module: nn.Module, batches: Iterable[Any], seen: dict[str, Inputs]) -> None:
        """Transform the block called ``name`` in place, and update ``seen``, the inputs of its weights, to match."""
        if not self.transforms:
            return
        cut = len(name) + 1 if name else 0
        first = {id(param): local for local, param in module.named_parameters()}
        weights: dict[str, BlockWeight] = {}
        for full, inputs in seen.items():
            weight = BlockWeight(self.targets[full], self.schemes[full], inputs)
            weights.setdefault(first[id(module.get_parameter(full[cut:]))], weight)
        fixed = shared_parameters(self.model, name) if name else ()
        block = Block(module, weights, batches, fixed, whole=not name)
        with no_autocast():
            for transform in self.transforms:
                transform.block_(block)
        static = {
            dataclasses.replace(weight.target, module=weight.target.module[cut:]): weight.scheme.act
            for local, weight in weights.items()
            if weight.scheme.static and local not in fixed
        }
        if static and not block.whole:
            found = input_scales(module, static, lambda run: [run_fresh(run, batch) for batch in batches])
            self.act_scales |= {f"{name}.{local}": scale for local, scale in found.items()}
        for weight in weights.values():  # not kept themselves, since they hold inputs
            self.notes.setdefault(weight.target.name, []).extend(weight.notes)
            if weight.pre_scale is not None:
                self.pre_scales[weight.target.name] = weight.pre_scale

    def apply(self, value: Tensor, target: Target, inputs: Inputs | None, *, measure: bool) -> Outcome:
        """Quantize one weight. The note of the outcome includes those of the transforms."""
        name = target.name
        act_scale, pre_scale = self.act_scales.get(name), self.pre_scales.get(name)
        outcome = apply(
            self.by, value, target, self.schemes[name], inputs, act_scale, measure=measure, pre_scale=pre_scale
        )
        return dataclasses.replace(outcome, note="; ".join(filter(None, (*self.notes.get(name, ()), outcome.note))))


def _check_apart(model: nn.Module, by: str) -> None:
    """Raise ArgumentError if two parameters share memory: a transform that writes to one would change both. Of one with
    gaps only the start is compared, since another may lie in the gaps."""
    held = [
        (name, param)
        for name, param in model.named_parameters()
        if type(param) is nn.Parameter and param.layout == torch.strided and param.numel() and not param.is_meta
    ]
    until: dict[torch.device, tuple[int, str]] = {}
    for name, param in sorted(held, key=lambda each: each[1].data_ptr()):
        start, last = param.data_ptr(), sum((n - 1) * step for n, step in zip(param.shape, param.stride(), strict=True))
        end, other = until.get(param.device, (0, ""))
        if start < end:
            raise ArgumentError(
                f"{other} and {name} are two parameters in the same memory, of which {by} would change both by "
                f"changing one: assign one parameter to both modules, or give one memory of its own, "
                f"param.data = param.data.clone()"
            )
        dense = (last + 1) * param.itemsize == param.nbytes
        until[param.device] = (start + param.nbytes if dense else start + 1), name
