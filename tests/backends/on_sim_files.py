"""Quantization from files on an out-of-tree device: what is read to it and computed there, and that the files are those
of the CPU. Run by test_devices.py, in a separate process.

The device computes by PyTorch's ops for the CPU, so where both run the same ops the results are equal bit for bit:
``alike`` replaces the two that differ."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport import plugins
from bitport.algorithms import GPTQ
from bitport.calibrate.processes import Processes
from bitport.checkpoint import quantize_files, read_manifest
from bitport.checkpoint.quantize import QuantizeRun
from bitport.cli.main import main
from bitport.cli.streamed import device_of
from bitport.errors import ArgumentError, DeviceError
from bitport.integrations.huggingface import load_model
from bitport.ops import use_kernel
from bitport.stream import Stream
from tests.integrations.models import TEXT, make_directory
from tests.scripts import printed
from tests.stream.models import WIDTH, Block, Model, Tied, batches, built, empty, hashes, write
from tests.stream.test_resume import end_early
from tests.turns import slow

SIM = torch.device("sim:0")

plugins.load()
import bitport_simdev as sim  # noqa: E402


@pytest.fixture(autouse=True)
def counters() -> None:
    sim.reset()


@pytest.fixture
def objects() -> Iterator[None]:
    """What there was before the test is left out of ``gc.get_objects``: all that torch and transformers consist of."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def normalized(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """PyTorch computes it in one op on the CPU, and in several where a device has no kernel for that."""
    x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Norms by the same ops, and products with quantized weights by the generic kernels on both devices."""
    monkeypatch.setattr(nn.LayerNorm, "forward", normalized)
    with use_kernel("linear=generic,dyn_linear=generic"):
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path)


def stream(source: Path, target: Path, recipe: Any, algorithm: Any, device: Any, **options: Any) -> Stream:
    make = options.pop("make", Model)
    given = {"batches": batches(), "algorithm": algorithm, "device": device, **options}
    return Stream(empty(make), source, target, recipe, **given)


FROM_FILES = [
    *((scheme, "rtn") for scheme in ("int4-g32", "int8", "fp8-row", "nf4", "mxfp8", "nvfp4")),
    *((scheme, "hqq") for scheme in ("int4-g32", "int3", "nf4")),
    ("int4", "clip"),
]


@pytest.mark.parametrize(("scheme", "algorithm"), FROM_FILES)
def test_without_data(source: Path, tmp_path: Path, scheme: str, algorithm: str) -> None:
    recipe = {"embed": "int8", "*": scheme}
    here = quantize_files(source, tmp_path / "here", recipe, algorithm=algorithm)
    assert not sim.fallbacks()
    there = quantize_files(source, tmp_path / "there", recipe, algorithm=algorithm, device=SIM)
    assert hashes(tmp_path / "there") == hashes(tmp_path / "here")
    assert (there.bytes_before, there.bytes_after) == (here.bytes_before, here.bytes_after)
    assert sim.fallbacks()


