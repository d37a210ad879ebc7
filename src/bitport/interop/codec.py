"""A codec knows one format of quantized checkpoints: which tensors make up a weight, and what they mean.

Reading and writing are pure functions on tensors by their role, one weight at a time; files, order and memory are the
business of :mod:`bitport.interop.convert`. Nothing is rounded on the way: what a format or bitport cannot hold exactly
is an error that says so.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitport.checkpoint.names import target_of
from bitport.checkpoint.source import Held
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.schemes import Scheme
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class Weight:
    """A quantized weight as files hold it. ``name``: that of the parameter of the float model, such as
    ``model.layers.0.mlp.up_proj.weight``; ``parts``: role -> name of the tensor in the files."""

    name: str
    parts: Mapping[str, str]


class Reader(abc.ABC):
    """``config``: what config.json says under quantization_config. It is checked when the reader is made:
    CheckpointError for what is not understood, since a setting that is passed over would change the numbers.
    ``dtype``: what the weights were rounded from."""

    writes_zero_biases: ClassVar[bool] = False
    """Whether a library writes biases of zeros for layers that have none."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.metadata: Mapping[str, str] = {}
        """What the headers of the files say beside their tensors; there when weights() is called."""
        self.model: Mapping[str, Any] = {}
        """All of config.json; there when weights() is called."""
        self.notes: list[str] = []
        """What is not carried over and does not change a weight: for the report."""

    @abc.abstractmethod
    def weights(self, held: Mapping[str, Held]) -> list[Weight]:
        """The quantized weights among the tensors of the files, from their names, shapes and dtypes alone."""

    @abc.abstractmethod
    def read(self, weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
        """``tensors``: role -> tensor. What they are in bitport's form; nothing about them was checked."""

    def dropped(self, held: Mapping[str, Held]) -> dict[str, str]:
        """Tensors that are not carried over -> why: they belong to no weight, and no model has them."""
        return {}


class Writer(abc.ABC):
    """Writes the weights of one checkpoint; what they have in common goes to its quantization_config."""

    name: ClassVar[str]
    """As users say it."""
    upright: ClassVar[bool] = True
    """Whether a layer that lies the other way round in a model (Conv1D) is written as [N, K]."""
    keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """Where config.json has what config() says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What is not exactly as it was: for the report."""

    @abc.abstractmethod
    def refuses(self, q: Described) -> str | None:
        """Why a weight of this description cannot be written, or None."""

    @abc.abstractmethod
    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        """Tensors by their names in the file. ``q``: in the plain layout, and not refused. ArgumentError where its
        numbers do not fit."""

    @abc.abstractmethod
    def config(self, left: list[str]) -> dict[str, Any] | None:
        """What config.json says of it, after all weights were written; None for a model that is not quantized.
        ``left``: modules whose weight is a matrix that is not quantized."""

    def files(self) -> dict[Path, str]:
        """Further files of the model -> their text, after all weights were written."""
        return {}

    def room(self, names: list[str]) -> int:
        """Bytes that metadata() takes in the header of a file, at most. ``names``: of all tensors of the model."""
        return 0

    def metadata(self, plain: list[str]) -> dict[str, str]:
        """What the header of each file says beside its tensors, after all weights were written. ``plain``: the names of
        those that are not quantized."""
        return {}


@dataclasses.dataclass(frozen=True)
class Described:
    """What is known of a quantized weight before its data are read."""

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    kind: str
    """See :func:`kind_of`."""
    transposed: bool
    parts: frozenset[str]
    conv1d: bool = False
    """Whether it lies as [K, N] in the model, and as [N, K] in files of others."""


def no_linear(q: Described, says: str) -> str | None:
    """Why ``q`` is none of the linear layers that ``says`` speaks of, or None."""
    if q.kind != "linear" or len(q.shape) != 2 or q.transposed:
        return f"{says} linear layers alone, and this is a weight of the kind {q.kind!r}"
    return None


def no_place(q: Described, who: str) -> str | None:
    """Why ``q`` has more than a format without order and scales of inputs can hold, or None."""
    extra = sorted(q.parts & {"perm", "pre_scale"})
    return f"{who} has no {' and no '.join(extra)}: neither order nor scales of inputs" if extra else None


NO_CONV1D = "its layers lie as [N, K] in a model, and this one as [K, N] (Conv1D)"


def kind_of(name: str, shape: tuple[int, ...]) -> str:
    """The kind of a float weight of that name, as a recipe has it: "linear", "embedding", "experts" .."""
    found = target_of(name, shape, torch.bfloat16)
    return found.kind if found else "other"


def tensors_of(weights: Iterable[Weight]) -> set[str]:
    """The names of all tensors that make up ``weights``."""
    return {name for weight in weights for name in weight.parts.values()}


def check_complete(found: str, parts: Iterable[str], held: Container[str]) -> None:
    """CheckpointError unless the files, which have the tensor ``found`` of a weight, have all ``parts`` of it."""
    if missing := [part for part in parts if part not in held]:
        raise CheckpointError(f"{found} is there without {shortened(missing)}; fetch the checkpoint again")


def grouped(held: Iterable[str], first: str, others: Mapping[str, str], optional: frozenset[str]) -> list[Weight]:
    """The weights that have a tensor ``<module>.<first>``. ``others``: further roles -> how their tensors' names end;
    those that are not ``optional`` must be there."""
    names = set(held)
    found = []
    for name in held:
        module, _, last = name.rpartition(".")
        if last != first:
            continue
        parts = {role: f"{module}.{end}" for role, end in {first: first, **others}.items()}
        check_complete(name, (part for role, part in parts.items() if role not in optional), names)
        found.append(Weight(f"{module}.weight", {role: part for role, part in parts.items() if part in names}))
    return found


def order_of(group_of: Tensor, k: int, group: int, what: str) -> Tensor | None:
    """The ``k`` columns in the order of their groups of ``group`` ("act-order"); None where they lie so already."""
    if group_of.dtype != torch.int32 or tuple(group_of.shape) != (k,):
        raise CheckpointError(f"{what} must be int32 [{k}], not {group_of.dtype} {list(group_of.shape)}")
    wanted = torch.arange(k, dtype=torch.int32) // group
    if torch.equal(group_of, wanted):
        return None
    groups, order = torch.sort(group_of, stable=True)
    if not torch.equal(groups, wanted):
        raise CheckpointError(f"{what} does not give each group {group} columns, which bitport asks for")
    return order.to(torch.int32)


def setting(config: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """``config[key]``, which must be a ``kind``; CheckpointError else. A default is for where it is absent or null."""
    value = config.get(key)
    if value is None and default is not ...:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(each.__name__ for each in kinds)
        raise CheckpointError(f"quantization_config: {key} must be {names}, not {value!r}")
    return value


def exactly(value: Tensor, dtype: torch.dtype, what: str, rounded: bool = True) -> Tensor:
    """``value`` as ``dtype``; ArgumentError where that would change a number. ``rounded``: it is one that a conversion
    rounds if it is asked to (bitport.interop.scales)."""
    cast = value.to(dtype)
    same = (cast.to(value.dtype) == value) | (cast.isnan() & value.isnan())
    if not bool(same.all()):
        at = int((~same).flatten().nonzero()[0])
        name = str(dtype).removeprefix("torch.")
        raise ArgumentError(
            f"{what}: {value.flatten()[at].item():g} ({value.dtype}) is no {name}"
            + (f"; --scales {name} rounds it" if rounded else "")
        )
    return cast
