"""Files of Black Forest Labs, which name no format, against diffusers' own reader of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.comfy import Comfy
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .diffusion_files import ORIGINALS, answer, described, random, shapes_of
from .files import assert_described

import bitport.integrations.diffusers  # noqa: F401  # isort: skip

theirs = pytest.importorskip("diffusers.quantizers.bfl.utils", reason="diffusers reads these files since 0.42")
diffusers = pytest.importorskip("diffusers")


def rows(value: Tensor) -> dict[str, Tensor]:
    weight, scale = theirs.quantize_fp8r(value)
    return {"weight": weight, "weight_scale": scale}


def nvfp4(value: Tensor) -> dict[str, Tensor]:
    weight, scale, second = theirs.quantize_nvfp4(value)
    return {"weight": weight, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.01)}


KINDS = (rows, nvfp4)
LAYER = "context_embedder"  # [256, 64]


def made(folder: Path, **changes: Tensor | None) -> tuple[Path, Path, Any]:
    """Return a file with both formats in turn, the directory of its configuration, and the model."""
    model = ORIGINALS["sd3"].model()
    file: dict[str, Tensor | None] = {}
    for at, (key, shape) in enumerate(ORIGINALS["sd3"].names(shapes_of(model)).items()):
        value = random(*shape, seed=at) * 0.1
        if key.endswith(".weight") and len(shape) == 2 and shape[1] % 16 == 0:
            file |= {
                f"{key.removesuffix('weight')}{role}": tensor for role, tensor in KINDS[at // 2 % 2](value).items()
            }
        else:
            file[key] = value
    named = {f"{LAYER}.{role}": tensor for role, tensor in changes.items()}
    save_file({key: value for key, value in {**file, **named}.items() if value is not None}, folder / "m.safetensors")
    return folder / "m.safetensors", described(model, folder / "config"), model


def test_numbers_and_answers(tmp_path: Path) -> None:
    path, config, model = made(tmp_path)
    done = convert(path, tmp_path / "out", config=config, progress=False)
    assert {str(scheme) for scheme in done.weights.values()} == {"fp8-wo", "nvfp4-wo"}
    assert done.read == "Black Forest Labs"
    assert any("left out: input_scale" in note for note in done.notes)
    told = diffusers.BFLQuantizationConfig(compute_dtype=torch.float32)
    read = type(model).from_single_file(path, config=str(config), quantization_config=told, torch_dtype=torch.float32)
    quantized = {key: value for key, value in Own(tmp_path / "out").items() if isinstance(value, QTensor)}
    for key, value in quantized.items():
        module = read.get_submodule(key.removesuffix(".weight"))
        if isinstance(module, theirs.BFLNVFP4Linear):
            right = theirs.dequantize_nvfp4(module.weight, module.weight_scale, module.weight_scale_2)
        else:
            right = theirs.dequantize_fp8r(module.weight, module.weight_scale)
        assert torch.equal(value.dequantize(torch.float32), right), key
    assert len(quantized) == sum(isinstance(module, (*theirs.QUANTIZED_LINEARS.values(),)) for module in read.modules())
    right = answer(read.eval(), ORIGINALS["sd3"].inputs)
    found = answer(type(model).from_pretrained(tmp_path / "out", dtype=torch.float32), ORIGINALS["sd3"].inputs)
    assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())


def test_what_is_described_is_what_comes(tmp_path: Path) -> None:
    path, config, _ = made(tmp_path)
    assert_described(Comfy(path, config))


def test_factors_of_inputs_are_not_theirs(tmp_path: Path) -> None:
    path, config, _ = made(tmp_path, pre_quant_scale=torch.full((64,), 2.0))
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.pre_quant_scale: the format of {LAYER}\.weight"):
        convert(path, tmp_path / "out", config=config, progress=False)


WEIGHT = torch.zeros(256, 64).to(torch.float8_e4m3fn)
HALF = torch.zeros(256, 32, dtype=torch.uint8)
BLOCKS = torch.zeros(256, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": WEIGHT, "weight_scale": torch.ones(())},
        {"weight": WEIGHT, "weight_scale": torch.ones(64)},
        {"weight": WEIGHT, "weight_scale": torch.ones(256, dtype=torch.int32)},
        {"weight": WEIGHT, "weight_scale": torch.ones(256), "weight_scale_2": torch.ones(())},
        {"weight": WEIGHT.to(torch.float8_e5m2), "weight_scale": torch.ones(256)},
        {"weight": WEIGHT[:, :0].contiguous(), "weight_scale": torch.ones(256)},
        {"weight": HALF, "weight_scale": BLOCKS, "weight_scale_2": torch.ones(2)},
        {"weight": HALF, "weight_scale": BLOCKS[:, :3].contiguous(), "weight_scale_2": torch.ones(())},
        {"weight": HALF, "weight_scale": BLOCKS.view(torch.uint8), "weight_scale_2": torch.ones(())},
        {"weight": HALF.float(), "weight_scale": BLOCKS, "weight_scale_2": torch.ones(())},
        {"weight": HALF, "weight_scale": BLOCKS, "weight_scale_2": None},
        {"weight": HALF, "weight_scale": None, "weight_scale_2": torch.ones(())},
        {"weight": HALF[0], "weight_scale": BLOCKS, "weight_scale_2": torch.ones(())},
    ],
)
def test_files_that_are_none(changes: dict[str, Tensor | None], tmp_path: Path) -> None:
    none = dict.fromkeys(("weight_scale_2", "input_scale"))
    path, config, _ = made(tmp_path, **{**none, **changes})
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight_scale"):
        convert(path, tmp_path / "out", config=config, progress=False)
    assert not (tmp_path / "out").exists()
