"""Checkpoints, ours and torch's, of models sharded over several processes: run by tests/ranks.py."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # once, before the processes fork
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bitport
from bitport.checkpoint import ModelState
from bitport.errors import ArgumentError, CheckpointError
from bitport.tensor import QTensor

from .sharded_models import RECIPE, Model, by_fsdp, full, in_tensor_parallel, inputs, quantized, same

WAYS = (in_tensor_parallel, by_fsdp)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def check_saving(mesh: DeviceMesh) -> None:
    """The files are those of the unsharded model, and every process gets the same manifest."""
    expected = bitport.save(quantized(), f"one-{mesh.get_local_rank()}")
    for way in WAYS:
        model = way(quantized(), mesh)
        model(inputs())
        written = bitport.save(model, way.__name__)
        assert [entry.parts for entry in written.tensors.values()] == [e.parts for e in expected.tensors.values()]
        assert same(bitport.load(Model(), way.__name__).state_dict(), quantized().state_dict())


def check_loading(mesh: DeviceMesh) -> None:
    y, state = quantized()(inputs()), quantized().state_dict()
    for model in (in_tensor_parallel(on_meta(), mesh), in_tensor_parallel(quantized(3), mesh)):
        bitport.load(model, "by_fsdp")
        assert same(full(model), state)
        assert isinstance(model.up.weight, DTensor)
        assert model.up.weight.to_local().bits_layout == quantized().up.weight.bits_layout
        assert model.up.bias.requires_grad
        torch.testing.assert_close(model(inputs()), y, rtol=0, atol=1e-5)  # sums of numbers below 10, in another order
    blank = on_meta()
    bitport.quantize_(blank, RECIPE)
    used = by_fsdp(quantized(3), mesh)
    used(inputs())
    for model in (by_fsdp(blank, mesh), used):
        bitport.load(model, "in_tensor_parallel")
        assert torch.equal(model(inputs()), y)
        assert torch.equal(model(inputs()), y)
        assert same(full(model), state)


def check_what_cannot_be_loaded(mesh: DeviceMesh) -> None:
    def refuses(kind: type[Exception], words: str, model: nn.Module, where: str = "by_fsdp", **how: object) -> None:
        before = {name: id(param) for name, param in model.named_parameters()}
        with pytest.raises(kind, match=words):
            bitport.load(model, where, **how)  # type: ignore[arg-type]
        assert {name: id(param) for name, param in model.named_parameters()} == before

    refuses(CheckpointError, "up.weight is int4-g32 .* when it was torch.float32", by_fsdp(on_meta(), mesh))
    coarse = bitport.Recipe((bitport.Rule("up", "int4-g64"), *RECIPE.rules[1:]))
    refuses(CheckpointError, "int4-g32 .* when it was int4-g64", by_fsdp(quantized(0, coarse), mesh))
    wide = parallelize_module(on_meta(), mesh, {"up": RowwiseParallel(), "out": RowwiseParallel()})
    bitport.load(wide, "by_fsdp")
    assert same(full(wide), quantized().state_dict())
    coarser = bitport.Recipe((bitport.Rule("up", "int4-g64"), *RECIPE.rules[1:]))
    if mesh.get_local_rank() == 0:
        bitport.save(quantized(0, coarser), "coarse")
    torch.distributed.barrier()
    refuses(CheckpointError, "up.weight cannot be sharded as the model is: .* multiples of 64", wide, "coarse")
    refuses(ArgumentError, "leave out device=", in_tensor_parallel(on_meta(), mesh), device="cpu")


def check_a_failed_save(mesh: DeviceMesh) -> None:
    """Every process gets the error of the one that writes, and none waits for it."""
    Path("file").write_text("not a directory")
    model = in_tensor_parallel(quantized(), mesh)
    with pytest.raises(ArgumentError, match="file is a file"):
        bitport.save(model, "file")


def check_each_process_reads_its_part(mesh: DeviceMesh) -> None:
    """Measured by the pages of the file that were touched, which Linux may read two megabytes at a time. When data are
    compared with checksums, all pages are read."""
    if not sys.platform.startswith("linux"):
        return
    layer = nn.Linear(4096, 8192, bias=False)
    bitport.quantize_(layer, "int8", measure=False)
    where = f"large-{mesh.get_local_rank()}"
    size = next(iter(bitport.save(layer, where).shards.values()))
    touched: list[int] = []
    loading = importlib.import_module("bitport.checkpoint.load")
    reads = loading.read_shard
    for verify, least, most in ((False, 0.4, 0.7), (True, 0.9, 1.1)):
        with torch.device("meta"):
            model = nn.Linear(4096, 8192, bias=False)
        parallelize_module(model, mesh, ColwiseParallel())

        def watched(*args: object, **kwargs: object) -> torch.Tensor:
            result = reads(*args, **kwargs)  # type: ignore[arg-type]
            touched.append(resident(os.path.abspath(where)))
            return result

        loading.read_shard = watched
        try:
            bitport.load(model, where, verify=verify)
        finally:
            loading.read_shard = reads
        assert least < touched[-1] / size < most, (touched, size)
        assert torch.equal(model.weight.full_tensor(), layer.weight)


def resident(directory: str) -> int:
    """Bytes that this process has touched in mapped files of ``directory``."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = directory in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def check_dcp(mesh: DeviceMesh) -> None:
    """From each way of sharding to every other, and to another model sharded in the same way."""
    y, state = quantized()(inputs()), quantized().state_dict()
    for way in WAYS:
        model = way(quantized(), mesh)
        model(inputs())
        dcp.save({"model": ModelState(model)}, checkpoint_id=f"dcp-{way.__name__}")
        for other in WAYS:
            found = other(quantized(3), mesh)
            found(inputs())
            dcp.load({"model": ModelState(found)}, checkpoint_id=f"dcp-{way.__name__}")
            assert same(full(found), state), (way, other)
            torch.testing.assert_close(found(inputs()), y, rtol=0, atol=1e-5)


