"""Kernels that an installation lacks: explain() and a forced kernel say why, and the first quantized weight on the
device warns."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch

import bitport
from bitport import missing
from bitport.backends import cpu
from bitport.missing import Missing, register_missing
from bitport.ops import IMPLS, Decision, Impl, decide, register_kernel
from bitport.ops.product import operand
from bitport.tensor import quantize_tensor
from tests.backends.taken import compiled
from tests.scripts import printed

WITHOUT_LIBRARY = """
import json, warnings
import torch
import bitport
from bitport.errors import KernelError
from bitport.ops import use_kernel
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    imported = len(warned)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 8))
    bitport.quantize_(model, "int4-g32")
    model.to(torch.bfloat16)
    model(torch.ones(1, 64, dtype=torch.bfloat16))
explained = bitport.explain(model, rows=[1])
(refused,) = {layer.decisions[1] for layer in explained.layers}
try:
    with use_kernel("native"):
        model(torch.ones(1, 64, dtype=torch.bfloat16))
    forced = ""
except KernelError as error:
    forced = str(error)
found = {"imported": imported, "warned": [str(each.message) for each in warned], "refused": refused.refused}
print(json.dumps({**found, "kernel": refused.kernel, "forced": forced, "text": str(explained)}))
"""
COMPILER_SAID = "g++: kernels.cpp:1: error: no such thing\nand two hundred lines more"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a process says in which the native library was not compiled."""
    folder = tmp_path_factory.mktemp("installed")
    package = Path(bitport.__file__).parent
    shutil.copytree(package, folder / "bitport", ignore=shutil.ignore_patterns("libbitport_*", "__pycache__"))
    (folder / "bitport/backends/cpu/libbitport_kernels.txt").write_text(COMPILER_SAID)
    path = os.pathsep.join([str(folder), *(each for each in sys.path if each != str(package.parent))])
    script = f"import sys; sys.path[:0] = [{str(folder)!r}]\n{WITHOUT_LIBRARY}"
    found: dict[str, object] = json.loads(printed(script, PYTHONPATH=path, BITPORT_KERNEL="", BITPORT_DISABLE=""))
    return found


def test_the_first_weight_warns_and_no_other(told: dict[str, object]) -> None:
    (warning,) = told["warned"]  # type: ignore[misc]
    assert told["imported"] == 0
    assert "bitport's native kernels for cpu are missing" in warning
    assert "not compiled when bitport was installed: g++: kernels.cpp:1: error: no such thing" in warning
    assert "pip install --no-deps -e ." in warning
    assert "two hundred" not in warning


def test_explain_says_what_is_missing(told: dict[str, object]) -> None:
    assert told["kernel"] == "generic"
    names = dict(told["refused"])  # type: ignore[call-overload]
    assert names["native"].startswith("missing: not compiled when bitport was installed: g++: kernels.cpp:1")
    assert "native refused: missing: not compiled" in str(told["text"])


def test_forcing_it_says_why_that_is_impossible(told: dict[str, object]) -> None:
    assert "cpu has only: int8pack_mm, generic; native is missing: not compiled when" in str(told["forced"])


@compiled
def test_the_ops_named_missing_are_those_of_the_library() -> None:
    decide("linear", *arguments())  # loads the backends
    assert {op for (op, device), impls in IMPLS.items() if "native" in [impl.name for impl in impls]} == {*cpu.OPS}


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing, "MISSING", [])


def arguments() -> tuple[object, ...]:
    weight = quantize_tensor(torch.randn(8, 64), "int4-g32").to_layout("plain")
    return (torch.randn(3, 64), *operand(weight), None)


@pytest.mark.usefixtures("empty", "own_tables")
@pytest.mark.parametrize(("priority", "listed"), [(999, False), (1001, True)])
def test_only_kernels_that_would_have_come_first_are_listed(priority: int, listed: bool) -> None:
    args = arguments()
    register_kernel(Impl("linear", "there", "cpu", lambda *args: args[0], lambda *args: None, 1000))
    register_missing(Missing("fast", "cpu", ("linear",), "was lost", priority))
    assert decide("linear", *args) == Decision("there", (("fast", "missing: was lost"),) if listed else ())


@pytest.mark.usefixtures("empty")
def test_kernels_of_other_ops_and_devices_are_not_listed() -> None:
    args = arguments()
    register_missing(Missing("fast", "cpu", ("embedding",), "was lost"))
    register_missing(Missing("fast", "cuda", ("linear",), "was lost"))
    assert "fast" not in dict(decide("linear", *args).refused)


@pytest.mark.usefixtures("empty")
def test_nobody_is_warned_of_what_nothing_helps() -> None:
    register_missing(Missing("fast", "cpu", ("linear",), "this processor is too old", curable=False))
    register_missing(Missing("fast", "cuda", ("linear",), "was lost"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments()


WITHOUT_TRITON = """
import importlib.util, json, sys
import torch
torch.accelerator.current_accelerator, torch.accelerator.device_count = lambda: torch.device("cuda"), lambda: 1
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
from bitport import plugins
from bitport.missing import missing_for
plugins.load()
print(json.dumps([[each.name, each.reason] for op in ("linear", "attention") for each in missing_for(op, "cuda")]))
"""


def test_triton_is_missing_where_there_is_a_gpu_without_it() -> None:
    names, reasons = zip(*json.loads(printed(WITHOUT_TRITON, BITPORT_DISABLE="")), strict=True)
    assert names == ("triton", "triton")
    assert all(each.startswith("triton is not installed: pip install 'bitport[triton]'") for each in reasons)
