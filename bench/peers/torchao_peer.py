"""torchao in eager mode, with the schemes that it supports on a CPU."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torchao import quantization as ao
from torchao.quantization.granularity import PerGroup

from bench.peers.base import Prepared, undivided

PACKAGES = ("torchao",)
VARIANTS = {"int4": "4-bit", "int8": "8-bit", "int8-dyn": "8-bit x int8", "int4-int8": "4-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if variant.startswith("int4") and (reason := undivided(k, group)):
        return reason
    configs = {
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)),
        "int8": ao.Int8WeightOnlyConfig,
        "int8-dyn": ao.Int8DynamicActivationInt8WeightConfig,
        "int4-int8": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(group)
        ),
    }
    layer = nn.Linear(k, n, bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    ao.quantize_(layer, configs[variant]())
    every = [copy.deepcopy(layer) for _ in range(copies)]
    held = layer.weight.tensor_data_names
    nbytes = sum(getattr(layer.weight, name).nbytes for name in held)
    return Prepared(every, lambda: layer.weight.dequantize().double(), nbytes)
