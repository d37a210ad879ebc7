"""How far two right kernels can take a model's perplexity apart.

A kernel may be off by what the error budget of its op allows (:func:`bitport.ops.samples.product_budget`). Here the
output of every linear layer is moved at random by just that much, and what becomes of the loss of each token is seen.
Roundings of inputs, which turn a small difference into a step, are in it: the layers before have moved the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import logits_of
from bitport.ops.samples import product_budget


def noise(model: Any, tokens: Tensor, window: int) -> float:
    """Bound on the change of log(perplexity) of ``model``, in float32: the root mean square of the changes of the
    token losses, which the mean of those changes never exceeds."""
    exact = token_losses(logits_of(model), tokens, window=window, batch=4).double()
    generator = torch.Generator(model.device).manual_seed(0)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(lambda layer, _, out: _moved(out, layer.in_features, generator)) for layer in layers]
    try:
        moved = token_losses(logits_of(model), tokens, window=window, batch=4).double()
    finally:
        for hook in hooks:
            hook.remove()
    return float((exact - moved).square().mean().sqrt())


def _moved(out: Tensor, k: int, generator: torch.Generator) -> Tensor:
    relative = 10 ** (-product_budget(torch.float32, k, out.numel()) / 20)
    sizes = out.square().mean().sqrt()
    return out + relative * sizes * torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)
