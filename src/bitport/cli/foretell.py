"""What quantize_files would report, worked out from the headers of the files alone: for ``--dry-run``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from bitport.algorithms import Algorithm, expression
from bitport.algorithms.apply import apply
from bitport.checkpoint import plan_files
from bitport.checkpoint.arranged import Arrangement
from bitport.checkpoint.source import Source
from bitport.report import LayerReport, Report
from bitport.schemes import Recipe


def foretold(
    source: Path, recipe: Recipe, dtype: torch.dtype | None, by: Algorithm, arrangement: Arrangement | None = None
) -> Report:
    """The report of quantize_files, without errors: weights are quantized as shapes, on the meta device."""
    plan = plan_files(source, recipe, arrangement=arrangement)
    files = Source(source, arrangement=arrangement)
    targets = {target.name: target for target in files.targets()}
    layers: dict[str, LayerReport] = {}
    before = after = 0
    for name, held in files.tensors.items():
        if name in files.tied:
            continue
        stored = torch.empty(held.shape, dtype=held.dtype, device="meta")
        kept = stored.to(dtype) if dtype is not None and held.dtype.is_floating_point else stored
        nbytes = kept.nbytes
        if name in targets:
            choice, target = plan[name], targets[name]
            layers[name] = LayerReport(name, None, choice.reason, stored.nbytes, nbytes)
            if choice.scheme is not None:
                layers[name] = apply(by, kept, target, choice.scheme).report(choice, stored.nbytes)
                nbytes = layers[name].bytes_after
        before, after = before + stored.nbytes, after + nbytes
    for alias, name in files.tied.items():
        if alias in targets:
            layers[alias] = dataclasses.replace(layers[name], name=alias, reason=plan[alias].reason, tied=True)
    listed = tuple(layers[choice.name] for choice in plan.choices)
    return Report(listed, before, after, recipe.to_json(), expression(by))
