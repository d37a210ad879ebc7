"""Register the kernels for bitport's ops on a device type, each with a check of what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitport.backends import measured
from bitport.backends.aten import LEAST_ROWS, count
from bitport.backends.aten.dense_mm import product
from bitport.backends.triton import AFTER_PYTORCHS, attention, configs, inputs, linear, operand, quantize, rows, scaled
from bitport.backends.triton.rounding import SEPARATE
from bitport.layouts.tile_packed import TilePacked
from bitport.ops import Impl, Weight, register_kernel
from bitport.ops.attention import AttentionArgs

NO_ROWS = "x has no rows"
NO_EXPERTS = "there are no experts"


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` current: Triton launches on the current device."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def too_many(kernel: str, m: int, weight: Weight, device: torch.device) -> str | None:
    if not m:
        return NO_ROWS
    most = configs.of(device).most_rows(kernel, weight)
    return None if most is None or m <= most else f"it is chosen for up to {most} rows of {measured.kind(weight)} here"


def refuses_linear(kernel: str) -> Callable[..., str | None]:
    def refuses(x: Tensor, *rest: Any) -> str | None:
        weight = Weight(*rest[:10])
        return operand.refuses(weight) or too_many(kernel, count(x), weight, x.device)

    return refuses


def refuses_dyn(kernel: str) -> Callable[..., str | None]:
    def refuses(x: Tensor, *rest: Any) -> str | None:
        weight, act = Weight(*rest[:10]), rest[10]
        if reason := operand.refuses(weight):
            return reason
        if kernel == "gemv" and act in SEPARATE:
            return f"the scales of {act} differ along a row"
        if kernel == "gemv":
            return too_many(kernel, count(x), weight, x.device)
        return None if x.numel() else NO_ROWS

    return refuses


def refuses_scaled(x: Tensor, *rest: Any) -> str | None:
    return scaled.refuses(x, Weight(*rest[:10]), rest[10], configs.of(x.device)) or (None if x.numel() else NO_ROWS)


def refuses_grouped_scaled(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    return refuses_scaled(x, *rest) or (None if ends.numel() else NO_EXPERTS)


def refuses_grouped(x: Tensor, ends: Tensor, *rest: Any) -> str | None:
    wrong = operand.refuses(Weight(*rest[:10])) or (None if x.numel() else NO_ROWS)
    return wrong or (None if ends.numel() else NO_EXPERTS)


def refuses_embedding(ids: Tensor, *rest: Any) -> str | None:
    return operand.refuses(Weight(*rest[:10]))


def refuses_dequantize(*args: Any) -> str | None:
    return operand.refuses(Weight(*args[:10]))


def refuses_attention(*args: Any) -> str | None:
    return attention.refuses(AttentionArgs.of(*args))


def refuses_quantize_input(x: Tensor, *rest: Any) -> str | None:
    return None if x.numel() else NO_ROWS


def run_linear(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *rest: Any) -> Tensor:
        weight, bias = Weight(*rest[:10]), operand.whole(rest[10])
        with on(x.device):
            y = kernel(linear.prepared(x, "", None), weight, bias, x.dtype, configs.of(x.device))
        return y.reshape(*x.shape[:-1], weight.n)

    return run


def float8(kernel: Callable[..., Tensor], weight: Weight, dtype: torch.dtype, config: configs.Config) -> bool:
    """Whether to multiply float8 natively: matrix units keep 13 bits of its sums, which is enough for bfloat16."""
    native = kernel is linear.tiles and dtype == torch.bfloat16 and weight.dtype == "float8_e4m3"
    return native and config.float8


def run_dyn(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *rest: Any) -> Tensor:
        weight, (act, act_scale, bias), config = Weight(*rest[:10]), rest[10:], configs.of(x.device)
        with on(x.device):
            held = linear.prepared(x, act, act_scale, float8(kernel, weight, x.dtype, config))
            y = kernel(held, weight, operand.whole(bias), x.dtype, config)
        return y.reshape(*x.shape[:-1], weight.n)

    return run


def run_scaled(x: Tensor, *rest: Any) -> Tensor:
    weight, (act, act_scale, bias) = Weight(*rest[:10]), rest[10:]
    with on(x.device):
        y = scaled.product(x, act, act_scale, weight, operand.whole(bias), configs.of(x.device))
    return y.reshape(*x.shape[:-1], weight.n)


def run_grouped_scaled(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    with on(x.device):
        return scaled.product(x, rest[10], None, Weight(*rest[:10]), None, configs.of(x.device), ends.contiguous())


def dense_mm(x: Tensor, *rest: Any) -> Tensor:
    """Dequantize the weight to x's dtype and call PyTorch's own product, which uses matrix units best."""
    with on(x.device):
        dense = rows.dense(Weight(*rest[:10]), x.dtype)
    return product(x, dense, rest[10])


def grouped(x: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    """Run grouped_linear, or with an activation format as last argument dyn_grouped_linear."""
    weight, act, config = Weight(*rest[:10]), rest[10] if len(rest) > 10 else "", configs.of(x.device)
    with on(x.device):
        held = linear.prepared(x, act, None, float8(linear.tiles, weight, x.dtype, config))
        return linear.tiles(held, weight, None, x.dtype, config, ends.contiguous())


def embedding(ids: Tensor, *rest: Any) -> Tensor:
    with on(ids.device):
        return rows.embedding(ids, Weight(*rest[:10]), rest[10])


def dequantize(*args: Any) -> Tensor:
    with on(args[0].device):
        return rows.dense(Weight(*args[:10]), args[10])


def attend(*args: Any) -> Tensor:
    with on(args[0].device):
        return attention.attention(AttentionArgs.of(*args), configs.of(args[0].device))


def quantize_input(x: Tensor, act: str, act_scale: Tensor | None) -> list[Tensor]:
    with on(x.device):
        return inputs.quantize_input(x, act, act_scale)


def round_matrices(value: Tensor, text: str) -> list[Tensor]:
    with on(value.device):
        return quantize.quantize(value, text)


def round_into(value: Tensor, *rest: Any) -> bool:
    with on(value.device):
        return quantize.into(value, *rest)


KERNELS: tuple[tuple[str, str, Callable[..., Any], Callable[..., str | None]], ...] = (
    ("linear", "triton_gemv", run_linear(linear.gemv), refuses_linear("gemv")),
    ("linear", "triton_tiles", run_linear(linear.tiles), refuses_linear("tiles")),
    ("linear", "triton_dense", dense_mm, refuses_linear("dense")),
    ("dyn_linear", "triton_gemv", run_dyn(linear.gemv), refuses_dyn("gemv")),
    ("dyn_linear", "triton_scaled", run_scaled, refuses_scaled),
    ("dyn_linear", "triton_tiles", run_dyn(linear.tiles), refuses_dyn("tiles")),
    ("grouped_linear", "triton_tiles", grouped, refuses_grouped),
    ("dyn_grouped_linear", "triton_scaled", run_grouped_scaled, refuses_grouped_scaled),
    ("dyn_grouped_linear", "triton_tiles", grouped, refuses_grouped),
    ("embedding", "triton_rows", embedding, refuses_embedding),
    ("dequantize", "triton_rows", dequantize, refuses_dequantize),
    ("attention", "triton_tokens", attend, refuses_attention),
    ("quantize_input", "triton_rounding", quantize_input, refuses_quantize_input),
    ("quantize", "triton_blocks", round_matrices, quantize.refuses),
)
"""(op, name, run, supports), in the order in which they are asked."""


def register(device: str, fault: Callable[[], str | None]) -> None:
    """Register all kernels for ``device``, and stop preferring TilePacked there: these kernels read int4 in row-major
    layouts for any number of rows and for embedding lookups. Tile-packed weights, which only PyTorch's product reads,
    are then made only on request. ``fault`` says why Triton compiles nothing for the device, or None; it initializes
    the device, so the first call for a kernel asks it."""
    for op, name, run, supports in KERNELS:
        into = round_into if op == "quantize" else None
        register_kernel(Impl(op, name, device, run, _where_it_compiles(fault, supports), AFTER_PYTORCHS, into))
    TilePacked.devices = tuple(each for each in TilePacked.devices if each != device)
    LEAST_ROWS[device] = lambda kernel, where: 1 if fault() else configs.of(where).least_rows(kernel)


def _where_it_compiles(
    fault: Callable[[], str | None], supports: Callable[..., str | None]
) -> Callable[..., str | None]:
    return lambda *args: fault() or supports(*args)
