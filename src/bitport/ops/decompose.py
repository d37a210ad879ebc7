"""Decompositions of each op into aten ops, for runtimes without bitport's ops.

torch.export.export(model, args).run_decompositions(bitport.decompositions())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitport import plugins
from bitport.ops.select import IMPLS, refusal
from bitport.ops.table import OPS, Op


def decompositions(*, native: bool = False) -> dict[Any, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions``. By default it has the generic kernels; with ``native``, the
    aten ops of the kernel that would be chosen on the tensors' device, if any."""
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
