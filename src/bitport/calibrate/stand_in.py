"""Outputs of blocks that were never computed: of the right structure and shape, and whatever is made from them is known
to be so.

To learn what the blocks of a model are called with, the blocks themselves need not run, as long as nothing but the
blocks looks at their outputs. So each returns stand-ins, tensors of zeros. Where one arrives unchanged at the next
block, that is wired to the block before; where one arrives in another form, or decides anything, :class:`Between` is
raised, since then the model does something between its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

DECIDES = {
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
    "allclose",
    "is_nonzero",
}

INDICES = ("idx", "index", "id", "number", "layer")
"""Last words of the names that the index of a layer has."""


class Between(Exception):
    """The model does something with the output of a block before the next one gets it."""


class StandIn(Tensor):
    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in (kwargs or {})
        if name in DECIDES or (writes and not isinstance(args[0], StandIn)):
            raise Between(name)
        return super().__torch_function__(func, types, args, kwargs or {})


class Shape:
    """What an output looks like: its structure, and of each leaf the shape, or the leaf itself if it is no tensor."""

    def __init__(self, output: Any) -> None:
        self.spec: TreeSpec
        leaves, self.spec = tree_flatten(output)
        self.leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]

    def stand_in(self) -> Any:
        return self.filled({})

    def filled(self, tensors: dict[int, Tensor]) -> Any:
        """The output with ``tensors`` for some of its leaves, by their places, and stand-ins for all others."""
        pairs = zip(self.leaves, self.devices, strict=True)
        leaves = [tensors[at] if at in tensors else _made(*pair) for at, pair in enumerate(pairs)]
        return tree_unflatten(leaves, self.spec)

    @property
    def numel(self) -> int:
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, Tensor))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))


def _made(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device).as_subclass(StandIn)


def kind_of(block: nn.Module) -> object:
    """Equal for blocks that give outputs of one look where they are given the same: of the same classes and settings,
    with weights of the same shapes. What has no weights is quick to run and equals nothing."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    if not tensors:
        return object()
    parts = tuple((type(part), _settings(part)) for part in block.modules())
    return parts, tuple((name, tuple(tensor.shape)) for name, tensor in tensors)


def _settings(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """But the index of a layer, which changes no shape and would make every block another one."""
    plain = {name: value for name, value in vars(module).items() if _is_plain(value)}
    return tuple((name, repr(plain[name])) for name in sorted(plain) if name.rpartition("_")[2] not in INDICES)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float, str))


def look_of(given: Any) -> object:
    """Equal for arguments of the same structure, shapes and flags."""
    leaves, spec = tree_flatten(tree_map(_looks, given))
    return str(spec), tuple(leaves)


def _looks(leaf: Any) -> Any:
    """Flags and names may change the structure of an output; numbers, such as the index of a layer, do not."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}"
    return repr(leaf) if leaf is None or isinstance(leaf, (bool, str)) else type(leaf).__name__
