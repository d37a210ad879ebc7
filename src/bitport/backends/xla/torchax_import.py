"""Import torchax 0.0.13, the newest release, alongside torch 2.13 and later.

It names overloads of ATen ops with named dimensions, which torch 2.13 has removed, and ops that torch 2.15 has removed.
During its import such names resolve to placeholders that match nothing; afterwards torch is unpatched again. Later
versions of torchax do not name these overloads: tests/backends/xla/test_torchax_import.py fails when this file can be
removed.
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
from torch._ops import OpOverloadPacket, _OpNamespace

from bitport.errors import DeviceError

NAMED_DIMENSIONS = ("Dimname", "dimname", "names")
OPS = ("cholesky", "qr")


class Removed:
    """Placeholder in a table of ops for an op that torch has removed, or an overload of one."""

    def __getattr__(self, overload: str) -> Removed:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return Removed()


@contextlib.contextmanager
def removed_overloads() -> Iterator[None]:
    """Within this context removed ops and overloads can be named, and have no decompositions."""
    look_up, decompositions = OpOverloadPacket.__getattr__, torch._decomp.get_decompositions
    look_up_op = _OpNamespace.__getattr__

    def op_with_removed(namespace: _OpNamespace, name: str) -> Any:
        try:
            return look_up_op(namespace, name)
        except AttributeError:
            if name not in OPS:
                raise
            return Removed()

    def with_removed(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return look_up(packet, name)
        except AttributeError:
            if not any(part in name for part in NAMED_DIMENSIONS):
                raise
            return Removed()

    def of_those_that_exist(ops: Iterable[Any], *args: Any) -> dict[Any, Callable[..., Any]]:
        return decompositions([op for op in ops if not isinstance(op, Removed)], *args)

    with (
        mock.patch.object(_OpNamespace, "__getattr__", op_with_removed),
        mock.patch.object(OpOverloadPacket, "__getattr__", with_removed),
        mock.patch.object(torch._decomp, "get_decompositions", of_those_that_exist),
    ):
        yield


def import_torchax() -> ModuleType:
    if "torchax" not in sys.modules:
        try:
            with removed_overloads():
                for name in ("torchax", "torchax.decompositions", "torchax.ops.jaten"):
                    importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise DeviceError(f"{error}: pip install 'bitport[xla]'") from error
    return sys.modules["torchax"]
