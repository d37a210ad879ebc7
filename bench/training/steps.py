"""Milliseconds of forward and backward of one MLP in bfloat16, in turns: unmodified, in training for a scheme, in low
precision, and by torchao if installed.

A round runs every candidate once; the result is the median over rounds of its time relative to bfloat16's in the same
round. There is no optimizer step, which costs the same for all.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitport.train import prepare_

BASE = "bf16"
HIDDEN, WIDE = 1024, 4096
PREPARED: dict[str, tuple[str, str | None]] = {
    "int4-g32": ("int4-g32", None),
    "int4-int8": ("int4-int8", None),
    "int8-dyn": ("int8-dyn", None),
    "fp8-row": ("fp8-row", None),
    "mxfp4": ("mxfp4", None),
    "int8-dyn, gradients int8": ("int8-dyn", "int8"),
    "int8-dyn, gradients int8-input": ("int8-dyn", "int8-input"),
    "fp8-row, gradients fp8-row": ("fp8-row", "fp8-row"),
    "mxfp8, gradients mxfp8": ("mxfp8", "mxfp8"),
}

Row = dict[str, Any]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(HIDDEN, WIDE, bias=False), nn.SiLU(), nn.Linear(WIDE, HIDDEN, bias=False))
    return layers.to(torch.bfloat16)


def torchao_models() -> dict[str, nn.Module]:
    """torchao's closest equivalents of int4-g32, int4-int8 and fp8-row with gradients; empty if it is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.quantization import quantize_
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    except ImportError:
        return {}
    weight = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    tokens = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    models = {name: mlp() for name in ("torchao int4-g32", "torchao int4-int8", "torchao float8 rowwise")}
    quantize_(models["torchao int4-g32"], QATConfig(weight_config=weight, step="prepare"))
    quantize_(models["torchao int4-int8"], QATConfig(activation_config=tokens, weight_config=weight, step="prepare"))
    config = Float8LinearConfig.from_recipe_name("rowwise")
    object.__setattr__(config, "emulate", True)  # CPUs have no float8 products
    convert_to_float8_training(models["torchao float8 rowwise"], config=config)
    return models


def candidates() -> dict[str, nn.Module]:
    models = {BASE: mlp()}
    for name, (scheme, gradients) in PREPARED.items():
        models[name] = mlp()
        prepare_(models[name], scheme, gradients=gradients)
    return {**models, **torchao_models()}


def step(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    y.backward(torch.ones_like(y))
    for param in model.parameters():
        param.grad = None


def measure(models: dict[str, nn.Module], rows: int, rounds: int) -> list[Row]:
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            step(model, x)
            if turn:  # the first round warms up
                taken[name].append(1e3 * (time.perf_counter() - start))
    return [
        {
            "what": "step",
            "rows": rows,
            "candidate": name,
            "ms": round(statistics.median(times), 3),
            "x bf16": round(statistics.median(a / b for a, b in zip(times, taken[BASE], strict=True)), 3),
        }
        for name, times in taken.items()
    ]


def run(rounds: int, say: Callable[[str], None]) -> list[Row]:
    models = candidates()
    found = []
    for rows in (256, 2048):
        for row in measure(copy.copy(models), rows, rounds):
            found.append(row)
            say(f"{rows:5} rows  {row['candidate']:32} {row['ms']:9.2f} ms  {row['x bf16']:.2f}x bf16")
    return found
