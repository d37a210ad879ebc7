"""Export to ONNX Runtime, preserving the codes and scales of 4- and 8-bit weights."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from bitport.errors import ExportError
from bitport.export import onnx_qdq
from bitport.export.checks import check_float32, check_installed, check_target
from bitport.export.lookup import Lookup
from bitport.export.onnx_weight import OnnxWeight, refusal
from bitport.export.relink import relinked
from bitport.export.trace import Method

INLINE = 1 << 30
"""Maximum size in bytes of weights kept in the model file itself, which protobuf limits to 2 GiB."""


def onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    dynamic_shapes: Any = None,
    *,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    external: bool | None = None,
    standard: bool = False,
) -> dict[str, Any]:
    """Write ``module(*args)`` as the ONNX model ``path``. Returns its operators, and its files with their sizes.

    Quantized weights become operands of MatMulNBits and GatherBlockQuantized of com.microsoft, bit for bit; everything
    is computed in float32. ``dynamic_shapes`` as for :class:`bitport.export.Method`. ``inputs``, ``outputs``: names.
    ``standard``: use ONNX's own DequantizeLinear and ordinary products instead, for other runtimes.
    ``external``: store weights in a file ``path`` + ".data" (default: if they are larger than 1 GiB).
    """
    target = check_target(path, ".onnx", "an ONNX model")
    check_float32(module, args)
    check_installed("torch.onnx", "onnx", "onnxscript", "onnx")
    rules = (onnx_qdq.refusal, onnx_qdq.QdqWeight, Lookup) if standard else (refusal, OnnxWeight, OnnxWeight)
    program = relinked(Method(module, args, dynamic_shapes), *rules)
    with torch.no_grad():
        named = pytree.tree_map(lambda size: getattr(size, "__name__", size), dynamic_shapes)
        model = torch.onnx.export(
            program,
            dynamo=True,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=named,
            opset_version=onnx_qdq.OPSET,
            verbose=False,
        )
    if model is None:
        raise ExportError("torch.onnx.export gave no model")
    onnx_qdq.narrow(model.model)
    for node in model.model.graph:
        node.metadata_props.clear()  # source locations on this machine
    if external is None:
        external = sum(tensor.nbytes for tensor in [*program.state_dict.values(), *program.constants.values()]) > INLINE
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bitport-") as folder:
        model.save(Path(folder, target.name), external_data=external)
        sizes = {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir(), reverse=True)}
        for name in sizes:
            os.replace(Path(folder, name), target.with_name(name))
    operators = Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.model.graph)
    return {"files": sizes, "operators": dict(operators)}
