"""quantize_files(): a model's safetensors files into a bitport checkpoint, without the model.

What comes out is, bit for bit, what quantize_ and save make of the model itself; in memory is one tensor at a time.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from bitport.algorithms import Algorithm, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import apply
from bitport.checkpoint.source import Source
from bitport.checkpoint.writer import SHARD_SIZE, Writer
from bitport.errors import ArgumentError
from bitport.nn.quantize import check_finite
from bitport.report import LayerReport, Report
from bitport.report.progress import progress as with_progress
from bitport.schemes import Plan, Recipe, Scheme


def plan_files(source: str | Path, recipe: str | Scheme | Recipe | Any) -> Plan:
    """What :func:`quantize_files` would do; reads only the headers of the files."""
    return _planned(Source(source), recipe)


def quantize_files(
    source: str | Path,
    target: str | Path,
    recipe: str | Scheme | Recipe | Any,
    *,
    algorithm: str | Algorithm = "rtn",
    dtype: torch.dtype | None = None,
    shard_size: int = SHARD_SIZE,
    measure: bool = True,
    progress: bool | None = None,
) -> Report:
    """Quantize ``source``, a Hugging Face directory or a .safetensors file, into the checkpoint directory ``target``.

    ``recipe``: as in quantize_; the weights it is applied to are found by their names and shapes
    (:mod:`bitport.checkpoint.names`). ``algorithm``: as in quantize_, one that needs no inputs. ``dtype``: cast all
    float tensors to it first. ``measure``: work out the error of each weight for the report. Configuration, tokenizer
    and all other files that hold no weights are carried over.
    """
    by = algorithm_of(algorithm)
    if by.needs_inputs:
        raise ArgumentError(
            f"{by.name} looks at the inputs of layers, so the model has to run: load it and use "
            f"quantize_(model, recipe, algorithm={by.name!r}, calibrate=batches)"
        )
    files, directory = Source(source), Path(target)
    if files.is_directory and directory.resolve().is_relative_to(files.path.resolve()):
        raise ArgumentError(f"{directory} lies in the source {files.path}; choose another directory for the checkpoint")
    targets = {found.name: found for found in files.targets()}
    choices = {choice.name: choice for choice in _planned(files, recipe).choices}
    layers: dict[str, LayerReport] = {}
    before = after = 0
    with Writer(directory, shard_size=shard_size) as writer:
        for name, stored in with_progress(files.read(), len(files.tensors) - len(files.tied), "quantizing", progress):
            value = stored.to(dtype) if dtype is not None and stored.is_floating_point() else stored
            scheme = choices[name].scheme if name in choices else None
            result = value
            if scheme:
                check_finite(value, targets[name])
                outcome = apply(by, value, targets[name], scheme, measure=measure)
                result = outcome.q
                layers[name] = outcome.report(choices[name], stored.nbytes)
            elif name in choices:
                layers[name] = LayerReport(name, None, choices[name].reason, stored.nbytes, value.nbytes)
            writer.add(name, result)
            before, after = before + stored.nbytes, after + result.nbytes
        for alias, name in files.tied.items():
            writer.tie(alias, name)
            if alias in choices:
                layers[alias] = dataclasses.replace(layers[name], name=alias, reason=choices[alias].reason, tied=True)
        for path in files.others():
            writer.carry(files.path, path)
    listed = tuple(layers[name] for name in choices)
    return Report(listed, before, after, Recipe.of(recipe).to_json(), expression(by))


def _planned(files: Source, recipe: str | Scheme | Recipe | Any) -> Plan:
    plan = Recipe.of(recipe).resolve(files.targets())
    if static := [choice.name for choice in plan.quantized if choice.scheme and choice.scheme.static]:
        raise ArgumentError(
            f"{len(static)} weights ({static[0]}, ...) have a static input scale, which has to be measured by running "
            f"the model: load it and use quantize_(model, recipe, calibrate=batches), or choose a dynamic scheme"
        )
    return plan
