"""torchao with the schemes that it has GPU kernels for, compiled as its documentation recommends."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao import quantization as ao
from torchao.quantization.granularity import PerRow

from bench.peers.base import Prepared, undivided

PACKAGES = ("torchao",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit", "int8-dyn": "8-bit x int8", "fp8-row": "8-bit x fp8"}
MODE = "max-autotune-no-cudagraphs"
torch._dynamo.config.recompile_limit = 4096
torch._dynamo.config.accumulated_recompile_limit = 1 << 20


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if variant == "int4" and (reason := undivided(k, group)):
        return reason
    unit = {"int4": 1, "int8": 1, "int8-dyn": 8, "fp8-row": 16}[variant]
    if n % unit or k % unit:
        return f"{n} outputs or {k} columns are not a multiple of {unit}"
    layer = nn.Linear(k, n, bias=False, dtype=weight.dtype, device=weight.device)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    ao.quantize_(layer, _config(variant, group))
    every = [copy.deepcopy(layer.weight) for _ in range(copies)]
    nbytes = sum(getattr(layer.weight, name).nbytes for name in layer.weight.tensor_data_names)
    run = _linear if variant == "int4" else torch.compile(_linear, fullgraph=True, dynamic=False, mode=MODE)
    return Prepared([functools.partial(run, each) for each in every], lambda: _value(variant, layer, k), nbytes)


def _linear(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def _config(variant: str, group: int) -> Any:
    if variant == "int4":
        return ao.Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d")
    if variant == "fp8-row":
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    return {"int8": ao.Int8WeightOnlyConfig, "int8-dyn": ao.Int8DynamicActivationInt8WeightConfig}[variant]()


def _value(variant: str, layer: nn.Module, k: int) -> Tensor:
    """Tiles cannot be read back, so a product with the identity gives the weight as the kernel sees it, in bfloat16."""
    if variant != "int4":
        dense: Tensor = layer.weight.dequantize(torch.float32).double()  # type: ignore[operator, union-attr]
        return dense
    identity = torch.eye(k, dtype=torch.bfloat16, device=layer.weight.device)  # type: ignore[arg-type]
    weight: Tensor = layer(identity).t().double()
    return weight