def check_dcp_in_the_background(mesh: DeviceMesh) -> None:
    """What changes after the call is not written."""
    for way in WAYS:
        model = way(quantized(), mesh)
        model(inputs())
        writing = dcp.async_save({"model": ModelState(model)}, checkpoint_id=f"dcp-async-{way.__name__}")
        with torch.no_grad():
            model.norm.weight.add_(1)
        writing.result()
        found = quantized(3)
        dcp.load({"model": ModelState(found)}, checkpoint_id=f"dcp-async-{way.__name__}")
        assert same(full(found), quantized().state_dict())


def check_dcp_holds_tensors_only(mesh: DeviceMesh) -> None:
    """Each part under its own name, sharded like the weight, and no bitport object that a reader would have to
    trust."""
    for way in WAYS:
        where = Path(f"dcp-{way.__name__}")
        held = dcp.FileSystemReader(where).read_metadata().state_dict_metadata
        assert all(isinstance(each, TensorStorageMetadata) for each in held.values())
        assert {"model.up.weight.int4-g32.qdata.uint8", "model.out.weight.nvfp4-wo.scale2.float32"} <= held.keys()
        assert len(held["model.up.weight.int4-g32.qdata.uint8"].chunks) == mesh.size()
        assert not any(b"bitport" in path.read_bytes() for path in where.iterdir())


def check_dcp_of_another_scheme(mesh: DeviceMesh) -> None:
    """DCP's planner detects that before anything is read."""
    coarse = bitport.Recipe((bitport.Rule("up", "int4-g64"), *RECIPE.rules[1:]))
    for recipe, missing in ((coarse, "int4-g64.qdata.uint8"), (bitport.Recipe(RECIPE.rules[1:]), "up.weight")):
        model = in_tensor_parallel(quantized(3, recipe), mesh)
        before = {name: tensor.clone() for name, tensor in full(model).items()}
        with pytest.raises(dcp.CheckpointException, match=f"Missing key.*{missing}"):
            dcp.load({"model": ModelState(model)}, checkpoint_id="dcp-by_fsdp")
        assert same(full(model), before)


def check_dcp_of_the_state_dict_itself(mesh: DeviceMesh) -> None:
    """ModelState exists for this. Without it, DCP would write into a copy of a part of a packed tensor, which is
    refused."""
    model = in_tensor_parallel(quantized(), mesh)
    assert isinstance(model.up.weight.to_local(), QTensor)
    dcp.save({"model": model.state_dict()}, checkpoint_id="dcp-raw")
    whole = quantized(3)
    with pytest.raises(dcp.CheckpointException, match=r"copy of a part of a packed tensor.*ModelState\(model\)"):
        dcp.load({"model": whole.state_dict()}, checkpoint_id="dcp-raw")


class Shown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def check_what_the_documentation_shows(mesh: DeviceMesh) -> None:
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    one = Shown()
    bitport.quantize_(one, "int4-g32", measure=False)
    if mesh.get_local_rank() == 0:
        bitport.save(one, "quantized")
    torch.distributed.barrier()
    names = {"build_model": Shown, "Adapted": Adapted, "x": torch.randn(3, 128)}
    for block in blocks:
        exec(compile(block.replace('"cuda"', '"cpu"'), "docs/distributed.md", "exec"), names)
        model = names["model"]
        if "quantized" in block:
            assert same(full(model), one.state_dict())
