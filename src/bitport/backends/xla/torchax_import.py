"""Importing torchax 0.0.13, the newest release, next to torch 2.13.

It names overloads of ATen ops with named dimensions, which torch 2.13 no longer has. While it is imported, such a name
stands for an overload that matches nothing; what torch has is as it was before and after. Later releases of torchax no
longer name them: tests/backends/xla/test_torchax_import.py fails when this file can go.
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
    """Stands in a table of ops for one that torch no longer has."""


@contextlib.contextmanager
def removed_overloads() -> Iterator[None]:
    """Removed overloads can be named, and have no decompositions."""
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
