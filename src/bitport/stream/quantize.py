"""The streamed run: plan, preflight, walk, publish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitport.algorithms import AlgorithmLike, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import Outcome
from bitport.algorithms.preparation import Preparation
from bitport.arguments import bytes_of, floats_of, path_of
from bitport.calibrate.batches import each_batch
from bitport.calibrate.blocks import Walk
from bitport.calibrate.inputs import Inputs
from bitport.calibrate.magnitudes import Magnitudes
from bitport.calibrate.observe import scales_of
from bitport.calibrate.processes import Processes
from bitport.calibrate.store import InMemory, Store
from bitport.checkpoint.arranged import Arrangement
from bitport.checkpoint.output import Output, discard, fingerprint, hashed
from bitport.checkpoint.source import Source, check_apart
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError, BitportError
from bitport.nn.quantize import check_finite
from bitport.nn.targets import find_targets
from bitport.ops.device import check_device, computing_device
from bitport.report import LayerReport, Report
from bitport.report.memory import Memory, peak
from bitport.report.progress import progress as with_progress
from bitport.report.quantized import listed
from bitport.schemes import Choice, Recipe, RecipeLike, Target
from bitport.stream.activations import Disk
from bitport.stream.device import Apart, Batches
from bitport.stream.memory import estimate
from bitport.stream.weights import Streamed

KEEP = ("memory", "disk")
"""Where activations can be kept between blocks."""

ADVICE = (
    "raise the limit if the machine has more, take fewer or shorter batches, keep activations on disk, or leave out "
    "the largest weights"
)


class Stream:
    """Quantizes a model from its files into a checkpoint, calibrated block by block: ``Stream(model, source, target,
    recipe, batches=batches, algorithm="gptq").run()``. Any algorithm will do; fixed scales of inputs are measured
    first.

    ``model``: the one whose weights the files in ``source`` hold, with parameters on the meta device and real computed
    buffers, as bitport.integrations.huggingface.empty_model returns it; it has no more than one block in memory at a
    time. ``batches``: as for quantize_. ``dtype``: cast float tensors to it first.
    ``device``: where blocks run and codes are chosen (default: CPU). Each block and each batch is moved there when its
    turn comes; the model's computed buffers stay there. A run may be resumed on another device.
    ``activations``: whether they are kept in (the CPU's) "memory" or on "disk" between blocks. ``memory_limit``: what
    the process may take of the CPU's memory, in bytes or as "16GiB", by default what the machine allows; a run that
    would take more, or more than is free on ``device``, is refused before it begins.
    ``resume``: continue what a run that ended early has left in ``target``; ``overwrite``: throw that away, and replace
    the checkpoint that is there.

    ``processes``: the processes that share the work, each calling this with the same arguments (Processes.joined()).
    ``arrangement``: for a model that has the tensors under other names or in other pieces than the files; the
    checkpoint follows the model.
    """

    def __init__(
        self,
        model: nn.Module,
        source: str | Path,
        target: str | Path,
        recipe: RecipeLike,
        *,
        batches: Sequence[Any],
        algorithm: AlgorithmLike = "gptq",
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        activations: str = "memory",
        memory_limit: int | str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        shard_size: int | str = SHARD_SIZE,
        measure: bool = True,
        progress: bool | None = None,
        processes: Processes | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        shard_size = bytes_of(shard_size, "shard_size")
        if activations not in KEEP:
            raise ArgumentError(f"activations are kept in {' or '.join(KEEP)}, not {activations!r}")
        batches = list(each_batch(batches))
        if not batches:
            raise ArgumentError("the calibration data hold no batch")
        self.model, self.files = model, Source(source, arrangement=arrangement)
        self.directory = path_of(target, "target")
        check_apart(self.files.path, self.directory)
        self.by, self.dtype = algorithm_of(algorithm), floats_of(dtype, "dtype")
        self.measure, self.progress = measure, progress
        self.device = computing_device(device)
        found = find_targets(model)
        self.recipe = Recipe.of(recipe)
        self.plan = self.recipe.resolve(found)
        self.targets = [each for each in found if self.plan[each.name].scheme]
        for scheme in {choice.scheme for choice in self.plan.quantized if choice.scheme}:
            check_device(scheme, self.device)
        self.processes = processes or Processes()
        self.prepared = Preparation(model, self.by, self.targets, self.plan.choices)
        self._check_transforms()
        data = hashed(*batches)
        same = fingerprint(
            self.files, self.plan, self.by, dtype=dtype, shard_size=shard_size, measure=measure, data=data
        )
        self._open(same, shard_size, resume=resume, overwrite=overwrite)
        self.walk: Walk | None = None
        self.memory: Memory | None = None
        try:
            self.place = Streamed(model, self.files, self.output, dtype, self.device)
            if not self.output.closed:  # otherwise only moving the files is left
                self.processes.each(lambda: self._plan(batches, memory_limit, on_disk=activations == "disk"))
        except BaseException as error:
            if isinstance(error, BitportError) and self.processes.first and self.output.fresh:
                discard(self.directory)
            self.output.let_go()
            raise

    def _open(self, same: dict[str, str], shard_size: int, *, resume: bool, overwrite: bool) -> None:
        """Begin the output, or continue it, in the first process; the others then find it begun."""

        def begin() -> None:
            self.output = Output(
                self.directory, same, shard_size, resume=resume, overwrite=overwrite, processes=self.processes
            )

        self.processes.shared(0, begin)
        if not self.processes.first:
            self.output = Output(self.directory, same, shard_size, resume=True, processes=self.processes)

    def _plan(self, batches: Sequence[Any], memory_limit: int | str | None, *, on_disk: bool) -> None:
        own = len(self.processes.share(batches))
        label = "" if self.processes.world == 1 else f"{self.processes.rank}-of-{self.processes.world}-"
        store: Store = Disk(self.output.folder, own, label) if on_disk else InMemory()
        if self.device.type != "cpu":
            batches, store = Batches(batches, self.device), Apart(store, self.device)
        prepared = self.prepared
        self.walk = Walk(
            self.model, self.targets, prepared.wanted, batches, self.place, store, prepared, processes=self.processes
        )
        self.memory = estimate(self.walk, self.files, self.dtype, prepared, self.device, on_disk=on_disk)
        self.memory.check(memory_limit, ADVICE)

    def run(self) -> Report:
        """Quantize what is left, and publish the result as the checkpoint of the directory."""
        with self.output:
            try:
                if self.walk:
                    self._convert(self.walk)
            except ArgumentError:  # resuming would fail again
                if self.processes.first:
                    discard(self.directory)
                raise
            return self.processes.shared(0, self._end)

    def _convert(self, walk: Walk) -> None:
        self._measure(walk)
        for target, inputs in with_progress(walk.measured(), len(walk.left), "quantizing", self.progress):
            name = self.place.name_of[target.name]
            if name not in self.output.names:  # tied weights are done under their first name
                self._quantize(target, name, inputs)

    def _measure(self, walk: Walk) -> None:
        """Measure static input scales, while all weights are still original."""
        if not (static := self.prepared.static):
            return
        if self.output.act_scales is None:
            seen: dict[str, Magnitudes] = {}
            steps, total = walk.magnitudes([*static]), walk.last({target.name for target in static}) + 1
            for step in with_progress(steps, total, "measuring inputs", self.progress):
                seen |= step
            found = scales_of(static, self.processes.merged(seen))
            self.output.keep_scales({name: scale.item() for name, scale in found.items()})
        scales = self.output.act_scales or {}
        self.prepared.act_scales |= {
            name: torch.full((1, 1), scale, dtype=torch.float32, device="cpu") for name, scale in scales.items()
        }

    def _end(self) -> Report:
        report = self._report()
        self.output.publish(self.files.tied, self.files.stored, self.files.others(self.dtype))
        return report

    def _quantize(self, target: Target, name: str, inputs: Inputs | None) -> None:
        value = target.weight(self.model)
        check_finite(value, target)
        owner = self.walk.owner[target.name] if self.walk else 0

        def solved() -> Outcome:
            found = self.prepared.apply(value, target, inputs, measure=self.measure)
            return found if self.processes.world == 1 else found.to("cpu")  # others may have another device

        outcome = self.processes.shared(owner, solved).to(self.device).as_parameter()
        for slot in self.place.slots[name]:
            slot.put(outcome.q)
        self.output.add(name, outcome.q)
        nbytes = self.files.tensors[name].nbytes
        self.output.layers[target.name] = outcome.report(self.plan[target.name], nbytes)

    def _report(self) -> Report:
        before, manifest, name_of = self.files.tensors, self.output.manifest, self.place.name_of

        def left(choice: Choice) -> LayerReport:
            name = name_of[choice.name]
            return LayerReport.kept(choice, before[name].nbytes, manifest.tensors[name].nbytes)

        return Report(
            listed(self.plan, name_of, {name_of[name]: layer for name, layer in self.output.layers.items()}, left),
            sum(before[name].nbytes for name in self.place.slots),
            manifest.nbytes,
            self.recipe.to_json(),
            expression(self.by),
            memory_estimate=self.memory.total if self.memory else None,
            memory_peak=peak(),
        )

    def _check_transforms(self) -> None:
        if whole := [each.name for each in self.prepared.transforms if each.needs_model]:
            raise ArgumentError(
                f"{', '.join(whole)} changes the model as a whole, which is not possible block by block: load it and "
                "use quantize_(model, recipe, algorithm=.., calibrate=batches), or --in-memory"
            )
        if self.prepared.transforms and self.processes.world > 1:
            names = ", ".join(each.name for each in self.prepared.transforms)
            raise ArgumentError(f"{names} looks at all inputs of a block, which {self.processes.world} processes share")
