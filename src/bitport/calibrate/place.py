"""Where a model's weights are while it is walked: in the model all the time, or brought block by block."""

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
"""The step of what lies in no block."""


class Place(Protocol):
    must_stream: bool
    """The model never runs as a whole."""

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        """Within it what lies outside of ``blocks`` has its weights."""

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Within it that module has its weights, quantized ones if its step is done; or that parameter is there."""

    def done(self, step: str) -> bool:
        """Whether a run that ended early has dealt with that block, or with REST, already."""

    def finish(self, step: str) -> None:
        """All weights of that step are quantized, and its outputs are in the store."""


SHOWN = ("__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point")
"""What a tensor without numbers may be asked for: its attributes, and what stands beside them."""


class Present(TorchFunctionMode):
    """Within it nothing is computed with a weight that is not there, nor with what was sent to its device: PyTorch does
    so without a word where only the ids of an embedding are on meta, and the rows are whatever lay in memory."""

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
    """For a run of ``model`` whose weights ``place`` brings."""
    return Present(model) if place.must_stream else contextlib.nullcontext()


class Whole:
    """A model in memory."""

    must_stream = False

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def inside(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def done(self, step: str) -> bool:
        return False

    def finish(self, step: str) -> None:
        """Nothing is to be done."""
