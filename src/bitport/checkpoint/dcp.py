"""Store a model in checkpoints of torch.distributed.checkpoint (DCP), which all processes write at once, and which can
be read by a different number of them.

DCP splits and joins plain tensors, so a quantized weight is stored as its plain parts, each under its own name and
sharded like the weight::

    layers.0.weight  ->  layers.0.weight.int4-g32.qdata.uint8, layers.0.weight.int4-g32.scale.bfloat16, ...

The name encodes what DCP would not compare: scheme and dtype. A checkpoint of another scheme lacks the names, and DCP's
planner refuses it before the model is modified; the planner compares sizes itself. No part is pickled as an object of
bitport, and a reader does not need bitport.
"""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor, nn

from bitport.checkpoint.dtypes import name_of
from bitport.checkpoint.slots import bare
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.nn.targets import check_model
from bitport.tensor import QTensor, from_parts
from bitport.tensor.qtensor import split_parts
from bitport.tensor.sharded import own, parts_of


class ModelState:
    """A DCP Stateful: ``dcp.save({"model": ModelState(model)}, checkpoint_id=path)``, and likewise ``dcp.load``, into a
    model with the same schemes and any sharding, or none."""

    def __init__(self, model: nn.Module) -> None:
        check_model(model)
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and DTensors, which share the memory of the model, except for weights in a packed layout."""
        return {key: part for entries in self._every().values() for key, part in entries.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what DCP has read into the tensors of :meth:`state_dict`."""
        every, there = self._every(), self.model.state_dict()
        wanted = {key for entries in every.values() for key in entries}
        if wanted != set(state):
            missing, unknown = shortened(sorted(wanted - set(state))), shortened(sorted(set(state) - wanted))
            raise CheckpointError(f"this is not the state of the model. Missing: {missing}; unknown: {unknown}")
        for name, entries in every.items():
            target = own(there[name])
            if isinstance(target, QTensor):
                target.copy_(_checked(name, target.to_layout("plain"), entries, state))
        others = {name: state[key] for name, entries in every.items() if (key := bare(name)) in entries}
        self.model.load_state_dict(others, strict=False)

    def _every(self) -> dict[str, dict[str, Any]]:
        """The entries that DCP gets for each tensor of the model."""
        every = {}
        for name, tensor in self.model.state_dict().items():
            q = own(tensor) if isinstance(tensor, Tensor) else None
            key = bare(name)
            every[name] = _entries(key, tensor, q) if isinstance(q, QTensor) else {key: tensor}
        return every


def _checked(name: str, q: QTensor, entries: dict[str, Tensor], state: dict[str, Any]) -> QTensor:
    """``q`` with the parts that were read. A reader other than DCP's may hand over others than it was asked for."""
    for key, mine in entries.items():
        given = state[key]
        if not isinstance(given, Tensor) or (given.dtype, given.shape) != (mine.dtype, mine.shape):
            what = f"{given.dtype} {[*given.shape]}" if isinstance(given, Tensor) else type(given).__name__
            raise CheckpointError(f"{key} is {what}; the model has {mine.dtype} {[*mine.shape]}")
    names = q.__tensor_flatten__()[0]
    read = {part: own(state[key]).view(getattr(q, part).dtype) for part, key in zip(names, entries, strict=True)}
    parts, extra = split_parts(read)
    try:
        return from_parts(parts, q.scheme, shape=tuple(q.shape), dtype=q.dtype, transposed=q.transposed, **extra)
    except ArgumentError as error:
        raise CheckpointError(f"{name} was read, and is damaged: {error}") from error


def _entries(name: str, tensor: Tensor, q: QTensor) -> dict[str, Tensor]:
    dtypes = {part: name_of(getattr(q, part).dtype) for part in q.__tensor_flatten__()[0]}
    return {f"{name}.{_label(q)}.{part}.{dtypes[part]}": each for part, each in parts_of(tensor).items()}


def _label(q: QTensor) -> str:
    """A label for the meaning of the codes: the name of the scheme, or a checksum if it is a custom one."""
    named = q.scheme.name
    label = f"custom-{zlib.crc32(q.scheme.to_json().encode()):08x}" if named == "custom" else named
    return f"{label}-transposed" if q.transposed else label
