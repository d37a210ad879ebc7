"""Which parameters have a part in which inputs of weights, told from the functions of torch that tensors go through.

Too many are named rather than too few: what is written into a tensor counts for all that share its memory, and what
comes from where no function was seen may hold any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

NOTHING: frozenset[str] = frozenset()


class Reach(TorchFunctionMode):
    """``names``: of the parameters of ``module`` that are followed while it runs in this context."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.every = frozenset(names)
        self.parts: dict[int, frozenset[str]] = {}
        """By the memory of tensors."""
        self.begin([*module.parameters(), *module.buffers()])
        for name in names:
            self.parts[_memory(module.get_parameter(name))] |= {name}

    def begin(self, given: Any) -> None:
        """Nothing has a part in the tensors of ``given``."""
        self.parts |= {_memory(leaf): NOTHING for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}

    def of(self, x: Tensor) -> frozenset[str]:
        return self.parts.get(_memory(x), self.every)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        parts = _union([self.of(leaf) for leaf in given])
        result = func(*args, **(kwargs or {}))
        made = given[:1] if result is None else tree_leaves(result)  # x[..] = y gives nothing
        held = set(map(_memory, given))
        for leaf in made:
            if isinstance(leaf, Tensor):
                before = self.of(leaf) if _memory(leaf) in held else NOTHING
                self.parts[_memory(leaf)] = _union([before, parts])
        return result


class Origin:
    """What :class:`bitport.calibrate.inputs.Watch` collects: the parameters with a part in what went into a weight."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.names = NOTHING

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        self.names |= self.reach.of(x)


def _union(parts: Sequence[frozenset[str]]) -> frozenset[str]:
    """The largest itself where it holds all others, as nearly always: so there are few of them."""
    largest = max(parts, key=len, default=NOTHING)
    return largest if all(each <= largest for each in parts) else largest.union(*parts)


def _memory(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and torch._C._has_storage(tensor)
    return tensor.untyped_storage()._cdata if plain else id(tensor)
