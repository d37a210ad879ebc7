"""Quantize one weight of a model or file, and measure its error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format, Quantized, quantize
from bitport.ops.by_rows import sqnr_from
from bitport.schemes import Scheme, Target
from bitport.tensor import QTensor, quantize_tensor
from bitport.tensor.parts import has_data


def check_finite(value: Tensor, target: Target) -> None:
    if has_data(value) and value.numel() and not bool(torch.stack(torch.aminmax(value)).isfinite().all()):
        raise ArgumentError(f"{target.name} holds NaN or infinity; a scale cannot be chosen from it")


def quantize_target(
    value: Tensor,
    target: Target,
    scheme: Scheme,
    act_scale: Tensor | None = None,
    by: Callable[[Tensor, Format], Quantized] = quantize,
    pre_scale: Tensor | None = None,
) -> QTensor:
    """Quantize the weight that ``target`` describes to ``scheme``; ``by`` chooses codes and scales. Errors name the
    target. With a ``pre_scale`` of the input, ``value`` is the weight already divided by it."""
    scale = None if act_scale is None else act_scale.to(value.device)
    kind, transposed = target.kind, target.transposed
    try:
        return quantize_tensor(
            value, scheme, kind=kind, transposed=transposed, by=by, act_scale=scale, pre_scale=pre_scale
        )
    except ValueError as error:
        raise ArgumentError(f"{target.name}: {error}") from error


def error_of(value: Tensor, q: QTensor) -> float | None:
    """Signal-to-quantization-noise ratio of a weight in dB; None if there is no data."""
    if not has_data(value, q.qdata):
        return None
    rows = value.transpose(-1, -2) if q.transposed else value
    rows = rows.reshape(*(value.shape[:-2] if q.batched else ()), q.matrix.n, q.matrix.k)
    return float(sqnr_from(rows, q))
