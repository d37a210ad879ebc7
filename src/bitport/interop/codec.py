"""The interface of codecs: a codec knows for one checkpoint format which tensors make up a weight, and what they mean.

Reading and writing are pure functions on the tensors of one weight, keyed by role; :mod:`bitport.interop.convert`
handles files, order and memory. Nothing is rounded: what a format or bitport cannot represent exactly is an error with
an explanation.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitport.checkpoint.names import target_of
from bitport.checkpoint.source import FileTensor
from bitport.errors import CheckpointError, shortened
from bitport.interop.checks import Stored
from bitport.interop.configuration import refuse_unknown
from bitport.numerics import Format
from bitport.schemes import Scheme
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """A quantized weight in the files. ``name``: the parameter in the float model, such as
    ``model.layers.0.mlp.up_proj.weight``; ``parts``: role -> tensor name in the files."""

    name: str
    parts: Mapping[str, str]

    def read(self, tensor: Callable[[str], Tensor]) -> Stored:
        """``tensor``: returns a tensor of the files by name."""
        return Stored(self.name, self.parts, {role: tensor(name) for role, name in self.parts.items()})


class Reader(abc.ABC):
    """Read the weights of one checkpoint. ``config``: the quantization_config of config.json, validated on
    construction: CheckpointError for unknown settings, since ignoring one could change the numbers. ``dtype``: the
    dtype that the weights were quantized from."""

    known: ClassVar[Collection[str]]
    """The settings that are read, and those that change no number whatever they say."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Other settings -> the value that changes no number."""
    writes_zero_biases: ClassVar[bool] = False
    """Whether the library writes biases of zeros for layers that have none."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.said = self.common_settings(config)
        refuse_unknown(self.said, self.known, "quantization_config", self.usual)
        self.metadata: Mapping[str, str] = {}
        """The metadata in the headers of the files; set before weights() is called."""
        self.model: Mapping[str, Any] = {}
        """All of config.json; set before weights() is called."""
        self.notes: list[str] = []
        """What is not carried over but changes no weight, for the report."""

    def common_settings(self, config: dict[str, Any]) -> Mapping[str, Any]:
        """Those of ``config`` that are not the settings of a single module."""
        return config

    @abc.abstractmethod
    def weights(self, held: Mapping[str, FileTensor]) -> list[WeightNames]:
        """The quantized weights among the tensors of the files, found by names, shapes and dtypes alone."""

    @abc.abstractmethod
    def read(self, weight: Stored) -> Tensor:
        """The weight in bitport's form."""

    def dropped(self, held: Mapping[str, FileTensor]) -> dict[str, str]:
        """Tensors that are not carried over, as they are part of no weight and no model -> reason."""
        return {}


