"""A quantized program in bitport-run gives the results of eager mode, without Python and with memory-mapped weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bitport
from bitport.export import Method, package
from tests.export.needs import needs_packages

from .builds import LIBRARIES, runner

pytestmark = [
    pytest.mark.xdist_group("runner"),  # built once, by one worker
    needs_packages,
]
K, N, WORDS, LENGTH = 128, 64, 50, 8


class Reader(nn.Module):
    """Embeds ids, stores the rows in ``memory``, and applies a linear layer to all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, K), nn.Linear(K, N)

    def forward(self, ids: Tensor, at: Tensor, memory: Tensor) -> Tensor:
        memory.index_copy_(0, at, self.words(ids))
        y: Tensor = self.mix(memory)
        return y


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.pt2 and its weights in a separate file."""
    made = tmp_path_factory.mktemp("packages")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Reader().bfloat16().eval()
    bitport.quantize_(model, {"words": "int8", "*": "int4-g32"}, measure=False)
    count = torch.export.Dim("count", min=2, max=LENGTH)
    given = torch.tensor([3, 7, 1]), torch.tensor([0, 2, 5]), torch.zeros(LENGTH, K, dtype=torch.bfloat16)
    package(
        {"read": Method(model, given, ({0: count}, {0: count}, None))}, made / "model.pt2", weights="reader.weights"
    )
    return made


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [runner() / "bitport-run", folder / "model.pt2", *arguments, "--torch", LIBRARIES, "--threads", 1]
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=120)


def report(folder: Path, *arguments: object) -> dict[str, Any]:
    done = run(folder, *arguments, "--json", "--repeat", 3)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_was_recorded_comes_out_without_python(folder: Path) -> None:
    found = report(folder, "--verify")
    (method,) = found["methods"]
    assert (method["method"], method["runs"]) == ("read", 3)
    assert method["check"]["ok"]
    assert method["inputs"] == ["I64[3]", "I64[3]", f"BF16[{LENGTH}, {K}]"]
    assert any("libtorch_cpu" in name for name in found["libraries"])
    names = {Path(name).name for name in found["libraries"]}
    assert [name for name in names if "python" in name] == []
    assert "libtorch.so" not in names  # it pulls in the libraries of every device that torch was built for


def test_another_output_is_told(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "read", "--outputs", tmp_path / "o.safetensors").returncode == 0
    outputs = load_file(tmp_path / "o.safetensors")
    assert set(outputs) == {"output.0", "after.2"}
    inputs = {"input.0": torch.tensor([3, 7, 1]), "input.1": torch.tensor([0, 2, 5])}
    memory = {"input.2": torch.zeros(LENGTH, K, dtype=torch.bfloat16)}
    save_file({**inputs, **memory, **outputs}, tmp_path / "same.safetensors")
    assert run(folder, "read", "--inputs", tmp_path / "same.safetensors", "--atol", 0).returncode == 0
    outputs["output.0"][1, 2] += 1
    save_file({**inputs, **memory, **outputs}, tmp_path / "other.safetensors")
    done = run(folder, "read", "--inputs", tmp_path / "other.safetensors", "--atol", 0.5)
    assert done.returncode == 2
    assert "DIFFERS from what was recorded: 1 elements" in done.stdout


def test_whichever_nan_and_zero_are_alike(folder: Path, tmp_path: Path) -> None:
    """Compiled code may give another NaN than eager mode, or -0 for 0: the runner, like `package`, accepts both."""
    memory = torch.zeros(LENGTH, K, dtype=torch.bfloat16)
    memory[6, 3] = float("nan")
    inputs = {"input.0": torch.tensor([3, 7, 1]), "input.1": torch.tensor([0, 2, 5]), "input.2": memory}
    given, outputs = tmp_path / "i.safetensors", tmp_path / "o.safetensors"
    save_file(inputs, given)
    assert run(folder, "--inputs", given, "--outputs", outputs).returncode == 0
    found = load_file(outputs)
    special = {name: each.isnan() | (each == 0) for name, each in found.items()}
    assert int(special["output.0"].sum()) == N
    assert int(special["after.2"].sum()) > (LENGTH - 4) * K
    for name, each in found.items():
        each.copy_(torch.where(special[name], -each, each))
    save_file({**inputs, **found}, given)
    assert run(folder, "--inputs", given, "--atol", 0).returncode == 0
    found["output.0"][6, 5] = 0
    save_file({**inputs, **found}, given)
    done = run(folder, "--inputs", given, "--atol", 9)
    assert (done.returncode, "1 elements, by up to infinity or NaN" in done.stdout) == (2, True)


def test_sizes_that_have_names(folder: Path) -> None:
    (method,) = report(folder, "--random", "--size", "count=5")["methods"]
    assert method["inputs"][:2] == ["I64[5]", "I64[5]"]
    assert "check" not in method


MEMORY = ["--shape", f"bf16[{LENGTH},{K}]"]
WRONG = {
    "too many": (["--random", "--size", f"count={LENGTH + 1}"], f"count from 2 to {LENGTH}"),
    "no such method": (["write"], "no method write; it has read"),
    "two sizes of one name": (["read", "--shape", "i64[3]", "--shape", "i64[4]", *MEMORY], "is 3"),
    "type": (["read", "--shape", "i32[3]", "--shape", "i64[3]", *MEMORY], "I64[count] is wanted"),
    "no language model": (["--generate", "1,2"], "no language model"),
    "an index beyond": (["read", "--inputs", "beyond.safetensors"], "read: "),
    "an input that is none": (["--inputs", "misnamed.safetensors"], "input2 is nothing that read takes or gives"),
    "a size that is none": (["--random", "--size", "counts=3"], "--size counts: this package has the sizes count"),
    "a size of recorded inputs": (["--size", "count=3"], "--size is for random inputs: give --random too"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str, folder: Path) -> None:
    arguments, said = WRONG[name]
    beyond = {"input.0": torch.tensor([3, WORDS + 100]), "input.1": torch.tensor([0, 1])}
    save_file({**beyond, "input.2": torch.zeros(LENGTH, K, dtype=torch.bfloat16)}, folder / "beyond.safetensors")
    named = {"input.0": torch.tensor([3, 1]), "input.1": torch.tensor([0, 1])}
    save_file({**named, "input2": torch.ones(LENGTH, K, dtype=torch.bfloat16)}, folder / "misnamed.safetensors")
    done = run(folder, *(folder / each if each.endswith(".safetensors") else each for each in arguments))
    assert done.returncode == 1
    assert said in done.stderr


def test_other_weights(folder: Path, tmp_path: Path) -> None:
    """Other numbers in the same tensors are accepted; other tensors are refused before they are used."""
    whole = (folder / "reader.weights").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:-4096] + bytes(4096))
    done = run(folder, "--weights", tmp_path / "w.safetensors")
    assert (done.returncode, "DIFFERS" in done.stdout) == (2, True)
    (tmp_path / "w.safetensors").write_bytes(whole.replace(b'"dtype":"BF16"', b'"dtype":"F16" '))
    done = run(folder, "--weights", tmp_path / "w.safetensors")
    assert done.returncode == 1
    assert "holds other tensors" in done.stderr


def test_the_example_of_embedding(folder: Path) -> None:
    command = [str(runner() / "embed"), str(folder / "model.pt2"), "read"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"BF16[{LENGTH}, {N}]: {LENGTH * N} values\n"), done.stderr
