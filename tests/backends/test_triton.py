"""Triton's kernels, each file in a process of its own, since triton reads at import where it runs: on_triton.py in the
interpreter and on a present device, on_triton_compiler.py compiled for absent devices. The others:
on_triton_attention.py for attention, on_triton_inputs.py for rounding inputs, on_triton_pairs.py for codes taken
several at a time, on_triton_quantize.py for rounding weights and tokens, on_triton_scaled.py for scaled products of
blocks, on_triton_tables.py for the choice of kernels."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.gpu.pieces import KERNELS
from bitport.backends import triton
from bitport.backends.triton.operand import words
from bitport.ops import IMPLS
from tests.scripts import printed
from tests.turns import EVERY, slow

DEVICE = torch.accelerator.current_accelerator(check_available=True)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'bitport[triton]'"
)


FILES = tuple(Path(file).name for file in KERNELS)


@needs_triton
@EVERY
@pytest.mark.parametrize("files", [FILES[::5], FILES[1:5]], ids=" ".join)
def test_in_the_interpreter(files: tuple[str, ...], every: bool, elsewhere: Callable[..., None]) -> None:
    """In two processes that take about as long, since importing takes seconds."""
    elsewhere(*files, every=every, TRITON_INTERPRET="1", TRITON_DEVICE="cpu")


def compiled(elsewhere: Callable[..., None], cache: Path, targets: str, only: str = "", **variables: str) -> None:
    elsewhere("on_triton_compiler.py", only=only, TRITON_TARGETS=targets, TRITON_CACHE_DIR=str(cache), **variables)


@needs_triton
@pytest.mark.parametrize("target", ["sm90", *slow("sm80", "sm100", "gfx942")])
def test_compiled_for_devices_that_are_not_here(target: str, elsewhere: Callable[..., None], tmp_path: Path) -> None:
    compiled(elsewhere, tmp_path, target)


@needs_triton
def test_instructions_that_not_every_device_has(elsewhere: Callable[..., None], tmp_path: Path) -> None:
    """What differs most from one device to the next: the units for products of integers, float8 and scaled blocks."""
    compiled(elsewhere, tmp_path, "sm100,gfx942", only="unit or as_such or probe")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["sm70", "sm75", "sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950"]
)
def test_every_variant_compiled(target: str, elsewhere: Callable[..., None], tmp_path: Path) -> None:
    compiled(elsewhere, tmp_path, target, TRITON_ALL="1")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE is None, reason="no device here")
@pytest.mark.parametrize("file", FILES)
def test_on_the_device(file: str, elsewhere: Callable[..., None]) -> None:
    assert DEVICE is not None
    elsewhere(file, every=True, TRITON_DEVICE=DEVICE.type)


@pytest.mark.skipif(DEVICE is not None, reason="there is a device here")
def test_without_a_device_it_says_so_and_registers_nothing() -> None:
    assert triton.describe() == ["not used: no device of type cuda or xpu here"]
    assert list(triton.tune()) == ["nothing to choose between: no device of type cuda or xpu here"]
    assert not [impl.name for impls in IMPLS.values() for impl in impls if impl.name.startswith("triton")]


@needs_triton
def test_without_a_compiler_it_names_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitport.backends.triton import probe

    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc or clang" in str(probe.missing())
    monkeypatch.setenv("CC", "tcc")
    assert probe.missing() is None


ON_THE_CPU = """
import bitport as bp
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
bp.quantize_(model, "int4")
model(torch.ones(1, 64))
from bitport.backends.triton import MISSING, probe
print(MISSING, probe.fault.cache_info().currsize, [kernel.name for kernel in bp.ops.IMPLS["embedding", device]])
"""
"""Initializing a GPU takes half a gigabyte of its memory and the right to fork. So only a call for one of its kernels
asks whether Triton compiles for it."""


@needs_triton
@pytest.mark.skipif(DEVICE is not None, reason="there is a device here, and it is used by the next test")
def test_work_on_the_cpu_does_not_ask_what_a_gpu_can() -> None:
    seen = """
import torch
device = "cuda"
torch.accelerator.current_accelerator = lambda check_available=False: None if check_available else torch.device(device)
torch.accelerator.device_count = lambda: 1
"""
    assert printed(seen + ON_THE_CPU) == "None 0 ['triton_rows']\n"


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE is None, reason="no device here")
def test_work_on_the_cpu_leaves_a_gpu_to_processes_forked_later() -> None:
    assert DEVICE is not None
    forked = """
import os
if os.fork():
    os.wait()
else:
    print(torch.ones(1, device=device).item(), flush=True)
"""
    begin = f"import torch\ndevice = '{DEVICE.type}'\n"
    assert printed(begin + ON_THE_CPU + "print(end='', flush=True)" + forked) == "None 0 ['triton_rows']\n1.0\n"


def test_without_triton_it_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "bitport[triton]" in str(triton.missing())


@pytest.mark.parametrize(("bits", "k"), [(1, 8), (2, 8), (4, 8), (8, 4), (3, 32), (6, 16)])
def test_words_are_loaded_where_they_begin(bits: int, k: int) -> None:
    """Memory of a file begins anywhere, and its tensor at the beginning of that."""
    whole = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    size = bits if bits in (1, 2, 4) else 4
    for begin in range(8):
        data = torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=begin, count=32)
        assert data.storage_offset() == 0
        assert words(bits, k, data) == (data.data_ptr() % size == 0)
    assert {words(bits, k, whole[begin:]) for begin in range(4)} == ({True} if size == 1 else {True, False})
