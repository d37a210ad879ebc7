"""Use row-major storage for weights that a program only looks up.

In tiles a row of 4 bits touches four times as many cache lines as in bfloat16; in row-major order it is contiguous, and
``bitport_embedding`` accepts that. Weights that a product uses too (a tied output head) stay in tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from bitport.export.constants import value_of
from bitport.export.names import Names
from bitport.export.ops import FAKES, overload
from bitport.layouts import Matrix, layout
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.numerics import NUMBER_TYPES, Quantized

LOOKUP = "bitport_embedding"
KEPT = "bitport_rows"
"""The submodule of a graph that holds such weights."""
DTYPES = {number.bits: name for name, number in reversed(NUMBER_TYPES.items()) if number.storage == torch.uint8}
"""A number type for each number of bits: codes are only moved, so their meaning does not matter."""


def lie_by_row(graphs: Iterable[fx.GraphModule], names: Names) -> None:
    """Convert such weights in all ``graphs`` of a package, in place."""
    graphs = list(graphs)
    multiplied = {
        tensor.data_ptr()
        for graph in graphs
        for op in FAKES
        for node in _calls(graph, op)
        if op != LOOKUP
        for tensor in _constants(graph, node)
    }
    made: dict[tuple[int, ...], Quantized] = {}
    for graph in graphs:
        kept = torch.nn.Module()
        graph.add_module(KEPT, kept)
        for node in _calls(graph, LOOKUP):
            given: Any = node.args
            data, scale, zero, scale2, _, n, k, group, bits, *_ = given[1:]
            old = Quantized(value_of(graph, data), value_of(graph, scale), _maybe(graph, zero), _maybe(graph, scale2))
            if old.data.data_ptr() in multiplied:
                continue
            # A slice of the first rows or columns has the same address as the whole weight.
            at = (*(part.data_ptr() for part in old if part is not None), n, k, group, bits)
            if at not in made:
                matrix = Matrix(DTYPES[bits], n, k, 1, min(group, k))
                made[at] = layout(CpuTiles.name).unpack(matrix, old)
                for before, after in zip(old, made[at], strict=True):
                    if before is not None and after is not None:
                        names.follow(before, after)
            _replace(graph, node, made[at], len(list(kept.buffers())))


def _replace(graph: fx.GraphModule, node: fx.Node, parts: Quantized, number: int) -> None:
    found = list(node.args)
    with graph.graph.inserting_before(node):
        for at, name in enumerate(("data", "scale", "zero"), 1):
            value = parts[at - 1]
            if value is not None:
                graph.get_submodule(KEPT).register_buffer(f"{name}{number}", value)
                found[at] = graph.graph.get_attr(f"{KEPT}.{name}{number}")
    node.args = tuple(found)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _calls(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=overload(op))


def _constants(graph: fx.GraphModule, node: fx.Node) -> Iterator[Tensor]:
    for arg in node.args:
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            yield value_of(graph, arg)


def _maybe(graph: fx.GraphModule, node: fx.Node | None) -> Tensor | None:
    return None if node is None else value_of(graph, node)
