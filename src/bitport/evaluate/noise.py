"""How much perplexity may differ between two correct kernels.

A kernel may be off by the error budget of its op (:func:`bitport.ops.samples.product_budget`). Here the output of every
linear layer is perturbed at random by just that much, and the change of each token's loss is measured. This covers the
rounding of inputs, which turns a small difference into a step: the layers before have perturbed the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import logits_of
from bitport.ops.samples import product_budget


def noise(model: Any, tokens: Tensor, window: int, exact: Tensor) -> float:
    """Return a bound on the change of log(perplexity) of ``model``, which computes in float32 with token losses
    ``exact``: the root mean square over windows of the change of a window's mean loss, which the mean change never
    exceeds."""
    generator = torch.Generator(model.device).manual_seed(0)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(_moving(layer.in_features, generator)) for layer in layers]
    try:
        moved = token_losses(logits_of(model), tokens, window=window, batch=4)
    finally:
        for hook in hooks:
            hook.remove()
    changes = torch.stack([change.mean() for change in (moved.double() - exact.double()).split(window - 1)])
    return float(changes.square().mean().sqrt())


def _moving(k: int, generator: torch.Generator) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(layer: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        relative = 10 ** (-product_budget(torch.float32, k, out.numel()) / 20)
        direction = torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)
        return out + relative * out.square().mean().sqrt() * direction

    return hook
