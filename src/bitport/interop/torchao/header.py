"""The description of each tensor in the header of a file flattened by torchao: JSON under the name of the parameter::

    {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
     "_tensor_data_names": ["qdata", "scale"]}

The parts of ``a.b.weight`` are then the tensors ``a.b._weight_qdata`` and ``a.b._weight_scale``.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from typing import Any

from bitport.errors import CheckpointError
from bitport.json_text import unique

PLAIN = ("Tensor", "torch.Tensor")
"""The types of tensors that are not quantized."""
ROLES = ("qdata", "scale", "zero_point", "scale_and_zero", "per_tensor_scale")
"""All parts except those of inputs; a tensor with such a name that no header describes belongs to an unknown
parameter."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The description of the parameter ``name``. ``kind``: its class. ``said``: its attributes; enums and dtypes are
    strings, other objects dictionaries with their ``_type``."""

    name: str
    kind: str
    said: Mapping[str, Any]
    parts: Mapping[str, str]
    """Role -> name of the tensor in the files."""

    def fail(self, key: str, read: str) -> CheckpointError:
        """An error for the value of ``key``. ``read``: a sentence on what is supported instead."""
        return CheckpointError(
            f"{self.name}, {self.kind} of torchao, has {key}={reprlib.repr(self.said.get(key))}: {read}"
        )


def entry_of(name: str, text: str) -> Entry | None:
    """The entry in ``text``, or None if it does not describe a quantized tensor."""
    try:
        said = json.loads(text, object_pairs_hook=_flat)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or "_type" not in said or said["_type"] in PLAIN:
        return None
    kind, roles = said.pop("_type"), said.pop("_tensor_data_names", None)
    if not isinstance(kind, str) or not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
        raise CheckpointError(
            f"the header says that {name} is {reprlib.repr(kind)} of the parts {reprlib.repr(roles)}; needed are a "
            f"class and a list of names"
        )
    return Entry(name, kind, said, {role: part_of(name, role) for role in roles})


def part_of(name: str, role: str) -> str:
    """The name in the files of a part of the parameter ``name``."""
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}_{role}"


def is_part(name: str) -> bool:
    """Whether ``name`` looks like a part of some parameter."""
    last = name.rpartition(".")[2]
    return last.startswith("_") and last.endswith(tuple(f"_{role}" for role in ROLES))


def _flat(pairs: list[tuple[str, Any]]) -> Any:
    """The attributes of an object merged with its _type; the bare value of an enum or dtype."""
    said = unique(pairs)
    if "_data" not in said or "_type" not in said:
        return said
    data = said.pop("_data")
    return {**data, **said} if isinstance(data, dict) else data
