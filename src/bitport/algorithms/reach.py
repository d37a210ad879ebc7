"""Track which parameters contribute to the inputs of which weights, by intercepting torch functions.

The result is conservative: writing into a tensor counts for all tensors that share its memory, and a tensor of unknown
origin may depend on any of the parameters.
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
    """``names``: the parameters of ``module`` that are tracked while it runs in this context."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.every = frozenset(names)
        self.parts: dict[int, frozenset[str]] = {}
        """Contributing parameters by the memory of a tensor."""
        self.begin([*module.parameters(), *module.buffers()])
        for name in names:
            self.parts[_memory(module.get_parameter(name))] |= {name}

    def begin(self, given: Any) -> None:
        """Mark the tensors of ``given`` as depending on none of the parameters."""
        self.parts |= {_memory(leaf): NOTHING for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}

    def of(self, x: Tensor) -> frozenset[str]:
        return self.parts.get(_memory(x), self.every)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        parts = _union([self.of(leaf) for leaf in given])
        result = func(*args, **(kwargs or {}))
        made = given[:1] if result is None else tree_leaves(result)  # x[..] = y returns None
        held = set(map(_memory, given))
        for leaf in made:
            if isinstance(leaf, Tensor):
                before = self.of(leaf) if _memory(leaf) in held else NOTHING
                self.parts[_memory(leaf)] = _union([before, parts])
        return result


class Origin:
    """Collector for :class:`bitport.calibrate.inputs.Watch`: the parameters that contribute to a weight's inputs."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.names = NOTHING

    def add(self, x: Tensor, index: tuple[int, ...] = ()) -> None:
        self.names |= self.reach.of(x)


def _union(parts: Sequence[frozenset[str]]) -> frozenset[str]:
    """Union that returns the largest set itself if it contains all others, as it nearly always does, to share it."""
    largest = max(parts, key=len, default=NOTHING)
    return largest if all(each <= largest for each in parts) else largest.union(*parts)


def _memory(tensor: Tensor) -> int:
    plain = type(tensor) in (Tensor, nn.Parameter) and torch._C._has_storage(tensor)
    return tensor.untyped_storage()._cdata if plain else id(tensor)
