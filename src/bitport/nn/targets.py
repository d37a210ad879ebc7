"""Which weights of a model can be quantized: the table of module types, and the walk that finds them."""

from __future__ import annotations

from torch import Tensor, nn

from bitport.schemes import Target

WEIGHTS: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.Linear, "weight", "linear"),
    (nn.Embedding, "weight", "embedding"),
    (nn.Conv1d, "weight", "conv"),
    (nn.Conv2d, "weight", "conv"),
    (nn.MultiheadAttention, "in_proj_weight", "attention"),
)
"""(module type, parameter, kind). Besides these, a 3-D parameter [experts, N, K] of any other module is "experts"."""


def find_targets(model: nn.Module) -> list[Target]:
    """Every weight a recipe may name, in the model's order; tied ones under each of their names."""
    targets = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        for param_name, kind in _weights_of(module):
            param = getattr(module, param_name)
            targets.append(Target(module_name, param_name, kind, tuple(param.shape), str(id(param))))
    return targets


def _weights_of(module: nn.Module) -> list[tuple[str, str]]:
    for module_type, param, kind in WEIGHTS:
        if isinstance(module, module_type):
            return [(param, kind)] if isinstance(getattr(module, param), Tensor) else []
    if isinstance(module, nn.modules.conv._ConvNd):
        return []
    return [(name, "experts") for name, param in module.named_parameters(recurse=False) if _is_experts(param)]


def _is_experts(param: Tensor) -> bool:
    return param.dim() == 3 and param.is_floating_point() and min(param.shape[1:]) > 1
