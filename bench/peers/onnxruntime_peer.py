"""ONNX Runtime's MatMulNBits: accuracy level 0 computes in float32, 4 rounds the input to int8. Both take float32."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from bench.peers.base import Prepared, int4_groups, int4_value, undivided

onnxruntime.set_global_thread_pool_sizes(torch.get_num_threads(), 1)  # shared, or the pools of sessions would compete

PACKAGES = ("onnxruntime",)
VARIANTS = {"int4 level 0": "4-bit", "int4 level 4": "4-bit x int8"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    if reason := undivided(weight.shape[1], group):
        return reason
    codes, scale = int4_groups(weight, group)
    model = _model(codes, scale, group, level=int(variant[-1]))
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = False
    every = [onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"]) for _ in range(copies)]
    return Prepared(
        [functools.partial(_run, session) for session in every],
        lambda: int4_value(codes, scale),
        codes.numel() // 2 + scale.nbytes,
        accept=lambda x: onnxruntime.OrtValue.ortvalue_from_numpy(x.float().numpy()),
        output=lambda y: torch.from_numpy(y[0].numpy()),
    )


def _run(session: Any, x: Any) -> Any:
    return session.run_with_ort_values(None, {"x": x})


def _model(codes: Tensor, scale: Tensor, group: int, level: int) -> bytes:
    """Two codes per byte, the low half first; the zero point defaults to 8."""
    n, k = codes.shape
    pairs = codes.reshape(n, k // group, group // 2, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).numpy()
    node = helper.make_node(
        "MatMulNBits",
        ["x", "packed", "scale"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=4,
        block_size=group,
        accuracy_level=level,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [
            numpy_helper.from_array(packed, "packed"),
            numpy_helper.from_array(np.ascontiguousarray(scale.numpy().reshape(-1)), "scale"),
        ],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
