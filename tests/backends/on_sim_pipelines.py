"""diffusers pipelines on an out-of-tree device: moved to it, offloaded from it, loaded onto it. Run by test_devices.py,
in a separate process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitport as bp
from bitport import plugins
from bitport.integrations.diffusers import BitportConfig
from bitport.integrations.huggingface import save_model
from bitport.numerics import sqnr
from bitport.tensor import QTensor
from tests.integrations.components import diffusers, flux_pipeline, latents, made

plugins.load()

DEVICE = "sim:0"
LAYOUT = "sim_rows8"
FLUX = diffusers.FluxTransformer2DModel


@pytest.fixture
def expected() -> torch.Tensor:
    return latents(flux_pipeline(quantized()))


def quantized() -> Any:
    model = made("flux")
    bp.quantize_(model, "int4-g32")
    return model


def where(model: Any) -> set[tuple[str, str]]:
    """Device and layout of each quantized weight."""
    return {(param.device.type, param.bits_layout) for param in model.parameters() if isinstance(param, QTensor)}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in float32 up to the order of sums."""
    return float(sqnr(expected, found)) > 100


def test_moved(expected: torch.Tensor) -> None:
    pipe = flux_pipeline(quantized()).to(DEVICE)
    assert where(pipe.transformer) == {("sim", LAYOUT)}
    assert close(latents(pipe, DEVICE), expected)


@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloaded(how: str, expected: torch.Tensor) -> None:
    pipe = flux_pipeline(quantized())
    getattr(pipe, how)(device=DEVICE)
    for _ in range(2):
        assert close(latents(pipe, DEVICE), expected)
    assert {device for device, _ in where(pipe.transformer)} == {"cpu" if "model" in how else "meta"}


@pytest.mark.parametrize("kind", ["stored", "while loading"])
def test_loaded_there(kind: str, tmp_path: Path, expected: torch.Tensor) -> None:
    """Tensor by tensor, each into the layout of the device."""
    config = {} if kind == "stored" else {"quantization_config": BitportConfig("int4-g32")}
    if kind == "stored":
        save_model(quantized(), tmp_path)
    else:
        made("flux").save_pretrained(tmp_path)
    model = FLUX.from_pretrained(tmp_path, device_map=DEVICE, **config)
    assert where(model) == {("sim", LAYOUT)}
    assert close(latents(flux_pipeline(model), DEVICE), expected)
    places = {name: "cpu" if "single" in name else DEVICE for name, _ in model.named_children()}
    model = FLUX.from_pretrained(tmp_path, device_map=places, **config)
    assert {device for device, _ in where(model)} == {"sim", "meta"}  # parts kept on the CPU are loaded when used
    assert close(latents(flux_pipeline(model), DEVICE), expected)
