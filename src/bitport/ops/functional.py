"""The table of torch functions that accept a QTensor, with their implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import dequantize, quantize
from bitport.ops.bags import embedding_bag, padding_row
from bitport.ops.encoder_layer import encoder_layer
from bitport.ops.linear import check_dense
from bitport.ops.matmul import addmm, baddbmm, bmm, einsum, grouped_mm, in_place, into_given, matmul, mm, mv
from bitport.ops.product import linear, operand, run
from bitport.ops.recurrent import RECURRENT
from bitport.ops.values import dense_rows, quantize_weight
from bitport.tensor import ATEN, FUNCTIONS, QTensor
from bitport.tensor.aten import take_experts
from bitport.tensor.borders import unit
from bitport.tensor.exporting import recorded
from bitport.tensor.forms import with_row_scales

aten = torch.ops.aten


def embedding(
    input: Tensor,
    weight: QTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise ArgumentError(
            "max_norm rewrites the table on every lookup, which a quantized one cannot be: leave out max_norm, or "
            "leave the table as it is (a rule 'skip')"
        )
    if weight.transposed:
        raise ArgumentError(
            "this QTensor is a transposed view [K, N]; F.embedding wants a table [N, K]: pass weight.t()"
        )
    if padding_idx is not None:
        padding_row(padding_idx, weight.shape[0])
    if input.layout == torch.jagged:
        ids: Any = input
        places = {"offsets": ids.offsets(), "lengths": ids.lengths(), "jagged_dim": ids._ragged_idx}
        return torch.nested.nested_tensor_from_jagged(embedding(ids.values(), weight), **places)
    check_dense("the tensor of ids", input)
    return weight.in_value_order(run("embedding", input, *operand(weight), _dtype(weight)))


def getitem(q: QTensor, index: Any) -> Tensor:
    """``q[index]``: integer ids look up rows of a table (negative ids count from the end), as a number does one; others
    slice or select."""
    if isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.dim() > 0 and q.dim() == 2:
        return _rows(q, index)
    at, *rest = index if isinstance(index, tuple) and index else (index,)
    if isinstance(at, (int, torch.SymInt)) and not isinstance(at, bool) and q.dim() == 2 and not q.transposed:
        return _row(q, at)[tuple(rest)] if rest else _row(q, at)
    with torch._C.DisableTorchFunctionSubclass():
        made = Tensor.__getitem__(q, index)
    return recorded(made, QTensor)


def select(input: QTensor, dim: int, index: int) -> Tensor:
    """What tracers make of ``input[index]`` if the index is a symbol."""
    if input.dim() == 2 and dim in (0, -2) and not input.transposed:
        return _row(input, index)
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.select(input, dim, index)
    return recorded(made, QTensor)


def _row(q: QTensor, at: Any) -> Tensor:
    """A symbol becomes a number of the graph, whose kernel checks it: to compare it here would specialize the graph."""
    if isinstance(at, int) and not -q.matrix.n <= at < q.matrix.n:
        raise IndexError(f"rows are {-q.matrix.n} to {q.matrix.n - 1}, not {at}")
    return _rows(q, torch.full((), at, dtype=torch.int64, device=q.qdata.device))


def _rows(q: QTensor, ids: Tensor) -> Tensor:
    return embedding(torch.where(ids < 0, ids + q.matrix.n, ids), q)


def _index(func: Any, q: QTensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Index rows of a table by a list or mask, or select experts of a stack."""
    if q.dim() != 2 or q.transposed or len(indices) != 1:
        return take_experts(func, q, indices)
    return embedding(func(torch.arange(q.matrix.n, device=q.qdata.device), indices), q)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: Any = None,
    **how: Any,
) -> Tensor:
    """The product and then the loss. ``options`` divide both into chunks, to save memory, in a kernel for floats."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **how)


def _dtype(q: QTensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return q.dtype


def _convolution(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``fn`` with the quantized weight dequantized to the input's dtype."""

    def conv(input: Tensor, weight: QTensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(input, QTensor) or not isinstance(weight, QTensor):
            raise ArgumentError("a convolution takes a quantized tensor as its weight only; dequantize() the rest")
        return fn(input, weight.dequantize(input.dtype), *args, **kwargs)

    return conv


def attention_by(rows_apart: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Wrap F.multi_head_attention_forward, which splits the input projection into three if query, key and value differ.
    ``rows_apart(weight, rows of a third)`` returns an equal weight that can be split there, even within blocks."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Any, *rest: Any, **more: Any
    ) -> Any:
        if weight is not None and not (query is key and key is value):
            weight = rows_apart(weight, width)
        with torch._C.DisableTorchFunctionSubclass():
            return F.multi_head_attention_forward(query, key, value, width, heads, weight, *rest, **more)

    return attention


def _rows_apart(weight: Any, width: int) -> Any:
    """Export only supports parameters and slices of them, so there the slice is left to raise its own error."""
    cut = isinstance(weight, QTensor) and width % unit(weight, 0) != 0
    return with_row_scales(weight) if cut and not torch.compiler.is_exporting() else weight


TRACED_GROUPED_MM = "transformers::grouped_mm_fallback"
"""What transformers calls instead of F.grouped_mm when compiling with a dtype other than bfloat16."""
COMPOSED: dict[Any, Callable[..., Any]] = {
    getattr(F, "linear_cross_entropy", "linear_cross_entropy"): linear_cross_entropy,  # of PyTorch from 2.13 on
    torch._transformer_encoder_layer_fwd: encoder_layer,
    **RECURRENT,
}
"""Functions computed by F.linear and attention, whatever the weights are that override these."""
FUNCTIONS.update(
    {
        quantize: quantize_weight,
        dequantize: dense_rows,
        F.linear: linear,
        F.embedding: embedding,
        F.embedding_bag: embedding_bag,
        Tensor.__getitem__: getitem,
        torch.select: select,
        Tensor.matmul: matmul,
        Tensor.__matmul__: matmul,
        Tensor.mm: mm,
        Tensor.bmm: bmm,
        torch.einsum: einsum,
        F.multi_head_attention_forward: attention_by(_rows_apart),
        Tensor.mv: mv,
        Tensor.addmm_: in_place(addmm),
        Tensor.baddbmm_: in_place(baddbmm),
        F.grouped_mm: grouped_mm,
        torch._grouped_mm: grouped_mm,
        TRACED_GROUPED_MM: grouped_mm,
        torch.matmul: into_given(matmul),
        torch.mm: into_given(mm),
        torch.bmm: into_given(bmm),
        torch.mv: into_given(mv),
        torch.addmm: into_given(addmm),
        torch.baddbmm: into_given(baddbmm),
        **COMPOSED,
    }
)

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
"""Names in ``torch``; those in F are the same functions."""
FUNCTIONS.update({fn: _convolution(fn) for fn in (getattr(torch, name) for name in CONVOLUTIONS)})


def _aten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, *args, **kwargs: fn(*args, **kwargs)


ATEN.update(
    {
        aten.mm.default: _aten(mm),
        aten.bmm.default: _aten(bmm),
        aten.addmm.default: _aten(addmm),
        aten.baddbmm.default: _aten(baddbmm),
        aten._grouped_mm.default: _aten(grouped_mm),
        aten.index.Tensor: _index,
        aten.linear.default: _aten(linear),
        aten.embedding.default: _aten(lambda weight, ids, *rest: embedding(ids, weight)),
        aten.convolution.default: lambda func, x, weight, *rest: func(x, weight.dequantize(x.dtype), *rest),
    }
)
