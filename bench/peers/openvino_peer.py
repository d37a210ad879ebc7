"""OpenVINO's CPU plugin: a compressed constant that is decompressed within the product, computed in bf16; with dynamic
quantization the input is rounded to int8 in the same groups as the weight (which needs the precision hint f32)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as ops
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, int8_rows, int8_value, undivided

PACKAGES = ("openvino",)
VARIANTS = {
    "int4": "4-bit",
    "int4 dynamic": "4-bit x int8",
    "int8": "8-bit",
    "int8 dynamic": "8-bit x int8",
}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    n, k = weight.shape
    if variant.startswith("int4"):
        if reason := undivided(k, group):
            return reason
        codes, scale = int4_groups(weight, group)
        scale = scale.half().float()
        constant, value = _int4(codes, scale, group), functools.partial(int4_value, codes, scale)
        nbytes = n * k // 2 + 2 * scale.numel()
    else:
        codes, scale = int8_rows(weight)
        scale = scale.half().float()
        constant = ops.multiply(_as_f16(ops.constant(codes.numpy())), _f16(scale[:, None]))
        value = functools.partial(int8_value, codes, scale)
        nbytes = n * k + 2 * n
    x = ops.parameter([-1, k], openvino.Type.f32)
    product = ops.matmul(x, ops.convert(constant, "f32"), transpose_a=False, transpose_b=True)
    dynamic = variant.endswith("dynamic")
    options = {
        "INFERENCE_PRECISION_HINT": "f32" if dynamic else "bf16",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(group if dynamic else 0),
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = openvino.Core()
    model = openvino.Model([product], [x], "product")
    every = [core.compile_model(model, "CPU", options).create_infer_request() for _ in range(copies)]
    return Prepared(
        [functools.partial(_run, request) for request in every],
        value,
        nbytes,
        accept=lambda x: openvino.Tensor(x.float().numpy(), shared_memory=True),
        output=lambda y: torch.from_numpy(y.data.copy()),
    )


def _run(request: Any, x: Any) -> Any:
    request.set_input_tensor(x)
    request.infer()
    return request.get_output_tensor()


def _int4(codes: Tensor, scale: Tensor, group: int) -> Any:
    """(codes - 8) * scale by groups; two codes per byte, the low half first."""
    n, k = codes.shape
    groups = k // group
    pairs = codes.reshape(-1, 2)
    data = _u4((pairs[:, 0] | pairs[:, 1] << 4).numpy(), [n, groups, group])
    zero = _u4(np.array([8], np.uint8), [1, 1, 1])
    value = ops.multiply(ops.subtract(_as_f16(data), _as_f16(zero)), _f16(scale[..., None]))
    return ops.reshape(value, ops.constant(np.array([n, k], np.int64)), special_zero=False)


def _u4(packed: Any, shape: list[int]) -> Any:
    """Copy the data: a constant made from a tensor over an array would read its memory later."""
    tensor = openvino.Tensor(openvino.Type.u4, shape)
    tensor.data[:] = packed.reshape(tensor.data.shape)
    return ops.constant(tensor)


def _as_f16(node: Any) -> Any:
    return ops.convert(node, "f16")


def _f16(scale: Tensor) -> Any:
    return ops.constant(scale.half().numpy())
