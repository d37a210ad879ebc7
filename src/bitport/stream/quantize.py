"""The streamed run: plan, preflight, walk, publish."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitport.algorithms import Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import Outcome, apply
from bitport.algorithms.chain import Preparation
from bitport.calibrate import store as stores
from bitport.calibrate.batches import each_batch
from bitport.calibrate.blocks import Walk
from bitport.calibrate.inputs import Inputs
from bitport.calibrate.processes import Processes
from bitport.checkpoint.arranged import Arrangement
from bitport.checkpoint.output import Output, discard, fingerprint, hashed
from bitport.checkpoint.source import Source
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError
from bitport.nn.quantize import check_finite
from bitport.nn.targets import find_targets
from bitport.report import LayerReport, Report
from bitport.report.memory import Memory, peak
from bitport.report.progress import progress as with_progress
from bitport.schemes import Recipe, Scheme, Target
from bitport.stream.activations import Disk
from bitport.stream.memory import estimate
from bitport.stream.weights import Streamed

KEEP = ("memory", "disk")


class Stream:
    """A model's files into a checkpoint, calibrated block by block: ``Stream(model, source, target, recipe,
    batches=batches, algorithm="gptq").run()``.

    ``model``: what the files in ``source`` are the weights of, built on the meta device; it holds no more than one
    block at a time. ``batches``: as for quantize_. ``dtype``: cast float tensors to it first. ``activations``: what
    goes from block to block waits in "memory" or on "disk". ``memory_limit``: bytes that the process may take, by
    default what the machine allows: what would take more is refused before it begins. ``resume``: go on with what a run
    that ended early has left in ``target``; ``overwrite``: throw that away.

    ``processes``: those that do it together, each calling this with the same arguments (Processes.joined()).
    ``arrangement``: for a model that has the tensors under other names or in other pieces than the files; the
    checkpoint has them as the model.

    The files that come out are the same however often the run was killed and resumed.
    """

    def __init__(
        self,
        model: nn.Module,
        source: str | Path,
        target: str | Path,
        recipe: str | Scheme | Recipe | Any,
        *,
        batches: Sequence[Any],
        algorithm: str | Algorithm = "gptq",
        dtype: torch.dtype | None = None,
        activations: str = "memory",
        memory_limit: int | None = None,
        resume: bool = False,
        overwrite: bool = False,
        shard_size: int = SHARD_SIZE,
        measure: bool = True,
        progress: bool | None = None,
        processes: Processes | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        if activations not in KEEP:
            raise ArgumentError(f"activations are kept in {' or '.join(KEEP)}, not {activations!r}")
        batches = list(each_batch(batches))
        if not batches:
            raise ArgumentError("the calibration data hold no batch")
        self.model, self.files, self.directory = model, Source(source, arrangement=arrangement), Path(target)
        if self.files.is_directory and self.directory.resolve().is_relative_to(self.files.path.resolve()):
            raise ArgumentError(f"{self.directory} lies in the source {self.files.path}; choose another directory")
        self.by, self.dtype, self.measure, self.progress = algorithm_of(algorithm), dtype, measure, progress
        found = find_targets(model)
        self.recipe = Recipe.of(recipe)
        self.plan = self.recipe.resolve(found)
        self.choices = {choice.name: choice for choice in self.plan.choices}
        self.targets = [each for each in found if self.choices[each.name].scheme]
        self._check_static()
        self.processes = processes or Processes()
        self.prepared = Preparation(model, self.by, self.targets, self.plan.choices)
        self._check_transforms()
        first = self.processes.first
        data = hashed(*batches)
        same = fingerprint(
            self.files, self.plan, self.by, dtype=dtype, shard_size=shard_size, measure=measure, data=data
        )

        def begin() -> None:
            if overwrite:
                discard(self.directory)
            self.output = Output(self.directory, same, shard_size, resume=resume)

        self.processes.shared(0, begin)
        if not first:
            self.output = Output(self.directory, same, shard_size, resume=True, writes=False)
        self.place = Streamed(model, self.files, self.output, dtype)
        self.walk: Walk | None = None
        self.memory: Memory | None = None
        if self.output.closed:  # what is left is to move the files
            return
        on_disk = activations == "disk"
        own = len(self.processes.share(batches))
        label = "" if self.processes.world == 1 else f"{self.processes.rank}-of-{self.processes.world}-"
        store = Disk(self.output.folder, own, label) if on_disk else stores.Memory()
        wanted = {each.name for each in self.targets if not self._refused(each)} if self.by.needs_inputs else set()
        self.walk = Walk(
            model, self.targets, wanted, batches, self.place, store, self.prepared, processes=self.processes
        )
        self.memory = estimate(self.walk, self.files, dtype, on_disk=on_disk, transforms=bool(self.prepared.transforms))
        self.memory.check(
            memory_limit, "take fewer or shorter batches, keep activations on disk, or leave out the largest weights"
        )

    def run(self) -> Report:
        """Quantize what is left to quantize, and make the result the checkpoint of the directory."""
        left = [each for each in self.targets if each.name not in self.output.layers]
        work = self.walk.measured() if self.walk else ()
        for target, inputs in with_progress(work, len(left), "quantizing", self.progress):
            name = self.place.name_of[target.name]
            if name in self.output.names:
                self.output.layers[target.name] = self._tied(target, name)
            else:
                self._quantize(target, name, inputs)
        return self.processes.shared(0, self._end)

    def _end(self) -> Report:
        report = self._report()
        self.output.publish(self.files.tied, self.files.stored, self.files.others(self.dtype))
        return report

    def _quantize(self, target: Target, name: str, inputs: Inputs | None) -> None:
        choice, module = self.choices[target.name], self.model.get_submodule(target.module)
        assert choice.scheme is not None
        value: Tensor = getattr(module, target.param)
        check_finite(value, target)
        scheme, owner = choice.scheme, self.walk.owner[target.name] if self.walk else 0
        pre_scale = self.prepared.pre_scale(target.name)
        found: Outcome = self.processes.shared(
            owner, lambda: apply(self.by, value, target, scheme, inputs, measure=self.measure, pre_scale=pre_scale)
        )
        outcome = self.prepared.noted(target.name, found).as_parameter()
        for slot in self.place.slots[name]:
            slot.put(outcome.q)
        self.output.add(name, outcome.q)
        self.output.layers[target.name] = outcome.report(choice, self.files.tensors[name].nbytes)

    def _report(self) -> Report:
        layers = []
        manifest = self.output.manifest
        for choice in self.plan.choices:
            name = self.place.name_of[choice.name]
            nbytes = self.files.tensors[name].nbytes, manifest.tensors[name].nbytes
            kept = LayerReport(choice.name, None, choice.reason, *nbytes)
            layers.append(self.output.layers.get(choice.name, kept))
        before = sum(self.files.tensors[name].nbytes for name in self.place.slots)
        return Report(
            tuple(layers),
            before,
            manifest.nbytes,
            self.recipe.to_json(),
            expression(self.by),
            memory_estimate=self.memory.total if self.memory else None,
            memory_peak=peak(),
        )

    def _tied(self, target: Target, name: str) -> LayerReport:
        """Of another target that the tensor ``name`` was quantized as already."""
        first = next(slot.name for slot in self.place.slots[name] if slot.name in self.output.layers)
        told = self.output.layers[first]
        note = told.reason.removeprefix(self.choices[first].reason)
        return dataclasses.replace(told, name=target.name, reason=self.choices[target.name].reason + note)

    def _refused(self, target: Target) -> str | None:
        scheme = self.choices[target.name].scheme
        return self.by.refuses(scheme.weight, target.kind) if scheme else "it stays as it is"

    def _check_transforms(self) -> None:
        if whole := [each.name for each in self.prepared.transforms if each.needs_model]:
            raise ArgumentError(
                f"{', '.join(whole)} changes the model as a whole, which does not come block by block: load it and use "
                f"quantize_(model, recipe, algorithm=.., calibrate=batches), or --in-memory"
            )
        if self.prepared.transforms and self.processes.world > 1:
            names = ", ".join(each.name for each in self.prepared.transforms)
            raise ArgumentError(f"{names} looks at all inputs of a block, which {self.processes.world} processes share")

    def _check_static(self) -> None:
        if static := [each.name for each in self.plan.quantized if each.scheme and each.scheme.static]:
            raise ArgumentError(
                f"{len(static)} weights ({static[0]}, ...) have a static input scale, which is measured by running the "
                f"whole model: load it and use quantize_(model, recipe, calibrate=batches), or choose a dynamic scheme"
            )
