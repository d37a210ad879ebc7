"""Import torchax 0.0.13, the newest release, alongside torch 2.13.

It names overloads of ATen ops with named dimensions, which torch 2.13 has removed. During its import such names resolve
to placeholders that match nothing; afterwards torch is unpatched again. Later versions of torchax do not name these
overloads: tests/backends/xla/test_torchax_import.py fails when this file can be removed.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch._decomp
from torch._ops import OpOverloadPacket

from bitport.errors import DeviceError

NAMED_DIMENSIONS = ("Dimname", "dimname", "names")


class RemovedOverload:
    """Placeholder in a table of ops for an overload that torch has removed."""


@contextlib.contextmanager
def removed_overloads() -> Iterator[None]:
    """Within this context removed overloads can be named, and have no decompositions."""
    look_up, decompositions = OpOverloadPacket.__getattr__, torch._decomp.get_decompositions

    def with_removed(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return look_up(packet, name)
        except AttributeError:
            if not any(part in name for part in NAMED_DIMENSIONS):
                raise
            return RemovedOverload()

    def of_those_that_exist(ops: Iterable[Any], *args: Any) -> dict[Any, Callable[..., Any]]:
        return decompositions([op for op in ops if not isinstance(op, RemovedOverload)], *args)

    with (
        mock.patch.object(OpOverloadPacket, "__getattr__", with_removed),
        mock.patch.object(torch._decomp, "get_decompositions", of_those_that_exist),
    ):
        yield


def import_torchax() -> ModuleType:
    if "torchax" not in sys.modules:
        try:
            with removed_overloads():
                importlib.import_module("torchax")
                importlib.import_module("torchax.decompositions")
        except ModuleNotFoundError as error:
            raise DeviceError(f"{error}: pip install 'bitport[xla]'") from error
    return sys.modules["torchax"]
