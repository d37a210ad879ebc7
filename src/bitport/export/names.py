"""Assign one name to each tensor of the weight file, independent of the methods that use it and their names for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bitport.export.lower import TABLES
from bitport.tensor import QTensor


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same view of the same memory."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


class Names:
    """``tensors``: those that a name was requested for, by name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = set()
        for method, module in modules.items():
            for name, tensor in _plain(module):
                if tensor.numel() and _key(tensor) not in self._known:
                    self._known[_key(tensor)] = self._free(name, f"{method}.{name}")

    def follow(self, before: Tensor, after: Tensor) -> None:
        """Record that ``after`` replaces ``before``."""
        if _key(before) in self._known:
            self._known.setdefault(_key(after), self._known[_key(before)])

    def name_of(self, method: str, constant: str, tensor: Tensor) -> str:
        """Return the name of a tensor. ``constant``: its name in the method's library."""
        known = self._known if tensor.numel() else {}
        name = known.get(_key(tensor), constant if constant.startswith(f"{TABLES}.") else None)
        if name is None:
            name = known[_key(tensor)] = self._free(f"{method}.{constant}")
        self.tensors.setdefault(name, tensor)
        return name

    def _free(self, *names: str) -> str:
        """The first name that no other tensor has: different modules may use the same names."""
        numbered = (f"{names[-1]}.{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain(names, numbered) if name not in self._taken)
        self._taken.add(name)
        return name


def _plain(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer, and the parts of quantized ones."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(value, QTensor):
            parts, _ = value.__tensor_flatten__()
            yield from ((f"{name}.{part}", getattr(value, part)) for part in parts)
        else:
            yield name, value
