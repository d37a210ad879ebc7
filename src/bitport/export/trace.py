"""Export a module by torch.export, as the methods of programs and the models of other runtimes begin."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from bitport.errors import BitportError, ExportError
from bitport.export.pieces import has_pieces, keep_pieces

DROPOUTS = [
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
]


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a program: ``module(*args)``. ``dynamic_shapes``: as for torch.export.export, with torch.export.Dim
    for each size that may vary between calls; the same name means the same size."""

    module: nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: Any = None


def dense(method: Method) -> Method:
    """Make the arguments contiguous as a caller's will be: torch specializes on their strides, even those of dimensions
    of size 1, which contiguity checks ignore."""
    shapes = method.dynamic_shapes
    if isinstance(shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):  # keyed by tensor identity
        shapes = shapes.dynamic_shapes(method.module, method.args)
    return dataclasses.replace(method, args=pytree.tree_map_only(Tensor, _dense, method.args), dynamic_shapes=shapes)


def _dense(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def by_name(method: Method) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments and dynamic_shapes by name; torch accepts the latter by position, or by name in any order."""
    given = inspect.signature(method.module.forward).bind(*method.args).arguments
    shapes = method.dynamic_shapes
    return given, shapes if isinstance(shapes, dict) else dict(zip(given, shapes or (), strict=bool(shapes)))


def in_graph(method: Method, graph: fx.GraphModule) -> Method:
    """The method by its graph, which takes one by one what ``forward(x, *rest)`` has as one argument."""
    if not (method.dynamic_shapes and isinstance(method.dynamic_shapes, dict | tuple | list)):
        return dataclasses.replace(method, module=graph)
    kinds = inspect.signature(method.module.forward).parameters
    given, shapes = by_name(method)
    each: list[Any] = []
    for name in given:
        each += shapes[name] if kinds[name].kind is inspect.Parameter.VAR_POSITIONAL else [shapes[name]]
    return Method(graph, method.args, tuple(each))


def exported(method: Method) -> torch.export.ExportedProgram:
    """Export the method; the program has plain tensors, and torch's ops beside bitport's."""
    program = _traced(method)
    if any(map(_drops, program.graph.nodes)):
        raise ExportError(
            "the model is in training mode, so the program would drop numbers at random: call its eval() first"
        )
    if has_pieces(program):
        graph = program.module(check_guards=False)
        keep_pieces(graph)
        program = _traced(in_graph(method, graph))
    return program


def _drops(node: fx.Node) -> bool:
    """Whether it is active dropout: (input, p, train), or attention (query, key, value, mask, p)."""
    if node.target in DROPOUTS:
        return bool(node.args[1] and node.args[2])
    return node.target is torch.ops.aten.scaled_dot_product_attention.default and any(node.args[4:5])


def _traced(method: Method) -> torch.export.ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(method.module, method.args, dynamic_shapes=method.dynamic_shapes, strict=False)
    except BitportError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(
            f"torch.export cannot trace {type(method.module).__name__} with these arguments and dynamic_shapes: "
            f"{error}\n"
            "It must run as it is called here, every size that may differ must be free to, and what its code does must "
            "not depend on the numbers in tensors"
        ) from error
