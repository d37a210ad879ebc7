"""Lower attention to that of exported programs: over a quantized cache, and over one of floats, where torch's own reads
all of the memory, even if little of it is filled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from bitport.export.ops import overload
from bitport.numerics import FLOATS, NUMBER_TYPES
from bitport.ops import Weight
from bitport.ops.attention import AttentionArgs, bool_or_float32, not_by_token, rows_together

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def attention(*args: Any) -> Tensor | None:
    """The op bitport::attention, or None if the kernel does not take it."""
    call = AttentionArgs.of(*args)
    if call.q.device.type != "cpu" or not_by_token(call):
        return None
    tokens = (*_tokens(call.keys, call.dense_keys), *_tokens(call.values, call.dense_values))
    mask, causal = bool_or_float32(call.mask), int(call.causal)
    return overload("bitport_attention")(call.q.contiguous(), *tokens, call.first, mask, causal, call.scale)


def _tokens(weight: Weight, dense: Tensor | None) -> tuple[Any, ...]:
    number = NUMBER_TYPES[weight.dtype]
    parts = (None if part is None else rows_together(part) for part in (weight.data, weight.scale, weight.zero, dense))
    sizes = (weight.n, weight.k, weight.block_n, weight.block_k, number.bits, int(number.kind == "int"))
    return (*parts, overload("number_table")(weight.dtype), *sizes)


def float_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention; by the kernel for a single query, and for several over a cache whose mask of bool
    hides what is not filled. Those over their own tokens remain torch's, and on processors with AMX all of several
    rows: its products of bfloat16 are faster there than these of float32."""
    taken = attn_mask is None or attn_mask.dim() <= 4
    taken &= not dropout_p and not is_causal and _fits(q, keys, values, enable_gqa)
    if taken:
        rows, tokens = q.shape[2], keys.shape[2]
        cached = attn_mask is not None and attn_mask.dtype == torch.bool and not statically_known_true(rows == tokens)
        taken = statically_known_true(rows == 1) or (cached and not torch.cpu._is_amx_tile_supported())
    if not taken:
        given = (q, keys, values, attn_mask, dropout_p, is_causal)
        as_torch_does = torch._C.DispatchKey.CompositeImplicitAutograd
        return SDPA._op_dk(as_torch_does, *given, scale=scale, enable_gqa=enable_gqa)
    mask = None if attn_mask is None else bool_or_float32(attn_mask[(None,) * (4 - attn_mask.dim())])
    operands = (q.contiguous(), rows_together(keys), rows_together(values), mask, 0)
    return overload("bitport_float_attention")(*operands, q.shape[3] ** -0.5 if scale is None else scale)


def _fits(q: Tensor, keys: Tensor, values: Tensor, grouped: bool) -> bool:
    """Whether these are heads as the kernel takes them, without axes that are expanded."""
    if any(each.dim() != 4 or each.dtype != q.dtype or each.device.type != "cpu" for each in (q, keys, values)):
        return False
    heads = keys.shape[1]
    if q.dtype not in FLOATS or not statically_known_true(heads > 0):
        return False
    same = [keys.shape[0] == q.shape[0], values.shape[0] == q.shape[0], values.shape[1] == heads]
    same += [q.shape[1] % heads == 0 if grouped else q.shape[1] == heads, keys.shape[2] == values.shape[2]]
    return all(statically_known_true(each) for each in same)
