"""Quantized diffusion models of ComfyUI: the numbers that its formats define, under the names of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitport.cli.main import main
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import convert
from bitport.interop.comfy import Comfy
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .diffusion_files import ORIGINALS, answer, described, mapped, random, shapes_of
from .files import assert_described

import bitport.integrations.diffusers  # noqa: F401  # isort: skip

PREFIX = "model.diffusion_model."


def made(name: str, folder: Path, prefix: str = "", **changes: Tensor) -> tuple[Path, Path, Any, dict[str, Tensor]]:
    """Return a file, the directory of its configuration, the model, and the values of its tensors as diffusers maps
    them. Matrices are float8, other tensors bfloat16. ``changes`` to the file."""
    original = ORIGINALS[name]
    model = original.model()
    file: dict[str, Tensor] = {f"{prefix}scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn)}
    values = {}
    for at, (key, shape) in enumerate(original.names(shapes_of(model)).items()):
        value = random(*shape, seed=at) * 0.1
        if key.endswith(".weight") and len(shape) == 2:
            dtype = torch.float8_e5m2 if at % 3 == 0 else torch.float8_e4m3fn
            scale = torch.tensor(0.001 * (at + 1)).reshape(() if at % 2 else (1,))
            file[f"{prefix}{key}"] = (value / scale).to(dtype)
            file[f"{prefix}{key.removesuffix('weight')}scale_weight"] = scale
            values[key] = file[f"{prefix}{key}"].float() * scale
        else:
            file[f"{prefix}{key}"] = value.bfloat16()
            values[key] = value.bfloat16().float()
    save_file({key: value for key, value in {**file, **changes}.items() if value is not None}, folder / "m.safetensors")
    return folder / "m.safetensors", described(model, folder / "config"), model, mapped(model, values)


@pytest.mark.parametrize(("name", "prefix"), [("sd3", ""), ("z_image", PREFIX), ("unet", PREFIX), ("wan", "")])
def test_numbers_and_answers(name: str, prefix: str, tmp_path: Path) -> None:
    path, config, model, wanted = made(name, tmp_path, prefix)
    assert main(["convert", str(path), "--config", str(config), "-o", str(tmp_path / "out")]) == 0
    tensors = dict(Own(tmp_path / "out").items())
    assert tensors.keys() == wanted.keys()
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    quantized = {key for key, value in tensors.items() if isinstance(value, QTensor)}
    assert quantized == {key for key, value in wanted.items() if value.dim() == 2 and key.endswith(".weight")}
    for key, value in tensors.items():
        found = value.dequantize(torch.float32) if isinstance(value, QTensor) else value.float()
        assert torch.equal(found, wanted[key]), key
    model.load_state_dict(wanted)
    right = answer(model.eval(), ORIGINALS[name].inputs)
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32)
    found = answer(loaded, ORIGINALS[name].inputs)
    assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())


def test_what_is_described_is_what_comes(tmp_path: Path) -> None:
    path, config, _, _ = made("sd3", tmp_path)
    assert_described(Comfy(path, config))
    assert convert(path, tmp_path / "float", to="float", config=config, progress=False).written == "float"


def test_what_has_no_scale_and_what_is_no_layer(tmp_path: Path) -> None:
    """Everything in float8, as in some files: biases and the position table become floats."""
    path, config, _, wanted = made("sd3", tmp_path)
    key, bias = "x_embedder.proj.bias", random(256).to(torch.float8_e4m3fn)
    table = wanted["pos_embed.pos_embed"].to(torch.float8_e5m2)
    plain = random(64, 256).to(torch.float8_e4m3fn)
    changes: dict[str, Any] = {key: bias, "pos_embed": table, "final_layer.linear.weight": plain}
    changes["final_layer.linear.scale_weight"] = None
    changes["context_embedder.scale_input"] = torch.ones(())
    changes["text_encoders.position_ids"] = torch.arange(3)
    changes["text_encoders.none"] = torch.empty(0, 4, dtype=torch.float8_e4m3fn)
    path, config, _, wanted = made("sd3", Path(tmp_path), **changes)
    done = convert(path, tmp_path / "out", config=config, progress=False)
    tensors = dict(Own(tmp_path / "out").items())
    assert torch.equal(tensors["pos_embed.proj.bias"].float(), bias.float())
    assert torch.equal(tensors["pos_embed.pos_embed"].float(), table.float())
    last = tensors["proj_out.weight"]
    assert isinstance(last, QTensor)
    assert torch.equal(last.dequantize(torch.float32), plain.float())
    assert any("pos_embed.pos_embed, pos_embed.proj.bias" in note for note in done.notes)
    assert any("scale_input" in note for note in done.notes)
    assert any("left out: text_encoders.position_ids, text_encoders.none" in note for note in done.notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context_embedder.scale_weight": torch.ones(2)}, r"context_embedder.scale_weight must be .* \[1\], not"),
        ({"context_embedder.scale_weight": torch.ones((), dtype=torch.int32)}, r"scale_weight must be"),
        (
            {"x_embedder.proj.scale_weight": torch.tensor(2.0)},
            r"scale_weight: the format of .*proj.weight, torch.bfloat16, has none",
        ),
        (
            {"context_embedder.pre_quant_scale": torch.ones(64)},
            r"pre_quant_scale: the format of context_embedder.weight",
        ),
        ({"spare.scale_weight": torch.ones(())}, r"spare.scale_weight is there without spare.weight"),
        (
            {"t_embedder.mlp.0.bias": torch.ones(256, dtype=torch.int8)},
            r"mlp.0.bias is torch.int8, and nothing says in which format",
        ),
        ({"context_embedder.weight": None}, r"context_embedder.scale_weight is there without context_embedder.weight"),
        ({"x_embedder.proj.weight": None}, r"not those of a SD3Transformer2DModel as diffusers knows them \(KeyError"),
    ],
)
def test_files_that_are_none(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path, config, _, _ = made("sd3", tmp_path, **changes)
    with pytest.raises(CheckpointError, match=reason):
        convert(path, tmp_path / "out", config=config, progress=False)
    assert not (tmp_path / "out").exists()


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path, config, _, _ = made("sd3", tmp_path)
    with pytest.raises(CheckpointError, match="if it is a diffusion model of ComfyUI, give its --config"):
        convert(path, tmp_path / "out", progress=False)
    save_file({"a": torch.ones(2)}, tmp_path / "float.safetensors")
    with pytest.raises(CheckpointError, match="holds no quantized weight: quantize it with"):
        convert(tmp_path / "float.safetensors", tmp_path / "out", config=config, progress=False)
    with pytest.raises(ArgumentError, match=r"or as ComfyUI has them in one \.safetensors file"):
        convert(tmp_path / "config", tmp_path / "out", config=config, progress=False)
