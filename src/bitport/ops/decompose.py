"""Decompositions of each op into aten ops, for runtimes without bitport's ops.

torch.export.export(model, args).run_decompositions(bitport.decompositions())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitport import plugins
from bitport.ops.select import first_that_takes
from bitport.ops.table import OPS, Op


def decompositions(*, native: bool = False) -> dict[Any, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions``. By default it has the generic kernels; with ``native``, the
    aten ops of the kernel that would be chosen on the tensors' device, or of the one that is forced."""
    plugins.load()
    table: dict[Any, Callable[..., Any]] = {}
    for op in OPS.values():
        table[op.overload] = _chosen(op) if native else op.decomposition or op.generic
    return table


def _chosen(op: Op) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        impl, _ = first_that_takes(op.name, args[0].device.type, *args)
        return (op.decomposition or op.generic if impl is None else impl.run)(*args)

    return run
