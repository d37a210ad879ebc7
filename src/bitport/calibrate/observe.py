"""The largest input each weight sees, for static input scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitport.calibrate.batches import each_batch, evaluating, run_batch
from bitport.calibrate.inputs import Watch
from bitport.errors import ArgumentError
from bitport.numerics import static_scale
from bitport.schemes import Target


class Peak:
    """The largest magnitude that went into a weight; None before anything did."""

    def __init__(self, *_: Any) -> None:
        self.value: Tensor | None = None

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        if x.numel():
            seen = x.detach().abs().amax().float()
            self.value = seen if self.value is None else torch.maximum(self.value, seen)


def input_scales(
    model: nn.Module, activations: Mapping[Target, str], calibrate: Iterable[Any] | Callable[[nn.Module], Any]
) -> dict[str, Tensor]:
    """Run the model and return, by the names of weights, the fixed scales [1, 1] of their inputs: each takes in the
    largest magnitude of all that was multiplied with the weight. An embedding that is no output head as well has none.

    ``calibrate``: batches (:mod:`bitport.calibrate.batches`), or a function that runs the model.
    """
    acts = {target.name: act for target, act in activations.items()}
    weights = {target.name: getattr(model.get_submodule(target.module), target.param) for target in activations}
    watch = Watch(weights, [target.name for target in activations if target.transposed], collect=Peak)
    with evaluating(model), torch.no_grad(), watch:
        if callable(calibrate):
            calibrate(model)
        else:
            for batch in each_batch(calibrate):
                run_batch(model, batch)
    peaks = {name: peak.value for name, peak in watch.seen.items() if peak.value is not None}
    if unseen := [each.name for each in activations if each.kind != "embedding" and each.name not in peaks]:
        raise ArgumentError(
            f"calibration never reached {', '.join(unseen)}; give batches that use every layer, or skip them"
        )
    if bad := [name for name, peak in peaks.items() if not bool(torch.isfinite(peak))]:
        raise ArgumentError(f"calibration gave NaN or infinity at the input of {', '.join(bad)}")
    return {name: static_scale(peak, acts[name]) for name, peak in peaks.items()}
