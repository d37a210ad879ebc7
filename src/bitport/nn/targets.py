"""Which weights of a model can be quantized: the table of module types and the search over a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from bitport.errors import ArgumentError
from bitport.nn.offloaded import refuse_offloaded
from bitport.nn.read_otherwise import is_read_otherwise
from bitport.schemes import Target
from bitport.schemes.experts import EXPERT_NAMES, expert_blocks, is_router

LAYER = r"weight_(ih|hh|hr)_l\d+(_reverse)?"
CELL = r"weight_(ih|hh)"
"""Weights of recurrent networks: of the inputs, of the state, and the projection of an LSTM's state."""

WEIGHTS: tuple[tuple[type[nn.Module], str, str], ...] = (
    (nn.Linear, "weight", "linear"),
    (nn.Embedding, "weight", "embedding"),
    (nn.EmbeddingBag, "weight", "embedding"),
    (nn.Conv1d, "weight", "conv"),
    (nn.Conv2d, "weight", "conv"),
    (nn.Conv3d, "weight", "conv"),
    (nn.ConvTranspose1d, "weight", "conv"),
    (nn.ConvTranspose2d, "weight", "conv"),
    (nn.ConvTranspose3d, "weight", "conv"),
    (nn.MultiheadAttention, "(in|q|k|v)_proj_weight", "attention"),
    (nn.LSTM, LAYER, "recurrent"),
    (nn.GRU, LAYER, "recurrent"),
    (nn.RNN, LAYER, "recurrent"),
    (nn.LSTMCell, CELL, "recurrent"),
    (nn.GRUCell, CELL, "recurrent"),
    (nn.RNNCell, CELL, "recurrent"),
)
"""(module type, regular expression for the parameter, kind)."""

PARAMETRIZED = "a layer's weight is computed from it; torch.nn.utils.parametrize.remove_parametrizations ends that"
HOOKED = (
    "a layer's weight is computed from it before each call; torch.nn.utils.prune.remove, remove_weight_norm or "
    "remove_spectral_norm ends that"
)
REWRITTEN = "max_norm rewrites the rows that are looked up"


def lie_transposed(shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether the expert stacks of a module are stored as [experts, K, N], inferred from their shapes: a fused gate and
    up is twice as wide as the input of down, so [E, H, 2I] occurs with [E, I, H]. Stored as [experts, N, K] they would
    be [E, 2I, H] and [E, H, I], which are no such pair."""
    stacks = {shape for shape in shapes if len(shape) == 3}
    return any((count, width // 2, hidden) in stacks for count, hidden, width in stacks if width % 2 == 0)


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"a model is a torch.nn.Module, not {type(model).__name__}; of a pipeline, give the model in it"
        )


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, whose names do not begin with ``_orig_mod``; others as they are."""
    return getattr(model, "_orig_mod", model)


def find_targets(model: nn.Module) -> list[Target]:
    """List every weight a recipe may match, in model order; tied weights appear under each of their names.

    A matrix of an unknown module is listed as "other": only a rule that names that kind quantizes it, but it is never
    skipped silently.
    """
    check_model(model)
    refuse_offloaded(model)
    targets = []
    classes: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = expert_blocks((*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))))
    blocks |= {name for name, module in modules.items() if "moe" in type(module).__name__.lower()}
    for module_name, module in modules.items():
        classes[module_name] = type(module).__name__
        otherwise = is_read_otherwise(module_name, classes)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if is_lazy(param):
                full = f"{module_name}.{name}".lstrip(".")
                raise ArgumentError(f"{full} has no shape yet: run the model once, so that its lazy modules get theirs")
            if param.dim() > 1 and param.is_floating_point():
                kind, transposed = ("other", False) if otherwise else _kind(module_name, module, name, param, blocks)
                unfit = REWRITTEN if kind == "embedding" and getattr(module, "max_norm", None) is not None else ""
                shape, note = tuple(param.shape), _note(module, name)
                targets.append(Target(module_name, name, kind, shape, str(id(param)), transposed, unfit, note))
    return targets


def _note(module: nn.Module, name: str) -> str:
    """Says so if a parametrization or a hook reads the parameter. Also if a subclass has a forward of its own, unless
    that calls the one of PyTorch's class and does not mention the parameter: most of them call F.linear(x, weight),
    with the same kernels; but one that computes with the weight first dequantizes it, or fails, and no way to tell is
    certain."""
    if isinstance(module, ParametrizationList):
        return PARAMETRIZED
    if _is_hooked(module, name):
        return HOOKED
    known = known_weight(module, name)
    forward = inspect.unwrap(type(module).forward)
    if known is None or forward is known[0].forward:
        return ""
    mentioned = getattr(getattr(forward, "__code__", None), "co_names", ())
    if "forward" in mentioned and name not in mentioned:
        return ""
    return f"{type(module).__name__} has its own forward, which may use the weight otherwise than {known[0].__name__}"


def known_weight(module: nn.Module, name: str) -> tuple[type[nn.Module], str] | None:
    """The entry of WEIGHTS for the parameter ``name``: the module type and the kind."""
    return next(
        ((known, kind) for known, names, kind in WEIGHTS if isinstance(module, known) and re.fullmatch(names, name)),
        None,
    )


def _is_hooked(module: nn.Module, name: str) -> bool:
    """Whether ``name`` stands in place of a parameter of WEIGHTS, as pruning and the older forms of weight_norm and
    spectral_norm leave it."""
    computed, _, part = name.rpartition("_")
    return part in ("orig", "g", "v") and computed not in module._parameters and bool(known_weight(module, computed))


def _kind(module_name: str, module: nn.Module, name: str, param: Tensor, blocks: Collection[str]) -> tuple[str, bool]:
    """(kind of a parameter, whether it is stored as [.., K, N]). A 3-D parameter [experts, N, K] is "experts" if its
    own name, or its module's name or class, contains one of EXPERT_NAMES. It is [experts, K, N] if the module's
    ``is_transposed`` says so, as most of transformers do, or else its shapes."""
    if known := known_weight(module, name):
        _, kind = known
        return "other" if kind == "linear" and is_router(module_name, param.shape, blocks) else kind, False
    label = f"{module_name} {type(module).__name__} {name}".lower()
    if param.dim() == 3 and any(word in label for word in EXPERT_NAMES):
        said = getattr(module, "is_transposed", None)
        shapes = [tuple(each.shape) for each in module.parameters(recurse=False)]
        return "experts", lie_transposed(shapes) if said is None else bool(said)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "linear", True  # GPT-2's linear layer in transformers: addmm(bias, x, weight [K, N])
    return "other", False
