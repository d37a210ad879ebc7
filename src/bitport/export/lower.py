"""Lower bitport's ops to those of exported programs: a table for ``ExportedProgram.run_decompositions``.

Whatever the native kernels support becomes a single op; if they cannot round the input, torch's ops do; everything else
is decomposed as by :func:`bitport.decompositions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from bitport.errors import ExportError
from bitport.export.lower_attention import SDPA, attention, float_attention
from bitport.export.ops import overload
from bitport.layouts.cpu_tiles import CpuTiles
from bitport.numerics import NUMBER_TYPES, STATIC, fake_quantize
from bitport.ops import OPS, Weight, decompositions
from bitport.ops.linear_then import follow
from bitport.ops.native_codes import ACTS, THEN, rounds

LAYOUT = CpuTiles()
TABLES = "bitport_tables"
"""The submodule of a program that holds the tables of number types, by name."""


def lowerings() -> dict[Any, Callable[..., Any]]:
    table = decompositions()
    for name, lower in LOWERED.items():
        table[OPS[name].overload] = _lowered(lower, table[OPS[name].overload])
    table[SDPA] = float_attention
    return table


def _lowered(lower: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = lower(*args)
        return otherwise(*args) if result is None else result

    return run


def _linear(x: Tensor, *rest: Any) -> Tensor | None:
    """``rest``: the weight and the bias; of linear_then also ``then`` and ``times``."""
    return _product(x, Weight(*rest[:10]), "", None, *rest[10:])


def _dyn_linear(x: Tensor, *rest: Any) -> Tensor | None:
    """``rest``: the weight, ``act``, ``act_scale`` and the bias; of dyn_linear_then also ``then`` and ``times``."""
    return _product(x, Weight(*rest[:10]), *rest[10:])


def _product(
    x: Tensor,
    weight: Weight,
    act: str,
    act_scale: Tensor | None,
    bias: Tensor | None,
    then: str = "",
    times: Tensor | None = None,
) -> Tensor | None:
    if not _native(weight):
        return None
    if act and not rounds(act, weight.dtype):
        y = _product(fake_quantize(x, act, act_scale), weight, "", None, bias)
        assert y is not None
        return follow(y.to(x.dtype), then, times) if then else y.to(x.dtype)
    return overload("bitport_dyn_linear" if act else "bitport_linear")(
        x.contiguous(),
        *_operand(weight),
        *((ACTS[act], act_scale) if act else ()),
        None if bias is None else bias.to(x.dtype).contiguous(),
        THEN[then],
        None if times is None else times.contiguous(),
    )


def _grouped_linear(x: Tensor, ends: Tensor, *weight: Any) -> Tensor | None:
    return _by_expert(x, ends, Weight(*weight), "")


def _dyn_grouped_linear(x: Tensor, ends: Tensor, *rest: Any) -> Tensor | None:
    *parts, act = rest
    weight = Weight(*parts)
    if rounds(act, weight.dtype) and act not in STATIC:  # a scale over all rows differs from that of one expert's rows
        return _by_expert(x, ends, weight, act)
    y = _by_expert(fake_quantize(x, act), ends, weight, "")
    return None if y is None else y.to(x.dtype)


def _by_expert(x: Tensor, ends: Tensor, weight: Weight, act: str) -> Tensor | None:
    if not _native(weight):
        return None
    given = x.contiguous(), ends.contiguous(), *_operand(weight)
    return (
        overload("bitport_dyn_grouped_linear")(*given, ACTS[act]) if act else overload("bitport_grouped_linear")(*given)
    )


def _embedding(ids: Tensor, *rest: Any) -> Tensor | None:
    *parts, dtype = rest
    weight = Weight(*parts)
    if not _native(weight):
        return None
    return overload("bitport_embedding")(ids.long().contiguous(), *_operand(weight), dtype)


LOWERED: dict[str, Callable[..., Tensor | None]] = {
    "linear": _linear,
    "dyn_linear": _dyn_linear,
    "linear_then": _linear,
    "dyn_linear_then": _dyn_linear,
    "grouped_linear": _grouped_linear,
    "dyn_grouped_linear": _dyn_grouped_linear,
    "embedding": _embedding,
    "attention": attention,
}


def _native(weight: Weight) -> bool:
    fits = weight.layout == LAYOUT.name and weight.data.device.type == "cpu"
    return fits and LAYOUT.refuses(weight.matrix, weight.parts) is None


def _operand(weight: Weight) -> tuple[Any, ...]:
    number = NUMBER_TYPES[weight.dtype]
    table = overload("number_table")(weight.dtype)
    sizes = (weight.n, weight.k, weight.block_k, number.bits, int(number.kind == "int"))
    return (*weight[:4], table, *sizes)


def fix_tables(graph: fx.GraphModule) -> None:
    """Replace the calls of ``number_table`` by a constant for each number type."""
    nodes = _calls(graph)
    if any(_calls(each) for each in graph.modules() if isinstance(each, fx.GraphModule) and each is not graph):
        raise ExportError(
            "a branch or a loop (torch.cond, while_loop) computes with a quantized weight, which packages can only do "
            "outside: move that layer there, or leave it as it is (a rule that says skip)"
        )
    tables = torch.nn.Module()
    if nodes:
        graph.add_module(TABLES, tables)
    for node in nodes:
        dtype = str(node.args[0])
        if not hasattr(tables, dtype):
            tables.register_buffer(dtype, overload("number_table")(dtype))
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(f"{TABLES}.{dtype}")
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        graph.graph.erase_node(node)
    graph.recompile()


def _calls(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="call_function", target=overload("number_table")))
