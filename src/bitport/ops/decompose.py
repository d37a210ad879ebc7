"""Decompositions: each op spelled out in aten ops, for runtimes that do not know bitport's.

torch.export.export(model, args).run_decompositions(bitport.decompositions())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitport import plugins
from bitport.ops.select import IMPLS, refusal
from bitport.ops.table import OPS, Op


def decompositions(*, native: bool = False) -> dict[Any, Callable[..., Any]]:
    """A table for ``ExportedProgram.run_decompositions``. ``native``: where a kernel of the tensors' device would be
    chosen, its own aten ops; the generic kernel's otherwise."""
    plugins.load()
    table: dict[Any, Callable[..., Any]] = {}
    for op in OPS.values():
        table[op.overload] = _chosen(op) if native else op.decomposition or op.generic
    return table


def _chosen(op: Op) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        for impl in IMPLS.get((op.name, args[0].device.type), ()):
            if refusal(impl, *args) is None:
                return impl.run(*args)
        return (op.decomposition or op.generic)(*args)

    return run
