"""The forms in which llama.cpp stores a tensor otherwise than the model of transformers has it.

Rows of attn_q and attn_k, in ``llama`` and its derivatives: llama.cpp rotates adjacent rows of a head by one angle,
transformers a row of its first half and one of its second. For a head of 8 rows:

    file            0 4 1 5 2 6 3 7
    transformers    0 1 2 3 4 5 6 7

Heads of values in linear attention (``qwen35``), of which several share a head of keys. For two of keys, a and b, and
three of values for each:

    file            a0 b0 a1 b1 a2 b2
    transformers    a0 a1 a2 b0 b1 b2

The one matrix of linear attention in ``qwen3next`` has the queries q, keys k, values v and gates z of a head of keys
before those of the next. A file has all queries, then all keys, then all values, and the gates in a second tensor. For
two, a and b:

    file            qa qb ka kb va vb | za zb
    transformers    qa ka va za qb kb vb zb

Norms of ``gemma``, ``qwen35`` and ``qwen3next`` multiply by the weight in the file, but by 1 + weight in transformers.
Axes of length one are left out of some tensors, and the decay of linear attention is -exp(A_log).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format, Quantized
from bitport.numerics.packing import as_bytes, from_storage, to_storage


class Order(NamedTuple):
    """The order of heads of values along one axis. ``start``: what comes before them, and keeps its place; ``keys``:
    heads of keys; ``each``: heads of values for one of them; ``width``: of a head."""

    start: int
    keys: int
    each: int
    width: int

    @property
    def size(self) -> int:
        """Of the axis."""
        return self.start + self.keys * self.each * self.width

    def places(self) -> Tensor:
        """The place in the file of each place in the model."""
        heads = torch.arange(self.start, self.size).reshape(self.each, self.keys, self.width)
        return torch.cat([torch.arange(self.start), heads.transpose(0, 1).flatten()])


class Mixed(NamedTuple):
    """The order of rows of a matrix that a file has in two tensors. ``heads``: of keys; ``key``: rows for the queries
    of one, and for its keys; ``values``: rows for all its values, and for all its gates."""

    heads: int
    key: int
    values: int

    @property
    def parts(self) -> tuple[int, int]:
        """The rows of each of the two tensors."""
        return self.heads * (2 * self.key + self.values), self.heads * self.values

    @property
    def size(self) -> int:
        return sum(self.parts)

    def places(self) -> Tensor:
        """The place in the file of each place in the model; the second tensor follows the first."""
        rows = [self.heads * each for each in (self.key, self.key, self.values, self.values)]
        return torch.cat([each.reshape(self.heads, -1) for each in torch.arange(self.size).split(rows)], 1).flatten()


class Change(NamedTuple):
    heads: int = 0
    """The number of heads whose rows are rotated in pairs; 0: none."""
    less_one: bool = False
    one: int | None = None
    """The axis of length one that the file leaves out."""
    rows: Order | None = None
    columns: Order | None = None
    decay: bool = False
    """Whether the model has the logarithm of the negated number."""
    wide: bool = False
    """Whether a model of any dtype computes with it in float32."""
    mixed: Mixed | None = None
    latent: tuple[int, int] | None = None
    """How many rows of a head are for keys, and for values (:mod:`bitport.interop.gguf.latent`)."""


NONE = Change()
ONES = {"ffn_gate_inp_shexp": 0, "ssm_conv1d": 1, "shortconv.conv": 1}
"""Tensors without their axis of length one -> that axis."""
PLAIN_NORMS = ("ssm_norm",)
"""Norms that are the same in both, where others are less 1."""
DECAY, WIDE = "ssm_a", ("ssm_a", "ssm_dt", "exp_probs_b")
VALUES = {"attn_gate": False, "ssm_alpha": True, "ssm_beta": True, "ssm_a": True, "ssm_dt": True}
"""Tensors whose rows are heads of values -> whether a head has one row."""
KEYS_AND_VALUES = ("attn_qkv", "ssm_conv1d")
"""Tensors whose rows are queries, keys and then values."""
FROM_VALUES = "ssm_out"
MIXED = ("attn_qkv", "attn_gate")
"""The tensors that have the rows of one matrix in ``qwen3next``."""


def orders(leaf: str, config: Mapping[str, Any]) -> tuple[Order | None, Order | None]:
    """(order of rows, order of columns) of a tensor in a model with linear attention."""
    keys, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    if not keys or keys == values:
        return None, None
    width, each = config["linear_value_head_dim"], values // keys
    if leaf in KEYS_AND_VALUES:
        return Order(2 * keys * config["linear_key_head_dim"], keys, each, width), None
    if leaf in VALUES:
        return Order(0, keys, each, 1 if VALUES[leaf] else width), None
    return None, Order(0, keys, each, width) if leaf == FROM_VALUES else None


def mixed(config: Mapping[str, Any]) -> Mixed:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return Mixed(keys, config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"])


def misfit(shape: Sequence[int], change: Change) -> str:
    """Why a tensor of ``shape`` cannot be changed so; empty if it can."""
    if change.heads and shape[0] % (2 * change.heads):
        return f"has {shape[0]} rows, no pairs of {change.heads} heads"
    if change.columns and len(shape) != 2:
        return f"is {list(shape)}, and must be a matrix"
    for axis, order in ((0, change.rows or change.mixed), (-1, change.columns)):
        if order and shape[axis] != order.size:
            return f"is {list(shape)}, and {order.size} belong where {shape[axis]} is"
    return ""


def rows_of_model(rows: Tensor, change: Change) -> Tensor:
    """``rows`` [N, ..] of a file in the order of the model."""
    if change.heads:
        return rows.unflatten(0, (change.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    order = change.rows or change.mixed
    return rows[order.places()] if order else rows


def rows_of_file(rows: Tensor, change: Change) -> Tensor:
    """The inverse of :func:`rows_of_model`."""
    if change.heads:
        return rows.unflatten(0, (change.heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    order = change.rows or change.mixed
    return rows[order.places().argsort()] if order else rows


def floats_of_model(value: Tensor, change: Change) -> Tensor:
    """Floats of a file, with rows in the order of the model, as the model has them."""
    value = value[:, change.columns.places()] if change.columns else value
    value = value.reshape(-1).unsqueeze(0) if change.one == 0 else value
    value = value.unsqueeze(change.one) if change.one else value
    value = logarithm(-value) if change.decay else value
    return value - 1 if change.less_one else value


def floats_of_file(value: Tensor, change: Change) -> Tensor:
    """The inverse of :func:`floats_of_model`, for floats in the shape that they have in the file; the 1 is added in
    float32."""
    value = value[:, change.columns.places().argsort()] if change.columns else value
    value = -value.double().exp().float() if change.decay else value
    return value.float() + 1 if change.less_one else value


def logarithm(value: Tensor) -> Tensor:
    """The logarithm in float32, or the number of 16 bits next to it if ``value`` is its exponential: that is off by at
    most 2^-23 of itself in float32."""
    exact = value.double().log()
    found = exact
    for half in (torch.float16, torch.bfloat16):
        near = exact.to(half).double()
        found = torch.where((near - exact).abs() <= 2.0**-22, near, found)
    return found.float()


def codes_of_model(parts: Quantized, fmt: Format, order: Order) -> Quantized:
    """A quantized matrix of a file with columns in the order of the model; ArgumentError if a scale is of columns that
    do not stay neighbours."""
    return _columns(parts, fmt, order, order.places())


def codes_of_file(parts: Quantized, fmt: Format, order: Order) -> Quantized:
    """The inverse of :func:`codes_of_model`."""
    return _columns(parts, fmt, order, order.places().argsort())


def _columns(parts: Quantized, fmt: Format, order: Order, index: Tensor) -> Quantized:
    k, block = order.size, fmt.block_shape(1, order.size)[1]
    data = to_storage(from_storage(parts.data, fmt.number, k)[..., index], fmt.number)
    if block >= k:
        return parts._replace(data=data)
    if order.width % block:
        raise ArgumentError(f"a scale is of {block} columns, and heads of {order.width} columns change places")
    blocks = index[::block] // block
    scale = as_bytes(parts.scale)[..., blocks].view(parts.scale.dtype)
    return parts._replace(data=data, scale=scale, zero=None if parts.zero is None else parts.zero[..., blocks])