def test_one_weight_at_a_time(objects: None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights that are quantized are moved, and none remains."""
    moved: list[tuple[int, ...]] = []
    to = Tensor.to

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args[:1] == (SIM,) and tensor.device.type == "cpu":
            gc.collect()
            assert not [held for held in gc.get_objects() if _is_there(held)]
            moved.append(tuple(tensor.shape))
        return to(tensor, *args, **kwargs)

    run = QuantizeRun(source, tmp_path / "out", {"*.up": "int4-g32", "head": "int8"}, device=SIM, measure=False)
    monkeypatch.setattr(Tensor, "to", noted)
    run.run()
    assert sorted(moved) == [(48, WIDTH), *[(96, WIDTH)] * 3]


RUNS = [
    ("int3-g32", "awq+gptq"),
    ("int3-g32", "signround"),
    ("int8-static", "rtn"),
    *slow(("int4-g32", "gptq"), ("int3-g32", "awq"), ("nf4", "hqq"), ("int8-dyn", "smooth"), ("fp8-static", "gptq")),
]


@pytest.mark.parametrize(("scheme", "algorithm"), RUNS)
def test_block_by_block(alike: None, source: Path, tmp_path: Path, scheme: str, algorithm: str) -> None:
    recipe = {"embed": "int8", "*": scheme}
    for device in ("cpu", SIM):
        stream(source, tmp_path / str(device), recipe, algorithm, device).run()
        assert bool(sim.fallbacks()) == (device == SIM)
    assert hashes(tmp_path / str(SIM)) == hashes(tmp_path / "cpu")


@pytest.mark.parametrize(("scheme", "algorithm"), [("int3-g32", "awq+gptq"), ("int8-static", "rtn")])
def test_activations_on_disk(alike: None, source: Path, tmp_path: Path, scheme: str, algorithm: str) -> None:
    for activations in ("memory", "disk"):
        sim.reset()
        stream(source, tmp_path / activations, scheme, algorithm, SIM, activations=activations).run()
        assert sim.fallbacks()
    assert hashes(tmp_path / "disk") == hashes(tmp_path / "memory")


@pytest.mark.parametrize("make", [Model, Tied])
def test_as_in_memory(tmp_path: Path, make: type[Model]) -> None:
    """With int4, which the device multiplies by its own kernel: the files are those of quantize_ there."""
    model = built(make).to(SIM)
    if make is Tied:  # PyTorch unties parameters that move to a device from outside
        model.head.weight, model.layers[2].up.weight = model.embed.weight, model.layers[0].up.weight
    bp.quantize_(model, "int4-g32", algorithm="gptq", calibrate=[batch.to(SIM) for batch in batches()])
    assert sim.kernel_calls() > 0
    stream(write(tmp_path, make), tmp_path / "out", "int4-g32", "gptq", "sim", make=make).run()
    loaded, expected = bp.load(make, tmp_path / "out").state_dict(), model.state_dict()
    assert all(torch.equal(loaded[name], expected[name].cpu()) for name in expected)


def test_computed_buffers_go_along(alike: None, tmp_path: Path) -> None:
    class Norm(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(WIDTH, bias=False)
            with torch.device("cpu"):
                self.register_buffer("offset", torch.full((WIDTH,), 0.1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.offset

    class Shifted(Model):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.norm = Norm()

    source = write(tmp_path, Shifted)
    for device in ("cpu", SIM):
        stream(source, tmp_path / str(device), "int3-g32", "gptq", device, make=Shifted).run()
    assert hashes(tmp_path / str(SIM)) == hashes(tmp_path / "cpu")


@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_one_block_and_one_batch_at_a_time(
    objects: None, source: Path, tmp_path: Path, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block runs, its weights and the tensors of its batch are on the device, and nothing else; weights are
    solved there. Between blocks all is on the CPU."""
    forward, solve, solved = Block.forward, GPTQ.solve, set[str]()
    one = max(batch.numel() for batch in batches()) * (WIDTH + 1) * 4
    """Bytes of the largest batch. It is there as it was moved and as a copy, which the block may write to, next to the
    block's output for the one before."""
    running = stream(source, tmp_path / "out", {"embed": "skip", "*": "int3-g32"}, "gptq", SIM, activations=activations)
    sums = 4 * (WIDTH**2 + 96**2 + 3 * WIDTH**2) + 8 * (1 + 1 + 3)  # and the number of rows of each matrix
    last = 4 * 96**2 + 8  # those of the last weight of the block before

    def watched(block: Block, x: Tensor, shift: Tensor) -> Any:
        assert (x.device, shift.device) == (SIM, SIM)
        assert {param.device for param in block.parameters()} == {SIM}
        assert {param.device.type for param in running.model.head.parameters()} == {"meta"}
        weights = sum(param.nbytes for param in block.parameters())
        gc.collect()
        every = {held.untyped_storage()._cdata: held for held in gc.get_objects() if _is_there(held)}
        assert sum(held.untyped_storage().nbytes() for held in every.values()) <= weights + sums + last + 3 * one
        return forward(block, x, shift)

    def noted(by: GPTQ, w: Tensor, fmt: Any, inputs: Any) -> Any:
        solved.update({w.device.type, inputs.gram.device.type})
        return solve(by, w, fmt, inputs)

    monkeypatch.setattr(Block, "forward", watched)
    monkeypatch.setattr(GPTQ, "solve", noted)
    running.run()
    assert solved == {"sim"}
    assert sim.fallbacks()["aten::linalg_cholesky_ex.L"] > 0
    gc.collect()
    assert not [held for held in gc.get_objects() if _is_there(held)]


def _is_there(held: Any) -> bool:
    """QTensors are left out, which only hold other tensors."""
    return type(held) in (Tensor, nn.Parameter) and held.device == SIM


def test_resumed_on_another_device(alike: None, source: Path, tmp_path: Path) -> None:
    options = {"activations": "disk"}
    stream(source, tmp_path / "whole", "int3-g32", "gptq", "cpu", **options).run()
    end_early(stream(source, tmp_path / "out", "int3-g32", "gptq", SIM, **options), 2)
    resumed = stream(source, tmp_path / "out", "int3-g32", "gptq", "cpu", resume=True, **options)
    assert resumed.output.resumed == 2
    resumed.run()
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


class Lengths(Model):
    """Passes its blocks a tensor that stays on the CPU, as models do with lengths of sequences."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, torch.tensor(0.5, device="cpu"))[0]
        return self.head(self.norm(x))


@pytest.mark.parametrize("activations", ["memory", "disk"])
def test_tensors_return_to_where_they_were(tmp_path: Path, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, seen = Block.forward, []

    def watched(block: Block, x: Tensor, shift: Tensor) -> Any:
        seen.append((x.device.type, shift.device.type))
        return forward(block, x, shift)

    monkeypatch.setattr(Block, "forward", watched)
    source = write(tmp_path, Lengths)
    stream(source, tmp_path / "out", "int3-g32", "gptq", SIM, make=Lengths, activations=activations).run()
    assert set(seen) == {("sim", "cpu")}


def test_kept_on_the_cpu(source: Path, tmp_path: Path) -> None:
    running = stream(source, tmp_path / "out", "int3-g32", "gptq", SIM)
    kept = running.walk.store.store
    running.run()
    tensors = [tensor for each in (kept.given, kept.outputs) for held in each.values() for tensor in held.values()]
    assert len(tensors) >= len(batches())
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_the_estimate_is_split(source: Path, tmp_path: Path) -> None:
    here, there = (stream(source, tmp_path / str(at), "int4-g32", "gptq", at).memory for at in ("cpu", SIM))
    one = max(batch.numel() for batch in batches()) * (WIDTH + WIDTH + 1) * 4  # embedded tokens, outputs and the shift
    assert there.on_device == here.weights + here.grams + here.work + one
    assert there.activations == here.activations
    assert there.weights == 2 * 4 * 3 * WIDTH**2  # the experts as read and as cast
    assert there.work < here.work
    assert f"; on {SIM} " in str(there)
    files = QuantizeRun(source, tmp_path / "files", {"*": "int4-g32"}, algorithm="hqq", device=SIM).memory
    assert files.on_device == (4 + 32) * 3 * WIDTH**2


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 kB are free on the device: 5 as such, and 3 that PyTorch keeps for reuse."""
    told = {"mem_get_info": (5000, 10**9), "memory_reserved": 7000, "memory_allocated": 4000}
    for name, value in told.items():
        monkeypatch.setattr(torch.sim, name, lambda device, value=value: value, raising=False)


def test_more_than_the_device_has_is_refused(little: None, source: Path, tmp_path: Path) -> None:
    message = r"this needs about .* on sim:0, and 8\.0 kB are free there: free some, choose another device, such as cpu"
    with pytest.raises(ArgumentError, match=message):
        stream(source, tmp_path / "out", "int4-g32", "gptq", SIM)
    with pytest.raises(ArgumentError, match=message):
        quantize_files(source, tmp_path / "out", "int4-g32", device=SIM)
    assert not (tmp_path / "out" / "unfinished").exists()
    stream(source, tmp_path / "out", "int4-g32", "gptq", "cpu")


BOTH = """
import sys
import torch._dynamo
import torch.distributed as dist
from bitport.calibrate.processes import Processes
from bitport.stream import Stream
from tests.scripts import forked
from tests.stream.models import batches, empty
torch.set_num_threads(1)
source, target, scheme, algorithm = sys.argv[1:]

def run(rank):
    torch.accelerator.set_device_index(rank)  # the device's fallback creates tensors on the current one
    dist.init_process_group("gloo", init_method=f"file://{target}-meeting", rank=rank, world_size=2)
    options = {"algorithm": algorithm, "processes": Processes.joined(), "device": f"sim:{rank}"}
    Stream(empty(), source, target, scheme, batches=batches()[:3], **options).run()
    dist.destroy_process_group()

forked(2, run)
"""


@pytest.mark.parametrize(("scheme", "algorithm"), [*slow(("int4-g32", "gptq")), ("int8-static", "rtn")])
def test_two_processes_with_a_device_each(source: Path, tmp_path: Path, scheme: str, algorithm: str) -> None:
    """Weights and inputs that one sends the other arrive on the other's device."""
    printed(BOTH, source, tmp_path / "two", scheme, algorithm)
    stream(source, tmp_path / "one", scheme, algorithm, SIM, batches=batches()[:3]).run()
    assert hashes(tmp_path / "two") == hashes(tmp_path / "one")


def test_processes_take_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(given: str, rank: int, world: int) -> str:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        return str(device_of(argparse.Namespace(device=torch.device(given)), Processes(rank, world)))

    assert [taken("sim", rank, 3) for rank in range(3)] == ["sim:0", "sim:1", "sim:0"]
    assert (taken("sim:1", 0, 2), taken("sim", 0, 1), taken("cpu", 1, 2)) == ("sim:1", "sim:0", "cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_directory(tmp_path_factory.mktemp("sim") / "llama", hidden_size=64, intermediate_size=128)
    (directory.parent / "text.txt").write_text(TEXT)
    return directory


def command(llama: Path, out: Path, *words: str) -> dict[str, str]:
    """The files that ``bitport quantize`` writes, without those it copies."""
    assert main(["quantize", str(llama), *words, "-o", str(out)]) == 0
    return {name: held for name, held in hashes(out).items() if name.startswith("model-")}


def test_the_command_without_data(llama: Path, tmp_path: Path) -> None:
    words = ("--scheme", "int4-g32", "--algorithm", "hqq")
    here = command(llama, tmp_path / "here", *words)
    assert not sim.fallbacks()
    assert command(llama, tmp_path / "there", *words, "--device", "sim") == here
    assert sim.fallbacks()
    command(llama, tmp_path / "whole", *words, "--device", "sim", "--in-memory")
    there, whole = (read_manifest(tmp_path / name) for name in ("there", "whole"))
    assert whole.tied == there.tied == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("algorithm", [*slow("gptq"), "awq+gptq"])
def test_the_command_with_data(
    llama: Path, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block on the device gives the weights of the whole model there; and the model writes its text there."""
    words = ["--scheme", "int4-g32", "--algorithm", algorithm, "--device", "sim"]
    data = ["--data", str(llama.parent / "text.txt")]
    command(llama, tmp_path / "blocks", *words, *data)
    assert "; on sim:0 " in capsys.readouterr().err
    solved = sim.fallbacks()["aten::linalg_cholesky_ex.L"]
    command(llama, tmp_path / "whole", *words, *data, "--in-memory")
    assert sim.fallbacks()["aten::linalg_cholesky_ex.L"] == 2 * solved > 0
    blocks, whole = (load_model(tmp_path / name).state_dict() for name in ("blocks", "whole"))
    assert all(torch.equal(value, whole[name]) for name, value in blocks.items())


def test_the_command_on_text_of_the_model(llama: Path, tmp_path: Path) -> None:
    words = ("--algorithm", "gptq", "--data-tokens", "24", "--device", "sim")
    command(llama, tmp_path / "blocks", "--scheme", "int4-g32", *words)
    assert sim.fallbacks()["aten::_softmax.out"] >= 24
    command(llama, tmp_path / "mixed", "--scheme", "auto", "--bits", "4", "--candidates", "int2,int8", *words)


def test_a_model_too_large_to_write_its_own_text(
    little: None, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--scheme", "int4", "--algorithm", "gptq", "--device", "sim", "-o", str(tmp_path / "out"))
    assert main(["quantize", str(llama), *words]) == 1
    said = capsys.readouterr().err
    assert "without --data the model writes its own calibration text, for which it has to be on sim:0: " in said
    assert "and 8.0 kB are free there. Give a text with --data" in said


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--in-memory"], ["--algorithm", "gptq"]], ids=" ".join)
def test_a_device_that_is_not_there(
    llama: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(llama), "--scheme", "int4", "-o", str(tmp_path / "out"), "--device", "cuda", *more]
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("bitport: error: no device cuda here: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("given", "message"), [("gpu", "no device gpu here: "), ("meta", "meta holds no numbers")])
def test_no_device(source: Path, tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        stream(source, tmp_path / "out", "int4-g32", "gptq", given)
    with pytest.raises(DeviceError, match=message):
        quantize_files(source, tmp_path / "out", "int4-g32", device=given)
    assert not (tmp_path / "out").exists()