class Writer(abc.ABC):
    """Write the weights of one checkpoint; settings that they share go to its quantization_config."""

    name: ClassVar[str]
    """The name of the format, as users give it."""
    upright: ClassVar[bool] = True
    """Whether a layer that is [K, N] in the model (Conv1D) is written as [N, K]."""
    keys: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """The keys of config.json that hold the result of config()."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """What was not preserved exactly, for the report."""
        self.scheme: Scheme | None = None
        """The scheme of all weights, where a format has only one: that of the first weight which it takes."""

    def tell(self, *notes: str) -> None:
        """Add ``notes`` that were not told yet."""
        self.notes += [note for note in notes if note not in self.notes]

    @abc.abstractmethod
    def refuses(self, q: Described) -> str | None:
        """The reason why a weight of this description cannot be written, or None."""

    def refuses_another_scheme(self, q: Described, says: str) -> str | None:
        """The reason, beginning with ``says``, why ``q`` does not go with weights accepted before, or None. It must be
        the last check in refuses(): a weight that is refused determines nothing."""
        self.scheme = self.scheme or q.scheme
        if q.scheme != self.scheme:
            return f"{says} one scheme for all weights, here {self.scheme} and {q.scheme}"
        return None

    @abc.abstractmethod
    def write(self, name: str, q: QTensor) -> dict[str, Tensor]:
        """The tensors of a weight by their names in the file. ``q``: in the plain layout, accepted by refuses().
        ArgumentError if its numbers do not fit."""

    @abc.abstractmethod
    def config(self, left: list[str]) -> dict[str, Any] | None:
        """The quantization settings for config.json, once all weights are written; None for a float model. ``left``:
        modules whose weight is a matrix that is not quantized."""

    def files(self) -> dict[Path, str]:
        """Additional files of the model -> their text, once all weights are written."""
        return {}

    def room(self, names: list[str]) -> int:
        """An upper bound on the bytes that metadata() needs in a file header. ``names``: all tensors of the model."""
        return 0

    def metadata(self, plain: list[str]) -> dict[str, str]:
        """The metadata for the header of each file, once all weights are written. ``plain``: names of the tensors that
        are not quantized."""
        return {}


@dataclasses.dataclass(frozen=True)
class Described:
    """The properties of a quantized weight that are known before its data are read."""

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    kind: str
    """See :func:`kind_of`."""
    transposed: bool
    parts: frozenset[str]
    conv1d: bool = False
    """Whether it is [K, N] in the model, and [N, K] in files of other libraries."""


def parts_of(scheme: Scheme) -> frozenset[str]:
    """The parts that each weight in this scheme has."""
    fmt = scheme.weight
    more = {"zero": fmt.zero != "none", "scale2": fmt.global_scale}
    return frozenset({"qdata", "scale", *(part for part, there in more.items() if there)})


def no_layer(q: Described, says: str, *, embeddings: bool = False, conv1d: bool = True) -> str | None:
    """The reason, beginning with ``says``, why ``q`` is not the weight of a linear layer, or of an embedding if
    ``embeddings`` are taken too, or None. ``conv1d``: whether a layer that is [K, N] in the model is taken."""
    kinds = ("linear", "embedding") if embeddings else ("linear",)
    if q.kind not in kinds or len(q.shape) != 2 or q.transposed or not q.name.endswith(".weight"):
        what = "linear layers and embeddings" if embeddings else "linear layers"
        return f"{says} {what} alone, and this is a weight of the kind {q.kind!r}"
    if q.conv1d and not conv1d:
        return "its layers lie as [N, K] in a model, and this one as [K, N] (Conv1D)"
    return None


def no_place(q: Described, who: str) -> str | None:
    """The reason why ``q`` does not fit the format ``who``, which has no order of columns and no scales of inputs, or
    None."""
    extra = sorted(q.parts & {"perm", "pre_scale"})
    return f"{who} has no {' and no '.join(extra)}: neither order nor scales of inputs" if extra else None


def same_numbers(one: Format, other: Format) -> bool:
    """Whether two formats hold the same numbers: only the rule by which scales are rounded may differ."""
    return dataclasses.replace(one, scale_rule="floor") == dataclasses.replace(other, scale_rule="floor")


def named_scheme(fmt: Format, act: str, static: bool, scales: Sequence[str]) -> Scheme:
    """The scheme whose scales have the first of the dtypes ``scales`` that makes it a preset, or else the first."""
    schemes = [Scheme(weight=dataclasses.replace(fmt, scale=scale), act=act, static=static) for scale in scales]
    return next((scheme for scheme in schemes if scheme.name != "custom"), schemes[0])


def kind_of(name: str, shape: tuple[int, ...], blocks: Collection[str] | None = None) -> str:
    """The kind of a float weight with that name, as used in recipes: "linear", "embedding", "experts" .. ``blocks``: as
    for is_router of bitport.schemes.experts."""
    found = target_of(name, shape, torch.bfloat16, blocks=blocks)
    return found.kind if found else "other"


def tensors_of(weights: Iterable[WeightNames]) -> set[str]:
    """The names of all tensors that make up ``weights``."""
    return {name for weight in weights for name in weight.parts.values()}


def check_complete(found: str, parts: Iterable[str], held: Container[str]) -> None:
    """CheckpointError unless ``held`` has all ``parts`` of the weight whose tensor ``found`` is in the files."""
    if missing := [part for part in parts if part not in held]:
        raise CheckpointError(f"{found} is there without {shortened(missing)}; fetch the checkpoint again")


def refuse_lost(
    held: Mapping[str, FileTensor],
    found: Iterable[WeightNames],
    is_part: Callable[[str, torch.dtype], bool],
    owner: str,
) -> None:
    """CheckpointError for a tensor that ``is_part`` of a quantized weight, by its name and dtype, and of none of those
    ``found``. ``owner``: what such a tensor belongs to."""
    known = tensors_of(found)
    if lost := next((it for name, it in held.items() if name not in known and is_part(name, it.dtype)), None):
        raise CheckpointError(f"{lost.name}, {lost.dtype}, belongs to no {owner}")


def grouped(
    held: Collection[str], first: str, needed: Sequence[str], optional: Sequence[str] = (), telling: Sequence[str] = ()
) -> list[WeightNames]:
    """The weights that have a tensor ``<module>.<first>``, with those of the other roles, which are named likewise.
    ``telling``: roles that only such weights have, so that one of them without the first is an error."""
    found = []
    for name in held:
        module, _, last = name.rpartition(".")
        if last in telling:
            check_complete(name, [f"{module}.{first}"], held)
        if last == first:
            check_complete(name, (f"{module}.{role}" for role in needed), held)
            parts = {role: f"{module}.{role}" for role in (first, *needed, *optional)}
            found.append(WeightNames(f"{module}.weight", {role: part for role, part in parts.items() if part in held}))
    return found
