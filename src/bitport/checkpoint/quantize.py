"""quantize_files(): convert a model's safetensors files to a bitport checkpoint without loading the whole model.

The result is bit-identical to quantize_ and save on the model itself; only one tensor is in memory at a time, and
finished work survives if the run is killed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from bitport.algorithms import RTN, Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import apply
from bitport.arguments import bytes_of, floats_of, path_of
from bitport.checkpoint.arranged import Arrangement
from bitport.checkpoint.output import Output, discard, fingerprint
from bitport.checkpoint.source import Source, cast_floats, check_apart
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.errors import ArgumentError
from bitport.nn.quantize import check_finite
from bitport.numerics import Format
from bitport.ops.convert import format_json
from bitport.ops.device import check_device, computing_device
from bitport.ops.select import GENERIC, decide
from bitport.report import LayerReport, Report
from bitport.report.memory import ROUNDED, WORK, Memory, peak, resident
from bitport.report.progress import progress as with_progress
from bitport.report.quantized import listed
from bitport.schemes import Choice, Plan, Recipe, RecipeLike
from bitport.schemes.plan import refuse_static

STEP = 256 * 10**6
"""Bytes written between two journal entries, which make the work so far survive a killed run."""
ADVICE = "raise the limit if the machine has more, or leave out the largest weights"
RUN = "use bitport.stream.Stream, as bitport quantize --data FILE does, or quantize_(model, .., calibrate=batches)"
"""What to do if the files alone are not sufficient."""


def plan_files(
    source: str | Path,
    recipe: RecipeLike,
    *,
    model: nn.Module | None = None,
    arrangement: Arrangement | None = None,
) -> Plan:
    """Return the plan of :func:`quantize_files`; only reads the headers of the files."""
    files = Source(source)
    files.ask(model, arrangement)
    return planned(files, recipe)


def quantize_files(
    source: str | Path,
    target: str | Path,
    recipe: RecipeLike,
    *,
    algorithm: str | Algorithm = "rtn",
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    shard_size: int | str = SHARD_SIZE,
    measure: bool = True,
    progress: bool | None = None,
    memory_limit: int | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    model: nn.Module | None = None,
    arrangement: Arrangement | None = None,
) -> Report:
    """Quantize ``source``, a Hugging Face directory or a .safetensors file, to a checkpoint in the directory
    ``target``.

    ``recipe``: as in quantize_. ``model``: the model whose weights are in the files, built on the meta device; its
    modules tell the kind of each weight. Without it bitport guesses kinds from names and shapes
    (:mod:`bitport.checkpoint.names`), which may be wrong where names are unusual; and embeddings with a max_norm are
    then refused when they are used.
    ``arrangement``: for a model that has the tensors under other names than the files. ``algorithm``: as in quantize_,
    one that needs no data. ``dtype``: cast all float tensors to it first. ``device``: where codes are chosen (default:
    CPU); one weight at a time is moved there. ``measure``: compute the error of each weight for the report.
    Configuration, tokenizer and all other files without weights are copied.

    ``memory_limit``: what the process may take of the CPU's memory, in bytes or as "16GiB", by default what the machine
    allows; a run that would take more, or more than is free on ``device``, is refused before it begins. ``resume``:
    continue what a run that ended early has left in ``target``, on whatever device; ``overwrite``: throw that away, and
    replace the checkpoint that is there. The resulting files are the same however often the run was killed and resumed.
    """
    return QuantizeRun(
        source,
        target,
        recipe,
        algorithm=algorithm,
        dtype=dtype,
        device=device,
        shard_size=shard_size,
        measure=measure,
        memory_limit=memory_limit,
        resume=resume,
        overwrite=overwrite,
        model=model,
        arrangement=arrangement,
    ).run(progress)


class QuantizeRun:
    """A run of :func:`quantize_files`, planned and checked to fit in memory."""

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        recipe: RecipeLike,
        *,
        algorithm: str | Algorithm = "rtn",
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        shard_size: int | str = SHARD_SIZE,
        measure: bool = True,
        memory_limit: int | str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        model: nn.Module | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        shard_size = bytes_of(shard_size, "shard_size")
        self.by = algorithm_of(algorithm)
        if self.by.needs_inputs:
            raise ArgumentError(
                f"{self.by.name} looks at the inputs of layers, which are measured by running the model: {RUN}"
            )
        self.files, directory = Source(source), path_of(target, "target")
        check_apart(self.files.path, directory)
        self.recipe, self.dtype, self.measure = Recipe.of(recipe), floats_of(dtype, "dtype"), measure
        self.device = computing_device(device)
        self.files.ask(model, arrangement)
        self.targets = {target.name: target for target in self.files.targets()}
        self.plan = planned(self.files, self.recipe)
        for scheme in {choice.scheme for choice in self.plan.quantized if choice.scheme}:
            check_device(scheme, self.device)
        self.memory = estimate(self.files, self.plan, dtype, self.by, self.device)
        self.memory.check(memory_limit, ADVICE)
        same = fingerprint(self.files, self.plan, self.by, dtype=dtype, shard_size=shard_size, measure=measure)
        self.output = Output(directory, same, shard_size, resume=resume, overwrite=overwrite)

    def run(self, progress: bool | None = None) -> Report:
        with self.output:
            try:
                self._convert(progress)
            except ArgumentError:  # resuming would fail again
                discard(self.output.directory)
                raise
            report = self._report()
            self.output.publish(self.files.tied, self.files.stored, self.files.others(self.dtype))
        return report

    def _convert(self, progress: bool | None) -> None:
        left = [name for name in self.files.stored if name not in self.output.names]
        size = 0
        for name, stored in with_progress(self.files.read(left), len(left), "quantizing", progress):
            size += self._write(name, stored)
            if size >= STEP or name == left[-1]:
                self.output.finish(name)
                size = 0

    def _write(self, name: str, stored: Tensor) -> int:
        """Quantize and write a tensor; returns its bytes in the checkpoint. Nothing of it is kept."""
        value = cast_floats(stored, self.dtype)
        choice = self.plan[name] if name in self.targets else None
        if choice and choice.scheme:
            check_finite(value, self.targets[name])
            moved = value.to(self.device)
            outcome = apply(self.by, moved, self.targets[name], choice.scheme, measure=self.measure)
            self.output.layers[name] = outcome.report(choice, stored.nbytes)
            value = outcome.q
        self.output.add(name, value)
        return value.nbytes

    def _report(self) -> Report:
        storages = {name: target.storage for name, target in self.targets.items()}

        def left(choice: Choice) -> LayerReport:
            name = storages[choice.name]
            return LayerReport.kept(choice, self.files.stored[name].nbytes, self.output.manifest.tensors[name].nbytes)

        return Report(
            listed(self.plan, storages, self.output.layers, left),
            sum(held.nbytes for held in self.files.stored.values()),
            self.output.manifest.nbytes,
            self.recipe.to_json(),
            expression(self.by),
            memory_estimate=self.memory.total,
            memory_peak=peak(),
        )


def estimate(files: Source, plan: Plan, dtype: torch.dtype | None, by: Algorithm, device: torch.device) -> Memory:
    """The requirement of the most demanding tensor: as stored and cast, and while its codes are chosen, which if that
    happens on another ``device`` only return from there."""
    quantized = {files.tied.get(choice.name, choice.name): choice.scheme for choice in plan.quantized}
    most, there = (0, 0), 0
    for name, held in files.stored.items():
        elements = torch.Size(held.shape).numel()
        cast = elements * dtype.itemsize if dtype is not None and held.dtype.is_floating_point else 0
        scheme = quantized.get(name)
        work = 0 if scheme is None else elements * _work(by, scheme.weight, dtype or held.dtype, device)
        if device.type != "cpu" and work:
            there, work = max(there, (cast or held.nbytes) + work), elements * ROUNDED
        most = max(most, (held.nbytes + cast, work), key=sum)
    elsewhere = () if device.type == "cpu" else (0, there, device)
    return Memory(resident(), most[0], 0, 0, most[1], *elsewhere)


def _work(by: Algorithm, fmt: Format, dtype: torch.dtype, device: torch.device) -> int:
    """Working memory in bytes per element: of a search, or of rounding to nearest, by a kernel if there is one."""
    if not isinstance(by, RTN):
        return WORK
    kernel = decide("quantize", torch.empty(1, 1, dtype=dtype, device=device), format_json(fmt)).kernel
    return WORK if kernel.startswith(GENERIC) else ROUNDED


def planned(files: Source, recipe: RecipeLike) -> Plan:
    plan = Recipe.of(recipe).resolve(files.targets())
    refuse_static(plan.choices, RUN)
    return plan
