"""Measure static input scales in the original model, before any weight is rounded, so that a scale depends neither on
the schemes of other weights nor on how they are rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitport.calibrate.batches import each_batch, run_fresh
from bitport.calibrate.contexts import in_use
from bitport.calibrate.inputs import Watch
from bitport.calibrate.magnitudes import Magnitudes
from bitport.errors import ArgumentError, shortened
from bitport.schemes import Target


def input_scales(
    model: nn.Module, activations: Mapping[Target, str], calibrate: Iterable[Any] | Callable[[nn.Module], Any]
) -> dict[str, Tensor]:
    """Run the model and return, by name of the weight, the fixed scales [1, 1] of its inputs, based on everything that
    was multiplied with it (:mod:`bitport.calibrate.magnitudes`). An embedding that is not an output head has none.

    ``calibrate``: batches (:mod:`bitport.calibrate.batches`), or a function that runs the model.
    """
    with in_use(model), Watch.of(model, activations, Magnitudes) as watch:
        if callable(calibrate):
            calibrate(model)
        else:
            for batch in each_batch(calibrate):
                run_fresh(model, batch)
    return scales_of(activations, watch.seen)


def scales_of(activations: Mapping[Target, str], found: Mapping[str, Magnitudes]) -> dict[str, Tensor]:
    """Compute the scales; ArgumentError if calibration is missing or not finite for any."""
    seen = {name: each for name, each in found.items() if each.peak is not None}
    if unseen := [each.name for each in activations if each.kind != "embedding" and each.name not in seen]:
        raise ArgumentError(
            f"calibration never reached {shortened(unseen)}; give batches that use every layer, or skip them"
        )
    if bad := [name for name, each in seen.items() if each.peak is not None and not bool(torch.isfinite(each.peak))]:
        raise ArgumentError(f"calibration gave NaN or infinity at the input of {shortened(bad)}")
    acts = {target.name: act for target, act in activations.items()}
    return {name: each.scale(acts[name]) for name, each in seen.items()}


def scales_without_data(activations: Mapping[Target, str]) -> dict[str, Tensor]:
    """Like :func:`input_scales`, for weights without data: shapes only, which do not reveal an embedding that a model
    multiplies with outside any layer."""
    multiplied = {target.storage for target in activations if target.kind != "embedding"}
    return {target.name: torch.empty(1, 1, device="meta") for target in activations if target.storage in multiplied}
