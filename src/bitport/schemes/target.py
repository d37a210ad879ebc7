"""A target: one weight of a model that a recipe may quantize, and what it is to its module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from torch import Tensor, nn

KINDS = ("linear", "experts", "attention", "embedding", "conv", "recurrent", "other")
"""What a weight can be to its module. "other": of a module that is not known here, or a router, which chooses
experts."""


def bare(name: str) -> str:
    """The name of a module or tensor without the parts that torch.compile(module) adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@dataclasses.dataclass(frozen=True)
class Target:
    """One weight a recipe may quantize: the parameter ``param`` of the module ``module``.

    ``kind`` is one of :data:`KINDS`; ``transposed`` means that the weight is stored as [.., K, N]. Targets that share
    one parameter (a head tied to its embedding) have the same ``storage`` label.
    """

    module: str
    param: str
    kind: str
    shape: tuple[int, ...]
    storage: str
    transposed: bool = False
    unfit: str = ""
    """Why it cannot be quantized; empty if it can."""
    note: str = ""
    """What the user should know of its module, if it is quantized or of the kind "other"."""

    @property
    def name(self) -> str:
        """The name of the parameter in the model, such as "model.layers.0.mlp.up_proj.weight"."""
        return f"{self.module}.{self.param}" if self.module else self.param

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names by which a rule may call it: those of its module and its own, each also without what torch.compile
        has added, so that a recipe fits a model whether or not parts of it are compiled."""
        both = (self.module, self.name)
        return tuple(dict.fromkeys((*both, *map(bare, both))))

    def weight(self, model: nn.Module) -> Tensor:
        return getattr(model.get_submodule(self.module), self.param)

    def put(self, model: nn.Module, weight: Tensor) -> None:
        """Set the parameter under this name only; a tied weight must be set under each of its names."""
        setattr(model.get_submodule(self.module), self.param, weight)


def by_storage(targets: Iterable[Target]) -> dict[str, list[Target]]:
    """Group the targets that share one parameter."""
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.storage, []).append(target)
    return found
