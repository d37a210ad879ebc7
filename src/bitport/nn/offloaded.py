"""Models offloaded by accelerate, which loads the values of a module for each call and removes them afterwards."""

from __future__ import annotations

from torch import nn

from bitport.errors import ArgumentError


def refuse_offloaded(model: nn.Module) -> None:
    """Raise ArgumentError if weights are offloaded: the next call would restore their old values."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        for name, param in model.named_parameters():
            if param.is_meta:
                raise ArgumentError(
                    f"accelerate has offloaded {name}, and puts its numbers there only while the model runs: do this "
                    f"before the model is offloaded, or bring them back by accelerate.hooks.remove_hook_from_submodules"
                    f"(model); from_pretrained with quantization_config=BitportConfig(..) quantizes while it loads"
                )
