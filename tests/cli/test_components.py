"""``bitport quantize`` and ``explain`` on models of diffusers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bitport.checkpoint import read_manifest
from bitport.integrations.huggingface import load_model

from ..integrations.components import COMPONENTS, made, pipeline
from ..integrations.test_diffusers import loaded, saved
from ..integrations.test_pretrained import assert_same
from .conftest import Run


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_result_is_that_of_loading(run: Run, tmp_path: Path, name: str) -> None:
    """Quantizing files, some of them in several shards, gives the same weights, kinds and reasons as quantizing while
    loading."""
    saved(name, tmp_path / "in", max_shard_size="30KB")
    ran = run("quantize", tmp_path / "in", "--scheme", "int4-g32", "-o", tmp_path / "out", "--json")
    assert ran.code == 0
    assert "note" not in ran.err
    model = loaded(name, tmp_path / "in", "int4-g32")
    assert_same(loaded(name, tmp_path / "out"), model)
    assert_same(load_model(tmp_path / "out"), model)
    told = {layer["name"]: (layer["scheme"], layer["reason"]) for layer in ran.data["layers"]}
    for layer in model.hf_quantizer.report.layers:
        assert told.pop(layer.name) == (layer.scheme, layer.reason)
    assert {scheme for scheme, _ in told.values()} <= {None}  # buffers, which look like weights in a file


def test_cast_and_explained(run: Run, tmp_path: Path) -> None:
    """diffusers still accepts the config.json."""
    saved("flux", tmp_path / "in")
    words = ("--rule", "*norm*=skip", "--scheme", "int8", "--dtype", "bfloat16", "-o", tmp_path / "out")
    assert run("quantize", tmp_path / "in", *words).code == 0
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("in", "out"))
    assert after == {**before, "quantization_config": {"quant_method": "bitport"}}
    model = loaded("flux", tmp_path / "out")
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model.norm_out.linear.weight.numel() * 2 == model.norm_out.linear.weight.nbytes
    assert "proj_out" in run("explain", tmp_path / "out").out
    assert run("inspect", tmp_path / "out", "--json").data["schemes"] == ["int8"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--scheme", "int4", "--algorithm", "gptq"],
            "is a UNet2DConditionModel of diffusers, which is quantized from",
        ),
        (["--scheme", "auto", "--bits", "4"], "calibrate=lambda model: pipe(prompt)"),
        (["--scheme", "int8", "--in-memory"], "without data"),
    ],
)
def test_what_needs_its_pipeline_is_refused(run: Run, tmp_path: Path, words: list[str], message: str) -> None:
    ran = run("quantize", saved("unet", tmp_path / "in"), *words, "-o", tmp_path / "out")
    assert ran.code == 1
    assert message in ran.err
    assert not (tmp_path / "out").exists()


def test_a_pipeline_is_told_its_models(run: Run, tmp_path: Path) -> None:
    pipeline().save_pretrained(tmp_path)
    ran = run("quantize", tmp_path, "--scheme", "int8", "--dry-run")
    assert ran.code == 1
    models = ", ".join(str(tmp_path / name) for name in ("text_encoder", "unet", "vae"))
    assert f"is a pipeline of diffusers; give one of its models: {models}" in ran.err


def test_a_float_model_is_for_diffusers(run: Run, tmp_path: Path) -> None:
    ran = run("explain", saved("unet", tmp_path))
    assert ran.code == 1
    assert "in float: diffusers.UNet2DConditionModel.from_pretrained loads it" in ran.err


def test_a_class_that_is_not_known_is_noted(run: Run, tmp_path: Path) -> None:
    """A name that is not a model class is not instantiated."""
    saved("unet", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for name in ("NewTransformerModel", "StableDiffusionPipeline"):
        (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "_class_name": name}))
        ran = run("quantize", tmp_path / "in", "--scheme", "int8", "-o", tmp_path / name)
        assert ran.code == 0
        assert f"{tmp_path / 'in'} is a {name}" in ran.err
        assert "note: what this model keeps in float32 is not known, so that is quantized too" in ran.err
        assert len(read_manifest(tmp_path / name).tensors) == len(made("unet").state_dict())


def test_without_diffusers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("unet", tmp_path / "in")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    ran = run("quantize", tmp_path / "in", "--scheme", "int8", "-o", tmp_path / "out")
    assert ran.code == 0
    assert "is a UNet2DConditionModel of diffusers, which is not installed: pip install 'bitport[diffusers]'" in ran.err
    ran = run("explain", tmp_path / "out")
    assert ran.code == 1
    assert "which is not installed: pip install 'bitport[diffusers]'" in ran.err


def test_names_that_the_model_does_not_have_are_noted(run: Run, tmp_path: Path) -> None:
    saved("flux", tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "num_layers": 1}))
    ran = run("quantize", tmp_path / "in", "--scheme", "int8", "-o", tmp_path / "out")
    assert "note: FluxTransformer2DModel of diffusers has no transformer_blocks.1." in ran.err
