"""Export to ExecuTorch, lowered to XNNPACK, preserving the codes and scales of the weights."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from bitport.errors import ExportError
from bitport.export.checks import check_float32, check_installed, check_target
from bitport.export.relink import relinked
from bitport.export.trace import Method


def executorch(
    module: nn.Module, args: tuple[Any, ...], path: str | os.PathLike[str], dynamic_shapes: Any = None
) -> dict[str, Any]:
    """Write ``module(*args)`` as the program ``path`` with the method forward. Returns the operators that XNNPACK
    took, those that it did not take, and the size of the file.

    XNNPACK computes all products with quantized weights, or the export fails: 8-bit inputs with 4-bit groups or 8-bit
    rows. Sizes in ``dynamic_shapes`` need an upper bound. Buffers that the module writes into are state of the program.
    """
    target = check_target(path, ".pte", "a program of ExecuTorch")
    check_float32(module, args)
    check_installed("ExecuTorch's exporter", "executorch", "executorch", "torchao", "flatbuffers")
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    from bitport.export.lookup import Lookup
    from bitport.export.xnnpack_weight import XnnpackWeight, refusal

    program = relinked(Method(module, args, dynamic_shapes), refusal, XnnpackWeight, Lookup)
    with torch.no_grad():
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    graph: fx.GraphModule = lowered.exported_program().graph_module
    taken, left = Counter[str](), _operators(graph)
    for name, part in graph.named_children():
        if name.startswith("lowered_module"):
            original: Any = part.original_module
            taken += _operators(original.graph_module)
    if kept := [name for name in left if "dequantize_per_channel" in name]:
        raise ExportError(f"XNNPACK has not taken every quantized product: {', '.join(kept)} are left")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bitport-") as folder:
        draft = Path(folder, target.name)
        with open(draft, "wb") as file:
            lowered.to_executorch().write_to_file(file)
        os.replace(draft, target)
    return {"files": {target.name: target.stat().st_size}, "taken": dict(taken), "left": dict(left)}


def _operators(graph: fx.GraphModule) -> Counter[str]:
    calls = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return Counter(str(getattr(target, "_name", None) or getattr(target, "__name__", target)) for target in calls)
