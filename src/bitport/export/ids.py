"""Check the ids of float tables ahead of their lookup.

Generated code checks them too, but within parallel loops, which an exception cannot leave: it would end the process. So
the least and the largest are compared with the number of rows first. For quantized tables bitport's own op does it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from bitport.export.constants import value_of

aten = torch.ops.aten


def check_ids(graph: fx.GraphModule) -> None:
    """Add the checks to ``graph``, in place."""
    call = graph.graph.call_function
    for lookup in graph.graph.find_nodes(op="call_function", target=aten.embedding.default):
        table: Any = lookup.args[0]
        rows = (value_of(graph, table) if table.op == "get_attr" else table.meta["val"]).shape[0]
        with graph.graph.inserting_before(lookup):
            flat = call(aten.reshape.default, (lookup.args[1], [-1]))
            some = call(aten.cat.default, ([flat, call(aten.new_zeros.default, (flat, [1]))],))  # there may be no ids
            for end, holds, bound in ((aten.amin, operator.ge, 0), (aten.amax, operator.lt, rows)):
                number = call(aten.item.default, (call(end.default, (some,)),))
                # PyTorch replaces the text by one such as "Expected u0 <= 49 but received 50"
                call(aten._assert_scalar.default, (call(holds, (number, bound)), "an id is a row"))
    graph.recompile()
