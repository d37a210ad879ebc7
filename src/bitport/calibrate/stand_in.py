"""Stand-ins for outputs of blocks that were never computed, with the right structure and shapes, which mark everything
that is computed from them.

The arguments of a model's blocks can be recorded without running the blocks, as long as only blocks look at the outputs
of blocks. So each returns stand-ins, tensors of zeros. One that arrives unchanged at the next block connects it to the
previous one; one that arrives in another form, or influences control flow, raises :class:`Between`, since the model
then computes something between its blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

DECIDES = {
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "data_ptr",
    "__deepcopy__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
    "allclose",
    "is_nonzero",
}
"""Functions that give numbers of a tensor, or its memory, to code that is not torch's; and copies, which are made of
tensors in an object."""

WRITES = {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
"""Functions that write to their first argument, besides those called ``name_``."""

INDICES = ("idx", "index", "id", "number", "layer")
"""Last words of attribute names that hold the index of a layer."""


class Between(Exception):
    """The model does something with the output of a block before the next one gets it."""


class StandIn(Tensor):
    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name in WRITES
        written = tree_leaves((args[:1] if writes else (), (kwargs or {}).get("out")))
        others = any(isinstance(each, Tensor) and not isinstance(each, StandIn) for each in written)
        if name in DECIDES or others:
            raise Between(name)
        return super().__torch_function__(func, types, args, kwargs)


class Shape:
    """The structure of an output and the shape of each leaf, or the leaf itself if it is not a tensor."""

    def __init__(self, output: Any) -> None:
        self.spec: TreeSpec
        leaves, self.spec = tree_flatten(output)
        if any(not isinstance(leaf, Tensor) and tensors_in(leaf) for leaf in leaves):
            raise Between("an object with tensors")
        self.leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]

    def stand_in(self) -> Any:
        return self.filled({})

    def filled(self, tensors: dict[int, Tensor]) -> Any:
        """The output with ``tensors`` for the leaves at their indices, and stand-ins for all others."""
        pairs = zip(self.leaves, self.devices, strict=True)
        leaves = [tensors[at] if at in tensors else _made(*pair) for at, pair in enumerate(pairs)]
        return tree_unflatten(leaves, self.spec)

    @property
    def numel(self) -> int:
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))


def tensors_in(leaf: Any) -> list[Tensor]:
    """The tensor itself, or copies of those in an object, which pytree does not look into: a copy of it copies them."""
    if isinstance(leaf, Tensor):
        return [leaf]
    copied: dict[int, Any] = {}
    copy.deepcopy(leaf, copied)
    return [each for each in copied.values() if isinstance(each, Tensor)]


def _made(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device).as_subclass(StandIn)


def kind_of(block: nn.Module) -> object:
    """A key that is equal for blocks whose outputs have the same structure and shapes given the same arguments: same
    classes and settings, and weights of the same shapes. A block without weights is quick to run and equals nothing."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    if not tensors:
        return object()
    parts = tuple((type(part), _settings(part)) for part in block.modules())
    return parts, tuple((name, tensor.shape) for name, tensor in tensors)


def _settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Settings except the index of a layer, which affects no shape and would make every block unique."""
    settings = ((name, value) for name, value in vars(module).items() if name.rpartition("_")[2] not in INDICES)
    return tuple((name, repr(value)) for name, value in settings if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str))


def look_of(given: Any) -> object:
    """A key that is equal for arguments of the same structure, shapes and flags."""
    leaves, spec = tree_flatten(tree_map(_looks, given))
    return str(spec), tuple(leaves)


def _looks(leaf: Any) -> Any:
    """Include flags and names, which may affect the structure of an output, but not numbers such as a layer index."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}"
    return repr(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__
