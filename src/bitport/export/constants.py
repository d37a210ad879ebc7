"""The constants of a program's libraries, and their location in its weight file.

A quantized weight consists of several tensors, and passing one to a library takes a few microseconds: more than mapping
its data. So tensors that only bitport's ops read, of one dtype and used by the same methods, are stored contiguously
and passed as a single constant, a span; generated code slices it for each op. Tensors that torch's own ops read remain
separate constants, since torch may do more with them than read.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from bitport.export.names import Names
from bitport.export.ops import FAKES, overload
from bitport.export.weights import Written

SPANS = "bitport_spans"
"""The submodule of a graph that holds the spans."""
OURS = {overload(name) for name in FAKES}
AS_STRIDED = torch.ops.aten.as_strided.default


class Constant(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    """Offset in bytes in the weight file."""


Read = Callable[[Constant], Tensor]


class Constants:
    """The constants of all ``graphs`` of a program: ordered here, written by the caller, then read from the file."""

    def __init__(self, graphs: Mapping[str, fx.GraphModule], names: Names) -> None:
        self.graphs = graphs
        self._named: dict[fx.Node, str] = {}
        methods: dict[str, list[str]] = {}
        for method, graph in graphs.items():
            _drop_unread(graph)
            for node in _nodes(graph):
                self._named[node] = names.name_of(method, str(node.target), value_of(graph, node))
            for name in dict.fromkeys(self._named[node] for node in _nodes(graph) if _is_operand(node)):
                methods.setdefault(name, []).append(method)
        spans: dict[tuple[tuple[str, ...], torch.dtype], list[str]] = {}
        for name, users in methods.items():
            if names.tensors[name].numel():
                spans.setdefault((tuple(users), names.tensors[name].dtype), []).append(name)
        self._spans = list(spans.values())
        order = [*(name for span in self._spans for name in span), *names.tensors]
        self.tensors = {name: names.tensors[name] for name in order}
        """The contents of the weight file, in this order."""

    def settle(self, file: Path, start: int, written: Written) -> dict[str, dict[str, Constant]]:
        """Return the constants of each method by their new names in its graph. Spans and non-contiguous tensors are
        read from the weight file, ``written`` to ``file`` after ``start`` bytes."""
        with open(file, "rb") as opened:
            read = partial(_read, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), start)
        return {method: self._settle(graph, read, written.places) for method, graph in self.graphs.items()}

    def _settle(self, graph: fx.GraphModule, read: Read, places: Mapping[str, int]) -> dict[str, Constant]:
        found: dict[str, Constant] = {}
        span_of = {name: number for number, span in enumerate(self._spans) for name in span}
        graph.add_module(SPANS, nn.Module())
        for node in _nodes(graph):
            name, target = self._named[node], str(node.target)
            part = self._place([name], places)
            if name not in span_of or not _is_operand(node):
                found[target] = part
                if not value_of(graph, node).is_contiguous():
                    keep(graph, target, read(part))
                continue
            number = span_of[name]
            whole, place = self._place(self._spans[number], places), f"{SPANS}.{number}"
            if place not in found:
                keep(graph, place, read(whole))
            found[place] = whole
            _cut(graph, node, place, part, (part.at - whole.at) // part.dtype.itemsize)
        _forget_others(graph, found)
        graph.recompile()
        return found

    def _place(self, names: list[str], places: Mapping[str, int]) -> Constant:
        """The constant for one tensor in its shape, or for a flat range from the first to the last."""
        first, last, at = self.tensors[names[0]], self.tensors[names[-1]], places[names[0]]
        if len(names) == 1:
            return Constant(first.dtype, tuple(first.shape), at)
        return Constant(first.dtype, ((places[names[-1]] + last.nbytes - at) // first.dtype.itemsize,), at)


def value_of(graph: fx.GraphModule, node: fx.Node) -> Any:
    """The constant that ``node`` reads."""
    return attrgetter(str(node.target))(graph)


def _drop_unread(graph: fx.GraphModule) -> None:
    for node in graph.graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.graph.erase_node(node)


def _nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """The nodes that read tensors of the graph."""
    return [node for node in graph.graph.find_nodes(op="get_attr") if isinstance(value_of(graph, node), Tensor)]


def _is_operand(node: fx.Node) -> bool:
    return all(user.target in OURS for user in node.users)


def _read(data: mmap.mmap, start: int, constant: Constant) -> Tensor:
    count = torch.Size(constant.shape).numel()
    flat = torch.frombuffer(data, dtype=constant.dtype, count=count, offset=start + constant.at)
    return flat.view(constant.shape)


def keep(graph: fx.GraphModule, target: str, value: Tensor) -> None:
    """Register ``value`` as the buffer ``target``, replacing whatever had that name."""
    path, _, name = target.rpartition(".")
    owner = graph.get_submodule(path)
    if hasattr(owner, name):
        delattr(owner, name)
    owner.register_buffer(name, value)


def _cut(graph: fx.GraphModule, node: fx.Node, whole: str, part: Constant, first: int) -> None:
    """Replace a constant by the part of a span that starts at element ``first``."""
    stride = torch.empty(part.shape, device="meta").stride()
    with graph.graph.inserting_before(node):
        span = graph.graph.get_attr(whole)
        cut = graph.graph.call_function(AS_STRIDED, (span, list(part.shape), list(stride), first))
    cut.meta = dict(node.meta)
    node.replace_all_uses_with(cut)
    graph.graph.erase_node(node)


def _forget_others(graph: fx.GraphModule, constants: Mapping[str, Constant]) -> None:
    for prefix, module in graph.named_modules():
        for kind in (module._parameters, module._buffers):
            for name in [name for name in kind if f"{prefix}.{name}".lstrip(".") not in constants]:
                del kind[name]
