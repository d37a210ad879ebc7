"""Load a DCP checkpoint of two processes in a different number of them: run by tests/ranks.py after on_sharded."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

from bitport.checkpoint import ModelState

from .sharded_models import full, in_tensor_parallel, inputs, quantized, same


def check_resharding(mesh: DeviceMesh) -> None:
    y, state = quantized()(inputs()), quantized().state_dict()
    for name in ("dcp-in_tensor_parallel", "dcp-by_fsdp"):
        for model in (in_tensor_parallel(quantized(3), mesh), quantized(3)):
            dcp.load({"model": ModelState(model)}, checkpoint_id=name)
            assert same(full(model), state)
            torch.testing.assert_close(model(inputs()), y, rtol=0, atol=1e-5)
