"""Turn weights that a module slices or concatenates on every call into separate weights of the program."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from bitport.export.constants import value_of
from bitport.tensor import QTensor
from bitport.tensor.exporting import INNER


def has_pieces(program: torch.export.ExportedProgram) -> bool:
    return any(_is_made(node.args[0]) for node in program.graph.find_nodes(op="call_function", target=INNER))


def keep_pieces(graph: fx.GraphModule) -> None:
    """Make every QTensor that is computed from weights alone a parameter, in place, and remove its computation."""
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = value_of(graph, node)
        elif _is_made(node) and node.target != INNER and all(each in known for each in node.all_input_nodes):
            args, kwargs = (fx.map_arg(given, known.__getitem__) for given in (node.args, node.kwargs))
            if any(isinstance(each, QTensor) for each in pytree.tree_leaves((args, kwargs))):
                known[node] = node.target(*args, **kwargs)
    kept: dict[fx.Node, str] = {}
    for node in graph.graph.find_nodes(op="call_function", target=INNER):
        made: Any = node.args[0]
        if not _is_made(made) or made not in known:
            continue
        whole = _source(made)
        if made not in kept and _parts(known[made]) == _parts(known[whole]):
            kept[made] = str(whole.target)
        elif made not in kept:
            kept[made] = f"{str(whole.target).replace('.', '_')}_piece{len(kept)}"
            graph.register_parameter(kept[made], nn.Parameter(known[made], requires_grad=False))
        with graph.graph.inserting_before(node):
            node.args = (graph.graph.get_attr(kept[made]), *node.args[1:])
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()


def _is_made(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function"


def _source(node: fx.Node) -> fx.Node:
    """The first weight that it is computed from."""
    while node.op != "get_attr":
        node = node.all_input_nodes[0]
    return node


def _parts(value: Any) -> list[Any]:
    """A key that is equal for views of the same parts, such as a transposed one."""
    names = value.__tensor_flatten__()[0] if isinstance(value, QTensor) else []
    return [(name, part.data_ptr(), part.shape) for name in names for part in (getattr(value, name),)]
