"""Attention over quantized keys and values by the native library, which reads each code once, straight from the
store."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from bitport.backends.cpu.native import TYPES, Library, address, table_of, typed
from bitport.numerics import NUMBER_TYPES
from bitport.ops import Impl, Weight, register_kernel
from bitport.ops.attention import AttentionArgs, bool_or_float32, mask_steps, not_by_token, rows_together

Steps = ctypes.c_int64 * 2


class Tokens(ctypes.Structure):
    """BitportTokens"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "table", "dense")),
        *((name, ctypes.c_int64) for name in ("width", "group", "block")),
        *((name, Steps) for name in ("codes_step", "scale_step", "zero_step", "dense_step")),
        *((name, ctypes.c_int32) for name in ("bits", "integer", "scale_type", "zero_type")),
    )


class Attention(ctypes.Structure):
    """BitportAttention"""

    _fields_ = (
        ("keys", Tokens),
        ("values", Tokens),
        *((name, ctypes.c_void_p) for name in ("q", "y", "mask")),
        ("mask_step", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "groups", "rows", "first_dense", "quantized", "dense")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("causal", "type", "mask_type")),
    )


def refuses(*args: Any) -> str | None:
    return not_by_token(AttentionArgs.of(*args))


def _tokens(weight: Weight, dense: Tensor | None) -> tuple[Tokens, list[Tensor | None]]:
    """Return the struct and the tensors that it points into."""
    number = NUMBER_TYPES[weight.dtype]
    kept = [None if part is None else rows_together(part) for part in (weight.data, weight.scale, weight.zero, dense)]
    steps = [Steps(*((0, 0) if part is None else part.stride()[:2])) for part in kept]
    codes, scale, zero, floats = map(address, kept)
    tokens = Tokens(
        codes,
        scale,
        zero,
        ctypes.addressof(table_of(weight.dtype)),
        floats,
        weight.k,
        weight.block_k,
        weight.block_n,
        *steps,
        number.bits,
        number.kind == "int",
        TYPES[weight.scale.dtype],
        TYPES[torch.uint8 if weight.zero is None else weight.zero.dtype],
    )
    return tokens, kept


def register(library: Library) -> None:
    i32 = ctypes.c_int32
    function = typed(library.functions.bitport_attention, [ctypes.POINTER(Attention), i32, i32], i32)

    def run(*args: Any) -> Tensor:
        call = AttentionArgs.of(*args)
        q, mask = call.q.contiguous().resolve_neg(), bool_or_float32(call.mask)
        batch, heads, rows, _ = q.shape
        y = q.new_empty(batch, heads, rows, call.values.k)
        if not y.numel():
            return y
        keys, kept_keys = _tokens(call.keys, call.dense_keys)
        values, kept_values = _tokens(call.values, call.dense_values)
        described = Attention(
            keys,
            values,
            q.data_ptr(),
            y.data_ptr(),
            address(mask),
            (ctypes.c_int64 * 4)(*mask_steps(mask)),
            batch,
            heads,
            call.keys.data.shape[1],
            rows,
            call.first,
            call.keys.n,
            call.tokens - call.keys.n,
            call.scale,
            call.causal,
            TYPES[q.dtype],
            TYPES[torch.uint8 if mask is not None and mask.dtype == torch.bool else torch.float32],
        )
        code = function(described, torch.get_num_threads(), library.isa)
        library.check(code, f"attention of {[*q.shape]} over {call.tokens} tokens")
        del kept_keys, kept_values
        return y

    register_kernel(Impl("attention", "native", "cpu", run, refuses, priority=10))
