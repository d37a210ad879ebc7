"""Check ids ahead of what torch's own ops read or write by them: rows of a table of floats, positions of a cache.

Generated code checks them too, but within parallel loops, which an exception cannot leave: it would end the process. So
the least and the largest are compared with the number of rows first. The ids that are used instead are computed from
these two, which keeps the use behind the comparison, and are rows in any case. For quantized tables bitport's own op
does it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from bitport.export.constants import value_of

aten = torch.ops.aten

BY_DIMENSION = (aten.index.Tensor, aten.index_put.default)
"""(tensor, ids or None for each dimension, ..); negative ids count from the end."""
ALONG = {
    aten.index_select.default: False,
    aten.index_copy.default: False,
    aten.index_add.default: False,
    aten.index_fill.int_Scalar: True,
    aten.index_fill.int_Tensor: True,
    aten.gather.default: False,
    aten.scatter.src: False,
    aten.scatter.value: False,
    aten.scatter.reduce: False,
    aten.scatter.value_reduce: False,
    aten.scatter_add.default: False,
    aten.scatter_reduce.two: False,
}
"""(tensor, dim, ids, ..): whether negative ids count from the end; otherwise they are errors."""
BY_NUMBER = {aten.select.int: 2, aten.select_scatter.default: 3}
"""Where in (tensor, dim, id) and (tensor, rows, dim, id) the id is: a number, which ``item()`` may have read. Generated
code does not check it, and reads whatever is there."""
COMPOSED = (
    aten.take.default,
    aten.put.default,
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)
"""Those of which generated code makes ops as above, only later."""


class Use(NamedTuple):
    ids: fx.Node
    size: int | SymInt
    """Of the dimension that they count."""
    dim: int
    from_end: bool
    number: bool = False
    """Whether the id is a number, not a tensor."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Of the ops in COMPOSED, inductor's own, for a program whose ids are to be checked."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    return {op: table[op] for op in COMPOSED}


def check_ids(graph: fx.GraphModule) -> None:
    """Add the checks to ``graph`` and its branches, in place: one for all that use the same ids in the same way."""
    for each in graph.modules():
        if isinstance(each, fx.GraphModule):
            _check(each)


def _check(graph: fx.GraphModule) -> None:
    checked: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        for use in _uses(graph, node):
            key = use.ids, str(use.size), use.from_end
            if key not in checked:
                tensor: Any = node.args[0]
                known = use.ids if isinstance(use.size, int) else max(use.ids, tensor)
                with graph.graph.inserting_before(_next(known)):
                    checked[key] = _checked(graph.graph, use, tensor)
                checked[key].meta = dict(use.ids.meta)
            node.replace_input_with(use.ids, checked[key])
    graph.recompile()


def _next(node: fx.Node) -> fx.Node:
    """As early as possible, ahead of all that writes into an input."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def _checked(graph: fx.Graph, use: Use, tensor: fx.Node) -> fx.Node:
    call = graph.call_function
    last: Any = use.size - 1
    first: Any = -use.size if use.from_end else 0
    if not isinstance(use.size, int):
        size = call(aten.sym_size.int, (tensor, use.dim))
        last, first = call(operator.sub, (size, 1)), call(operator.neg, (size,)) if use.from_end else 0
    ids = call(aten.scalar_tensor.default, (use.ids,), {"dtype": torch.int64}) if use.number else use.ids
    flat = call(aten.reshape.default, (ids, [-1]))
    ends = []
    for end, holds, bound, any_row in ((aten.amin, operator.ge, first, 0), (aten.amax, operator.le, last, -1)):
        one_more = call(aten.new_full.default, (flat, [1], any_row))  # since there may be no ids
        ends.append(call(end.default, (call(aten.cat.default, ([flat, one_more],)),)))
        # PyTorch replaces the text by one such as "Expected u0 <= 49 but received 50"
        found = call(aten.item.default, (ends[-1],))
        call(aten._assert_scalar.default, (call(holds, (found, bound)), "an id is a row"))
    least, most = (call(aten.clamp.default, (end, first, last)) for end in ends)
    rows = call(aten.minimum.default, (call(aten.maximum.default, (ids, least)), most))
    return call(aten.item.default, (rows,)) if use.number else rows


def _uses(graph: fx.GraphModule, node: fx.Node) -> Iterator[Use]:
    """They may be replaced meanwhile."""
    given: Any = node.args
    if node.target is aten.embedding.default:
        yield Use(given[1], _sizes(graph, given[0])[0], 0, False)
    elif node.target in ALONG:
        yield Use(given[2], _sizes(graph, given[0])[given[1]], given[1], ALONG[node.target])
    elif node.target in BY_NUMBER:
        dim, number = given[BY_NUMBER[node.target] - 1 :]
        if isinstance(number, fx.Node):
            yield Use(number, _sizes(graph, given[0])[dim], dim, True, number=True)
    elif node.target in BY_DIMENSION:
        dim = 0
        for at in range(len(given[1])):
            args: Any = node.args
            ids = args[1][at]
            value = None if ids is None else _value(graph, ids)
            masks = value is not None and value.dtype in (torch.bool, torch.uint8)
            if value is not None and not masks:
                yield Use(ids, _sizes(graph, args[0])[dim], dim, True)
            dim += value.dim() if value is not None and masks else 1


def _sizes(graph: fx.GraphModule, tensor: fx.Node) -> tuple[Any, ...]:
    """Those of a tensor without dimensions are those of one number."""
    return tuple(_value(graph, tensor).shape) or (1,)


def _value(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    return value_of(graph, node) if node.op == "get_attr" else node.meta["val"]
