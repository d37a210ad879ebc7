"""The tests in on_sim*.py and on_fake_*.py, each in a process of its own with that device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.turns import EVERY

built_once = pytest.mark.xdist_group("device from outside")  # by one worker


@built_once
@EVERY
def test_on_a_device_from_outside(every: bool, sim_site: Path, elsewhere: Callable[..., None]) -> None:
    elsewhere("on_sim.py", site=sim_site, every=every)


@built_once
@EVERY
def test_files_quantized_on_a_device_from_outside(every: bool, sim_site: Path, elsewhere: Callable[..., None]) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'bitport[hf]'")
    elsewhere("on_sim_files.py", site=sim_site, every=every)


@built_once
def test_pipelines_on_a_device_from_outside(sim_site: Path, elsewhere: Callable[..., None]) -> None:
    for package in ("diffusers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'bitport[diffusers]'")
    elsewhere("on_sim_pipelines.py", site=sim_site)


@pytest.mark.xdist_group("fake device")  # its guard is compiled once, by one worker
@pytest.mark.parametrize("device", ["xpu", "cuda", "mps"])
def test_on_a_fake_device(device: str, guard: Path, elsewhere: Callable[..., None]) -> None:
    """Only with PyTorch's kernels: others register where they find a real device."""
    on_fake(device, guard, elsewhere, "on_fake_device.py", "on_fake_chips.py", BITPORT_DISABLE="triton")


def on_fake(device: str, guard: Path, elsewhere: Callable[..., None], *files: str, **variables: str) -> None:
    here, built = (torch.accelerator.current_accelerator(check_available=available) for available in (True, False))
    if here is not None and here.type == device:
        pytest.skip(f"there is a real {device} here, whose kernels are registered too")
    own = built is not None and built.type == device
    elsewhere(*files, FAKE_DEVICE=device, FAKE_DEVICE_GUARD="" if own else str(guard), **variables)


@pytest.mark.xdist_group("fake device")
@pytest.mark.parametrize("device", ["xpu", "cuda"])
def test_triton_on_a_fake_device(device: str, guard: Path, elsewhere: Callable[..., None]) -> None:
    """With Triton's kernels as well, which get registered there and launch nothing."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'bitport[triton]'")
    on_fake(device, guard, elsewhere, "on_fake_triton.py")
