"""Triton's kernels, each in a process that tells triton where it is: on_triton.py in its interpreter, the compilers for
devices that are not here, and on the device that is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'bitport[triton]'"
)


def test_in_the_interpreter(elsewhere: Callable[..., None]) -> None:
    elsewhere("on_triton.py", TRITON_INTERPRET="1", TRITON_DEVICE="cpu")


def compiled(elsewhere: Callable[..., None], cache: Path, targets: str, **variables: str) -> None:
    elsewhere("on_triton_compiler.py", TRITON_TARGETS=targets, TRITON_CACHE_DIR=str(cache), **variables)


def test_compiled_for_devices_that_are_not_here(elsewhere: Callable[..., None], tmp_path: Path) -> None:
    compiled(elsewhere, tmp_path, "sm80,gfx942")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_every_variant_compiled(target: str, elsewhere: Callable[..., None], tmp_path: Path) -> None:
    compiled(elsewhere, tmp_path, target, TRITON_ALL="1")


@pytest.mark.gpu
def test_on_the_device(elsewhere: Callable[..., None]) -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        pytest.skip("no device here")
    elsewhere("on_triton.py", TRITON_DEVICE=device.type)
