"""The largest input each layer sees, for static input scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitport.calibrate.batches import run_batch
from bitport.errors import ArgumentError
from bitport.numerics import static_scale


def input_scales(
    model: nn.Module, modules: Mapping[str, str], calibrate: Iterable[Any] | Callable[[nn.Module], Any]
) -> dict[str, Tensor]:
    """Run the model and return the fixed scale [1, 1] of the input of each of ``modules``, whose activations they are
    given with: the one that takes in the largest magnitude of all that the module saw.

    ``calibrate``: batches (:mod:`bitport.calibrate.batches`), or a function that runs the model.
    """
    peaks: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            x = (args or tuple(named.values()))[0].detach()
            if x.numel() == 0:
                return
            seen = x.abs().amax().float()
            peaks[name] = torch.maximum(peaks[name], seen) if name in peaks else seen

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True) for name in modules]
    try:
        with torch.no_grad():
            if callable(calibrate):
                calibrate(model)
            else:
                for batch in calibrate:
                    run_batch(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if unseen := [name for name in modules if name not in peaks]:
        raise ArgumentError(
            f"calibration never reached {', '.join(unseen)}; give batches that use every layer, or skip them"
        )
    if bad := [name for name, peak in peaks.items() if not bool(torch.isfinite(peak))]:
        raise ArgumentError(f"calibration gave NaN or infinity at the input of {', '.join(bad)}")
    return {name: static_scale(peak, modules[name]) for name, peak in peaks.items()}
