"""Errors on the way through a method, with a stand-in for torch's library, which says what was left behind."""

from __future__ import annotations

import json
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .builds import ROOT, runner
from .test_runner_reads import synthetic

pytestmark = pytest.mark.xdist_group("runner")  # built once, by one worker
SOURCES = ROOT / "native" / "runner" / "tests"
F32, F8, UNKNOWN = "aoti_torch_dtype_float32()", "aoti_torch_dtype_float8_e4m3fn()", "99"


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner()  # which skips where there is no compiler
    folder = tmp_path_factory.mktemp("torch")
    (folder / "libtorch_cpu.so").write_bytes(synthetic.library((SOURCES / "torch.cpp").read_text()))
    return folder


def code(outputs: str, *, inputs: int = 0, constants: int = 0, refuses: int = 0) -> bytes:
    macros = {"INPUTS": inputs, "OUTPUTS": outputs, "CONSTANTS": constants, "REFUSES": refuses}
    options = [f"-D{name}={value}" for name, value in macros.items()]
    made: bytes = synthetic.library((SOURCES / "method.cpp").read_text(), *options)
    return made


def plain(folder: Path, library: bytes) -> Path:
    """A package as torch makes them."""
    synthetic.write(folder / "p.pt2", {synthetic.LIBRARY: library, "archive_format": b"pt2"})
    return folder / "p.pt2"


def bitport_run(torch_folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [runner() / "bitport-run", *arguments, "--torch", torch_folder]
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=60)


FAULTS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "the second input is of a type that torch does not know": (
        {"outputs": F32, "inputs": 2},
        ["--shape", "F32[4]", "--shape", "F8_E8M0[4]"],
        "this torch knows no float8_e8m0fnu",
    ),
    "the code takes no inputs": (
        {"outputs": F32, "inputs": 2, "refuses": 1},
        ["--shape", "F32[4]", "--shape", "F32[4]"],
        "model: the inputs are wrong",
    ),
    "the first of two outputs is unknown": (
        {"outputs": f"{UNKNOWN},{F32}"},
        [],
        "a result has a type of number that is not known here",
    ),
    "an input larger than any memory": (
        {"outputs": F32, "inputs": 1},
        ["--shape", f"U8[{2**63 - 1}]"],
        f"no memory for {2**63 - 1} bytes",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_no_tensor_is_left_behind(name: str, torch_folder: Path, tmp_path: Path) -> None:
    method, arguments, said = FAULTS[name]
    done = bitport_run(torch_folder, plain(tmp_path, code(**method)), *arguments)
    assert (done.returncode, done.stderr.splitlines()) == (1, [f"bitport-run: {said}"])


VALUES = struct.pack("<4f", 1.5, -2.0, 3.25, 0.0)


def skewed(folder: Path, skew: int) -> Path:
    """A file of VALUES that begin so many bytes behind a number's place."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-len(header) % 8 + skew)
    (folder / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + VALUES)
    return folder / "w.safetensors"


@pytest.mark.parametrize("skew", range(4))
def test_constants_at_any_place(skew: int, torch_folder: Path, tmp_path: Path) -> None:
    """Where torch would be given an address between two numbers, it is given a copy, as in Python."""
    package, made = plain(tmp_path, code(F32, constants=1)), tmp_path / "o.safetensors"
    done = bitport_run(torch_folder, package, "--weights", skewed(tmp_path, skew), "--outputs", made)
    assert (done.returncode, done.stderr) == (0, "")
    assert made.read_bytes()[-16:] == VALUES


@pytest.mark.parametrize("skew", range(4))
def test_inputs_at_any_place(skew: int, torch_folder: Path, tmp_path: Path) -> None:
    """A method may write into its inputs, so a program has to make the copy itself."""
    command = [runner() / "skewed", plain(tmp_path, code(F32, inputs=1)), "model", skewed(tmp_path, skew), "w"]
    done = subprocess.run([*command, torch_folder], capture_output=True, text=True, timeout=60)
    said = "model: input 0 begins between two elements; give a copy\n" if skew else ""
    assert (done.returncode, done.stderr) == (int(skew > 0), said)


def language_model(
    folder: Path, library: bytes, inputs: list[dict[str, Any]], outputs: Sequence[dict[str, Any]] = ()
) -> Path:
    """One that only decodes."""
    entries = {**synthetic.contents(), synthetic.LIBRARY: library, "constants": b"{}"}
    manifest = json.loads(entries["extra/bitport.json"])
    method = manifest["methods"]["model"]
    method["code"].update(size=len(library), crc32=zlib.crc32(library))
    method.update(constants={"entry": "constants", "count": 0}, inputs=inputs, outputs=[*outputs], example=None)
    manifest.update(methods={"decode": method}, dims={}, meta={"kind": "causal-lm", "capacity": 8})
    entries["extra/bitport.json"] = json.dumps(manifest).encode()
    synthetic.write(folder / "p.pt2", entries)
    return folder / "p.pt2"


ARGUMENTS = [
    {"name": "ids", "dtype": "I64", "shape": [1, 1], "mutated": False},
    {"name": "positions", "dtype": "I64", "shape": [1], "mutated": False},
]


def test_logits(torch_folder: Path, tmp_path: Path) -> None:
    """All alike: the first token. No number can be read of float8."""
    package = language_model(tmp_path, code(F32, inputs=2), ARGUMENTS)
    done = bitport_run(torch_folder, package, "--generate", "1", "--tokens", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0, 0\n", "")
    package = language_model(tmp_path, code(F8, inputs=2), ARGUMENTS)
    done = bitport_run(torch_folder, package, "--generate", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "decode gives logits of the type F8_E4M3[1, 4], whose numbers" in done.stderr


def test_tokens_that_the_model_does_not_have(torch_folder: Path, tmp_path: Path) -> None:
    """Its code may look them up in a table of floats, where torch ends the process."""
    logits = [{"name": "output0", "dtype": "F32", "shape": [1, 4]}]
    package = language_model(tmp_path, code(F32, inputs=2), ARGUMENTS, logits)
    assert bitport_run(torch_folder, package, "--generate", "3", "--tokens", "1").stdout == "0\n"
    done = bitport_run(torch_folder, package, "--generate", "1,4,2")
    said = "bitport-run: the prompt has the token 4; the model knows those from 0 to 3\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_a_language_model_that_does_not_say_what_it_takes(torch_folder: Path, tmp_path: Path) -> None:
    package = language_model(tmp_path, code(F32, inputs=3), [])
    done = bitport_run(torch_folder, package, "--generate", "1")
    assert (done.returncode, done.stderr) == (1, "bitport-run: decode takes 3 inputs, not 2\n")
