"""Contexts for a model that is calibrated: to run it as at inference, and to change it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from bitport.schemes import Target


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate the model as at inference: no dropout, and BatchNorm statistics are not updated. Each module's mode is
    restored on exit.

    Compiled functions run eagerly, and so does nn.TransformerEncoder, which outside a torch function mode switches to
    nested tensors if it gets a padding mask and none of its weights is quantized: observing products requires that they
    are visible, and comparing outputs that they are computed in one way. Gradients are off, but not by inference mode,
    in which torch does not track writes into tensors.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with _uncompiled(), BaseTorchFunctionMode(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def in_use(model: nn.Module) -> Iterator[None]:
    """Evaluate without a key-value cache: one that grows with every run of a block would be wrong the second time. In a
    multimodal model the setting is in the config of its decoder module."""
    configs = {id(config): config for each in model.modules() if (config := getattr(each, "config", None)) is not None}
    before = [(each, uses) for each in configs.values() if (uses := getattr(each, "use_cache", None)) is not None]
    with evaluating(model):
        for config, _ in before:
            config.use_cache = False
        try:
            yield
        finally:
            for config, uses in before:
                config.use_cache = uses


@contextlib.contextmanager
def replaced_weights(model: nn.Module, weights: Sequence[Sequence[Target]], values: Sequence[Tensor]) -> Iterator[None]:
    """Put ``values`` in the place of weights, and back what was there. ``weights``: the names of each, all of them if
    it is tied."""
    before = [names[0].weight(model) for names in weights]
    try:
        _put(model, weights, values)
        yield
    finally:
        _put(model, weights, before)


def _put(model: nn.Module, weights: Sequence[Sequence[Target]], values: Sequence[Tensor]) -> None:
    for names, value in zip(weights, values, strict=True):
        for target in names:
            target.put(model, value)


def writable(module: nn.Module) -> AbstractContextManager[Any]:
    """Context for writes into parameters, which torch refuses outside inference mode if they were made in it."""
    inference = any(param.is_inference() for param in module.parameters())
    return torch.inference_mode() if inference else torch.no_grad()


def _uncompiled() -> AbstractContextManager[Any]:
    """Run eagerly. A no-op unless the compiler, which takes seconds to import, has been imported already."""
    imported = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if imported else contextlib.nullcontext()


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Disable autocast for computations about a model; it is meant for the products of the model itself."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    with contextlib.ExitStack() as held:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                held.enter_context(torch.autocast(kind, enabled=False))
        yield
