"""Predict the report of quantize_files from the file headers only, for ``--dry-run``."""

from __future__ import annotations

import torch

from bitport.algorithms import Algorithm, expression
from bitport.algorithms.apply import apply
from bitport.calibrate.observe import scales_without_data
from bitport.checkpoint.source import Source, cast_floats
from bitport.report import LayerReport, Report
from bitport.report.quantized import listed
from bitport.schemes import Choice, Recipe
from bitport.schemes.plan import static_inputs


def predicted(files: Source, recipe: Recipe, dtype: torch.dtype | None, by: Algorithm) -> Report:
    """The report of quantize_files, without errors: weights are quantized as shapes, on the meta device."""
    targets = {target.name: target for target in files.targets()}
    plan = recipe.resolve(list(targets.values()))
    scales = scales_without_data(static_inputs(plan.choices, targets))
    sizes: dict[str, int] = {}
    told: dict[str, LayerReport] = {}
    for name, held in files.stored.items():
        value = cast_floats(torch.empty(held.shape, dtype=held.dtype, device="meta"), dtype)
        sizes[name], choice = value.nbytes, plan[name] if name in targets else None
        if choice and choice.scheme:
            outcome = apply(by, value, targets[name], choice.scheme, act_scale=scales.get(name))
            told[name] = outcome.report(choice, held.nbytes)

    def left(choice: Choice) -> LayerReport:
        name = storages[choice.name]
        return LayerReport.kept(choice, files.stored[name].nbytes, sizes[name])

    storages = {name: target.storage for name, target in targets.items()}
    before = sum(held.nbytes for held in files.stored.values())
    after = sum(sizes.values()) + sum(layer.bytes_after - sizes[name] for name, layer in told.items())
    return Report(listed(plan, storages, told, left), before, after, recipe.to_json(), expression(by))
