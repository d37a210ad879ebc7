"""Replace bitport's ops in exported programs by modules that implement quantized weights for another runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitport.errors import ExportError
from bitport.export.constants import keep, value_of
from bitport.export.trace import Method, exported, in_graph
from bitport.ops import OPS
from bitport.ops.linear_then import follow
from bitport.tensor import QTensor
from bitport.tensor.exporting import INNER
from bitport.tensor.qtensor import EXTRA

WEIGHT_ARGS = 10
"""The number of op arguments, after the input, that make up the weight."""


class Operand(nn.Module):
    """A quantized weight in the form of a runtime, for products, for lookups, or for both. Subclasses keep codes and
    scales as buffers."""

    def forward(self, op: str, x: Tensor, *rest: Any) -> Tensor:
        """Compute the op of that name; ``rest``: its arguments after the weight."""
        if op == "embedding":
            return self.embedding(x, *rest)
        if op.endswith("_then"):
            *rest, then, times = rest  # type: ignore[assignment]
            return follow(self(op.removesuffix("_then"), x, *rest), then, times)
        act, act_scale, bias = rest if op == "dyn_linear" else ("", None, *rest)
        return self.linear(x, act, act_scale, bias)

    def linear(self, x: Tensor, act: str, act_scale: Tensor | None, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def embedding(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


TAKEN = ("linear", "dyn_linear", "linear_then", "dyn_linear_then", "embedding")
"""The ops that an operand supports."""
OTHERS = (
    "in this form only linear layers and lookups can be exported with quantized weights; leave this one as it is "
    "(a rule that says skip)"
)


def relinked(
    method: Method,
    refusal: Callable[[QTensor, str], str | None],
    factor: Callable[[QTensor], Operand],
    table: Callable[[QTensor], Operand],
) -> torch.export.ExportedProgram:
    """Return the method with each quantized weight replaced by an operand, which is ``factor(weight)`` in products and
    ``table(weight)`` in lookups. Each is created once for all its uses, and once for both if they are one function.
    ``refusal(weight, op)``: why the runtime cannot use this weight for this op, or None; the ExportError names the
    layer."""
    graph = exported(method).module(check_guards=False)
    made: dict[tuple[int, Callable[[QTensor], Operand]], str] = {}
    for node in list(graph.graph.nodes):
        op = _name_of(node)
        if op is None:
            continue
        name, weight = _weight_of(graph, node, op)
        if op not in TAKEN:
            raise ExportError(f"{name} is {weight.scheme}, taken by {op}: {OTHERS}")
        if reason := refusal(weight, op):
            raise ExportError(f"{name} is {weight.scheme}, {weight.matrix.n}x{weight.matrix.k}: {reason}")
        make = table if op == "embedding" else factor
        if (id(weight), make) not in made:
            made[id(weight), make] = f"{name}_{'table' if op == 'embedding' else 'factor'}"
            graph.add_submodule(made[id(weight), make], make(weight))
        with graph.graph.inserting_before(node):
            given = (op, node.args[0], *node.args[1 + WEIGHT_ARGS :])
            call = graph.graph.call_module(made[id(weight), make], given)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.find_nodes(op="call_function", target=INNER):
        _make_plain(graph, node)
    graph.graph.eliminate_dead_code()
    for name, value in list(graph.named_parameters(remove_duplicate=False)):
        if isinstance(value, QTensor):
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return exported(in_graph(method, graph))


def _make_plain(graph: fx.GraphModule, node: fx.Node) -> None:
    """Replace a part of a weight that is used to prepare its input by a buffer."""
    name, weight = _tensor_of(graph, node.args[0])
    part = str(node.args[1])
    if not isinstance(weight, QTensor) or part not in EXTRA:
        raise ExportError(f"{name} is {getattr(weight, 'scheme', 'of another library')}: {OTHERS}")
    place = f"{name}_{part}"
    keep(graph, place, getattr(weight, part))
    with graph.graph.inserting_before(node):
        constant = graph.graph.get_attr(place)
    node.replace_all_uses_with(constant)
    graph.graph.erase_node(node)


def _name_of(node: fx.Node) -> str | None:
    target = node.target
    ours = node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target.namespace == "bitport"
    return next((name for name, op in OPS.items() if op.overload == target), str(target)) if ours else None


def _weight_of(graph: fx.GraphModule, node: fx.Node, op: str) -> tuple[str, QTensor]:
    """The qualified name and the weight of a call."""
    for inner in node.all_input_nodes:
        if inner.target == INNER:
            name, weight = _tensor_of(graph, inner.args[0])
            if isinstance(weight, QTensor):
                return name, weight
    raise ExportError(f"{op}: its quantized weight is no parameter of the module: {OTHERS}")


def _tensor_of(graph: fx.GraphModule, node: Any) -> tuple[str, Any]:
    """The qualified name and value of a parameter or buffer."""
    if node.op != "get_attr":
        raise ExportError(
            "a quantized weight is picked by an input of the module, and this runtime takes those that are the same on "
            "every call: compute with all of them and pick among the results, or leave this one as it is (a rule that "
            "says skip)"
        )
    return str(node.target), value_of(graph, node)
