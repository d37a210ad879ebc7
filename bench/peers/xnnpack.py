"""XNNPACK through ExecuTorch: 4- or 8-bit weights, inputs rounded to int8 per row, float32 in and out.

It uses as many threads as there are cores. One program is exported and loaded several times; each load packs its own
copy of the weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup

from bench.peers.base import Prepared, undivided

PACKAGES = ("executorch", "torchao")
VARIANTS = {"int4": "4-bit x int8", "int8": "8-bit x int8"}
LARGEST = 4096
"""Maximum number of rows of the exported program."""


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if variant == "int4" and (reason := undivided(k, group)):
        return reason
    layer = nn.Linear(k, n, bias=False)
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    dtype, granularity = (torch.int4, PerGroup(group)) if variant == "int4" else (torch.int8, PerAxis(0))
    quantize_(layer, Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity))
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.export.Dim("rows", min=1, max=LARGEST)
        program = torch.export.export(layer, (torch.randn(2, k),), dynamic_shapes=({0: rows},), strict=True)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    graph = str(lowered.exported_program().graph)
    if "executorch_call_delegate" not in graph:
        return "XNNPACK did not take the exported product"
    buffer = lowered.to_executorch().buffer
    every = [_load_for_executorch_from_buffer(buffer) for _ in range(copies)]
    nbytes = n * k // (2 if variant == "int4" else 1) + 2 * n * (k // group if variant == "int4" else 1)
    return Prepared(
        [functools.partial(_run, module, buffer) for module in every],
        lambda: layer.weight.dequantize().double(),
        nbytes,
        accept=lambda x: x.float().contiguous(),
        output=lambda y: y[0],
    )


def _run(module: Any, buffer: bytes, x: Tensor) -> Any:
    """Keeps ``buffer`` alive, which the module reads while running but does not own."""
    return module.forward((x,))
