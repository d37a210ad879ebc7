"""Which weights of a model can be quantized: the table of module types, and the walk that finds them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from bitport.schemes import Target

WEIGHTS: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.Linear, "weight", "linear"),
    (nn.Embedding, "weight", "embedding"),
    (nn.Conv1d, "weight", "conv"),
    (nn.Conv2d, "weight", "conv"),
    (nn.MultiheadAttention, "in_proj_weight", "attention"),
)
"""(module type, parameter, kind)."""

EXPERT_NAMES = ("expert", "moe")
"""A 3-D parameter [experts, N, K] whose own name, or whose module's name or class, has one of these in it is "experts";
[experts, K, N] where the module says ``is_transposed``, as transformers does."""

ROUTER = re.compile(r"(.*\.)?(router(\.\w+)?|gate(\.wg)?)")


def is_router(module: str, shape: Sequence[int]) -> bool:
    """Whether a matrix [N, K] of ``module`` chooses among experts, which are fewer than channels. It is small, decides
    much, and is "other", be it an nn.Linear or, as in most models, not."""
    return shape[0] < shape[1] and ROUTER.fullmatch(module) is not None


def find_targets(model: nn.Module) -> list[Target]:
    """Every weight a recipe may name, in the model's order; tied ones under each of their names.

    A matrix of a module that is not known here is listed as "other": it is quantized only by a rule that names that
    kind, but never passed over in silence.
    """
    targets = []
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.dim() > 1 and param.is_floating_point():
                kind, transposed = _kind(module_name, module, name, param)
                targets.append(Target(module_name, name, kind, tuple(param.shape), str(id(param)), transposed))
    return targets


def _kind(module_name: str, module: nn.Module, name: str, param: Tensor) -> tuple[str, bool]:
    """The kind of a parameter, and whether it lies as [.., K, N]."""
    for module_type, known, kind in WEIGHTS:
        if isinstance(module, module_type) and name == known:
            return "other" if kind == "linear" and is_router(module_name, param.shape) else kind, False
    label = f"{module_name} {type(module).__name__} {name}".lower()
    if param.dim() == 3 and any(word in label for word in EXPERT_NAMES):
        return "experts", bool(getattr(module, "is_transposed", False))
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "linear", True  # GPT-2's linear layer in transformers: addmm(bias, x, weight [K, N])
    return "other", False
