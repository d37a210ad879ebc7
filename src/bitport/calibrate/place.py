"""Where the weights of a model are while it is walked: always in the model, or loaded block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bitport.errors import ArgumentError

REST = ""
"""The step of weights that are in no block."""


class Place(Protocol):
    must_stream: bool
    """Whether the model cannot run as a whole."""

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        """Context in which everything outside ``blocks`` has its weights."""

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Context in which the named module has its weights (quantized if its step is done), or the named parameter is
        loaded."""

    def done(self, step: str) -> bool:
        """Whether an interrupted run has already finished that block, or REST."""

    def finish(self, step: str) -> None:
        """Called when all weights of that step are quantized and its outputs are in the store."""


SHOWN = ("__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point")
"""What may be asked of a tensor without data: attributes and similar metadata."""


class Present(TorchFunctionMode):
    """Refuse computations with weights that are not loaded or with tensors on their device: PyTorch does these silently
    if only the ids of an embedding are on meta, and returns uninitialized rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = type(model).__name__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in SHOWN and any(map(_is_absent, tree_leaves((args, kwargs or {})))):
            raise ArgumentError(
                f"{self.model} cannot be calibrated block by block: outside a block it uses the weights of that block, "
                f"or their device (in {name}). Load the whole model"
            )
        return func(*args, **(kwargs or {}))


def _is_absent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "meta"


def checked(model: nn.Module, place: Place) -> AbstractContextManager[Any]:
    """Context for a run of ``model`` whose weights are loaded by ``place``."""
    return Present(model) if place.must_stream else contextlib.nullcontext()


class Whole:
    """A model that is entirely in memory."""

    must_stream = False

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def inside(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def done(self, step: str) -> bool:
        return False

    def finish(self, step: str) -> None:
        """No-op."""
