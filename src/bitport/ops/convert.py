"""quantize, dequantize, repack and quantize_input: conversions between float tensors and parts."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError
from bitport.layouts import Matrix
from bitport.layouts.base import refusal, single
from bitport.numerics import (
    ACTIVATIONS,
    FLOATS,
    STATIC,
    Format,
    Quantized,
    is_computed,
    packed_size,
    quantize,
    quantize_rows,
    static_scale,
)
from bitport.ops import samples, select
from bitport.ops.linear import check_activation
from bitport.ops.select import declare
from bitport.ops.table import Op, Sample, bits
from bitport.ops.weight import SCHEMA, Weight, check_weight


def to_list(parts: Quantized) -> list[Tensor]:
    """Parts as an op returns them: a missing part becomes an empty tensor."""
    return [parts.data.new_empty(0) if part is None else part for part in parts]


def from_list(tensors: list[Tensor]) -> Quantized:
    data, scale, *rest = tensors
    return Quantized(data, scale, *(None if part.numel() == 0 and part.dim() == 1 else part for part in rest))


def _same(value: Tensor) -> Tensor:
    return value


def _no_views(parts: Quantized, *given: Tensor | None) -> list[Tensor]:
    """Parts as an op must return them: none may alias an argument, so those that do are cloned."""
    taken = {_storage(part) for part in given if part is not None}
    return [part.clone() if _storage(part) in taken else part for part in to_list(parts)]


def _storage(part: Tensor) -> int:
    return part.untyped_storage()._cdata


def _bits(parts: Quantized) -> Tensor:
    return bits(to_list(parts))


# -- dequantize ------------------------------------------------------------------------------------------------------


def _check_dequantize(*args: Any) -> None:
    check_weight(*args[:10])
    if not args[10].is_floating_point:
        raise ArgumentError(f"dequantize gives a float tensor, not {args[10]}")


def _dequantize(*args: Any) -> Tensor:
    return Weight(*args[:10]).dense(args[10])


def _fake_dequantize(*args: Any) -> Tensor:
    weight = Weight(*args[:10])
    return torch.empty((*weight.batch, weight.n, weight.k), dtype=args[10], device=weight.data.device)


def _samples_dequantize(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for experts, large in ((0, False), (2, False), (0, True)):
        for sample in samples.weights(device, dtype, experts=experts, large=large):
            name = f"{sample.name}-{'large' if large else f'e{experts}'}"
            weight = samples.apart(samples.wider(sample.weight)) if experts else sample.weight
            budget = samples.rounding_budget(dtype)
            yield Sample(name, (*weight, dtype), partial(_same, sample.value), budget)


# -- quantize --------------------------------------------------------------------------------------------------------


@functools.cache
def parse_format(text: str) -> Format:
    """The inverse of :func:`format_json`."""
    fields = json.loads(text)
    fields["block"] = tuple(fields["block"])
    return Format(**fields)


@functools.cache
def format_json(fmt: Format) -> str:
    """A format as the string argument of the op ``quantize``."""
    return json.dumps({**fmt.__dict__, "block": list(fmt.block)}, sort_keys=True)


def _check_quantize(value: Tensor, fmt: str) -> None:
    if value.dtype not in FLOATS or value.dim() < 2:
        raise ArgumentError(
            f"quantize takes a float matrix [..., N, K] of {', '.join(map(str, FLOATS))}, not {value.dtype} "
            f"{[*value.shape]}: cast it before; a model, also one in training, by model.float()"
        )
    try:
        parse_format(fmt)
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"not a format: {fmt!r} ({error})") from error


def _quantize(value: Tensor, fmt: str) -> list[Tensor]:
    return to_list(quantize(value, parse_format(fmt)))


def quantize_into(
    value: Tensor, fmt: Format, first: int, data: Tensor, scale: Tensor, zero: Tensor | None = None
) -> None:
    """Round ``value`` [matrices, N, K] to nearest and write its parts to those of as many larger matrices, from row
    ``first`` on; N and ``first`` are borders of blocks. What grows by a token at a time has a place for it already, and
    copying it there would take longer than rounding it."""
    text, parts = format_json(fmt), (data, scale, zero)
    if is_computed(value, *parts) and select.is_chooser("quantize", value.device.type):
        impl, _ = select.first_that_takes("quantize", value.device.type, value, text)
        if impl is not None and impl.into is not None and impl.into(value, text, first, *parts):
            return
    rows = (first, *(first // fmt.block[0],) * 2)
    for whole, part, at in zip(parts, from_list(select.call("quantize", value, text)), rows, strict=False):
        if whole is not None and part is not None:
            whole.narrow(1, at, part.shape[1]).copy_(part)


def _fake_quantize(value: Tensor, fmt: str) -> list[Tensor]:
    """Shapes alone: the generic kernel takes milliseconds on them, which add up over the weights of a large model."""
    form, (*rows, k) = parse_format(fmt), value.shape
    data = value.new_empty(*rows, packed_size(k, form.number.bits), dtype=form.number.storage)
    return to_list(with_room(data, value, form))


def with_room(data: Tensor, value: Tensor, fmt: Format) -> Quantized:
    """Return the codes ``data`` of ``value`` [..., N, K] with the other parts of ``fmt``, uninitialized."""
    *batch, n, k = value.shape
    grid, zero = (*batch, *fmt.scale_shape(n, k)), fmt.zero_dtype(value.dtype)
    return Quantized(
        data,
        value.new_empty(grid, dtype=fmt.scale_dtype(value.dtype)),
        None if zero is None else value.new_empty(grid, dtype=zero),
        value.new_empty(*batch, 1, 1, dtype=torch.float32) if fmt.global_scale else None,
    )


def _samples_quantize(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    one, two = samples.weights(device, dtype), samples.weights(device, dtype, experts=2)
    for at, pair in enumerate(zip(one, two, strict=True)):
        sample = pair[at % 2]
        value = samples.values(device, dtype, *sample.weight.batch, sample.weight.n, sample.weight.k)
        args = (value, format_json(sample.scheme.weight))
        yield Sample(sample.name, args, partial(_bits, sample.weight.parts), math.inf)
        for name, value in samples.edges(device, dtype):
            parts = quantize(value, sample.scheme.weight)
            yield Sample(f"{sample.name}-{name}", (value, args[1]), partial(_bits, parts), math.inf)


# -- quantize_input --------------------------------------------------------------------------------------------------


def _check_quantize_input(x: Tensor, act: str, act_scale: Tensor | None) -> None:
    if x.dtype not in FLOATS or x.dim() < 1:
        raise ArgumentError(f"x must be float32, bfloat16 or float16 [..., K], not {x.dtype} {[*x.shape]}")
    check_activation(x, act, act_scale)


def _quantize_input(x: Tensor, act: str, act_scale: Tensor | None) -> list[Tensor]:
    """Quantize x, seen as [M, K], to ACTIVATIONS[act]; the parts are in the plain layout."""
    return _no_views(quantize_rows(x, act, act_scale), act_scale)


def _samples_quantize_input(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for act in ACTIVATIONS:
        x = samples.rows(device, dtype, 6, 96)
        yield Sample(act, (x, act, None), partial(_bits, quantize_rows(x, act)), math.inf)
        x = x.reshape(2, 3, 96)
        scale = static_scale(0.75 * x.float().abs().amax(), act) if act in STATIC else None
        yield Sample(f"{act}-batch", (x, act, scale), partial(_bits, quantize_rows(x, act, scale)), math.inf)
        one, none = samples.rows(device, dtype, 1, 96)[0], samples.rows(device, dtype, 0, 96)
        for name, x in (*samples.edges(device, dtype), ("vector", one), ("empty", none)):
            yield Sample(f"{act}-{name}", (x, act, None), partial(_bits, quantize_rows(x, act)), math.inf)


# -- repack ----------------------------------------------------------------------------------------------------------


def _check_repack(*args: Any) -> None:
    check_weight(*args[:10])
    layouts.layout(args[10])


def _repack(*args: Any) -> list[Tensor]:
    weight = Weight(*args[:10])
    return _no_views(layouts.repack(weight.matrix, weight.parts, weight.layout, args[10]), *weight.parts)


def _samples_repack(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for experts, kind in ((0, ""), (0, "large-"), (2, "e2-")):
        for sample in samples.weights(device, dtype, experts=experts, large=kind == "large-"):
            matrix, parts = sample.weight.matrix, sample.weight.parts
            for name, target in layouts.LAYOUTS.items():
                if not (experts and single(target)) and refusal(target, matrix, parts) is None:
                    label = f"{sample.name}-{kind}{name}"
                    expected = partial(_packed, target, matrix, parts)
                    yield Sample(label, (*sample.weight, name), expected, math.inf)


def _packed(target: layouts.Layout, matrix: Matrix, parts: Quantized) -> Tensor:
    return _bits(target.pack(matrix, parts))


declare(
    Op(
        "dequantize",
        f"({SCHEMA}, ScalarType out_dtype) -> Tensor",
        check=_check_dequantize,
        generic=_dequantize,
        fake=_fake_dequantize,
        samples=_samples_dequantize,
    )
)
declare(
    Op(
        "quantize",
        "(Tensor value, str format) -> Tensor[]",
        check=_check_quantize,
        generic=_quantize,
        fake=_fake_quantize,
        samples=_samples_quantize,
    )
)
declare(
    Op(
        "quantize_input",
        "(Tensor x, str act, Tensor? act_scale) -> Tensor[]",
        check=_check_quantize_input,
        generic=_quantize_input,
        fake=_quantize_input,
        samples=_samples_quantize_input,
    )
)
declare(
    Op(
        "repack",
        f"({SCHEMA}, str target) -> Tensor[]",
        check=_check_repack,
        generic=_repack,
        fake=_repack,
        samples=_samples_repack,
    )
)
