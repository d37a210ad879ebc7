"""What quantize_files would report, worked out from the headers of the files alone: for ``--dry-run``."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from bitport.checkpoint import plan_files
from bitport.checkpoint.source import Source
from bitport.report import LayerReport, Report
from bitport.schemes import Recipe
from bitport.tensor import quantize_tensor


def foretold(source: Path, recipe: Recipe, dtype: torch.dtype | None) -> Report:
    """The report of quantize_files, without errors: weights are quantized as shapes, on the meta device."""
    plan = plan_files(source, recipe)
    files = Source(source)
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
            if choice.scheme is not None:
                nbytes = quantize_tensor(kept, choice.scheme, kind=target.kind, transposed=target.transposed).nbytes
            scheme = None if choice.scheme is None else str(choice.scheme)
            layers[name] = LayerReport(name, scheme, choice.reason, stored.nbytes, nbytes)
        before, after = before + stored.nbytes, after + nbytes
    for alias, name in files.tied.items():
        if alias in targets:
            layers[alias] = dataclasses.replace(layers[name], name=alias, reason=plan[alias].reason)
    return Report(tuple(layers[choice.name] for choice in plan.choices), before, after)
