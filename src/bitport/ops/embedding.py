"""embedding: look up rows of a quantized table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, Quantized, dequantize_now
from bitport.ops import samples
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample
from bitport.ops.weight import SCHEMA, Weight, check_weight


def _check(ids: Tensor, *rest: object) -> None:
    weight = Weight(*rest[:10])  # type: ignore[arg-type]
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"ids must be int32 or int64, not {ids.dtype}")
    if ids.device != weight.data.device:
        raise ArgumentError(f"ids are on {ids.device}, the table on {weight.data.device}; move both to one device")
    if rest[10] not in FLOATS:
        raise ArgumentError(f"rows are float32, bfloat16 or float16, not {rest[10]}; cast the model to one of them")
    check_weight(*weight)
    if weight.batch:
        raise ArgumentError(f"embedding takes one table, not a batch of {[*weight.batch]}")


def _generic(ids: Tensor, *rest: object) -> Tensor:
    """Dequantize only the requested rows: codes of row i are data[i], its scales scale[i // block_n]."""
    weight, dtype = Weight(*rest[:10]), rest[10]  # type: ignore[arg-type]
    parts = weight.plain()
    flat = ids.reshape(-1)
    blocks = flat // weight.block_n
    picked = Quantized(
        _rows(parts.data, flat),
        _rows(parts.scale, blocks),
        None if parts.zero is None else _rows(parts.zero, blocks),
        parts.scale2,
    )
    row_format = weight._replace(block_n=1).format(picked)
    value = dequantize_now(picked, row_format, flat.shape[0], weight.k, dtype)  # type: ignore[arg-type]
    return value.reshape(*ids.shape, weight.k)


def _rows(part: Tensor, at: Tensor) -> Tensor:
    """index_select, on bytes for 8-bit types because torch cannot index float8."""
    if part.element_size() == 1:
        return part.contiguous().view(torch.uint8).index_select(0, at).view(part.dtype)
    return part.index_select(0, at)


def _fake(ids: Tensor, *rest: object) -> Tensor:
    return torch.empty((*ids.shape, rest[6]), dtype=rest[10], device=ids.device)  # type: ignore[call-overload]


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for large in (False, True):
        for sample in samples.weights(device, dtype, weight_only=True, large=large):
            for name, shape in (("large", (67,)),) if large else SHAPES:
                count = torch.Size(shape).numel()
                ids = (torch.arange(max(1, count), device=device)[:count] * 7 % sample.weight.n).reshape(shape)
                weight = samples.wider(sample.weight) if name == "vector" else sample.weight
                if name == "matrix":
                    ids, weight = ids.int().t(), samples.apart(weight)

                def expected(ids: Tensor = ids, value: Tensor = sample.value) -> Tensor:
                    return value[ids.cpu().long()]

                yield Sample(f"{sample.name}-{name}", (ids, *weight, dtype), expected, samples.rounding_budget(dtype))


SHAPES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("vector", (5,)),
    ("matrix", (2, 3)),
    ("scalar", ()),
    ("empty", (0,)),
)
"""Name and shape of the ids of samples. Those of "matrix" are int32, column-major, of a table whose rows lie apart; the
scales of the table for "vector" may be of another dtype than the result."""


EMBEDDING = Op(
    "embedding",
    f"(Tensor ids, {SCHEMA}, ScalarType out_dtype) -> Tensor",
    check=_check,
    generic=_generic,
    fake=_fake,
    samples=_samples,
    leading=True,
)

declare(EMBEDDING)
