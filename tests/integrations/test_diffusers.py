"""diffusers models quantized while or after loading, and checkpoints of bitport loaded by diffusers."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import shutil
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitport as bp
from bitport.checkpoint import read_manifest
from bitport.errors import ArgumentError, CheckpointError
from bitport.integrations.huggingface import load_model, save_model
from bitport.interop import convert
from bitport.numerics import sqnr
from bitport.tensor import QTensor

from .components import COMPONENTS, diffusers, image, made, output, pipeline

from bitport.integrations.diffusers import BitportConfig  # isort: skip
from .test_pretrained import assert_same  # isort: skip

EVERYTHING = {"*": "int8"}
SCHEMES = [name for name, scheme in bp.PRESETS.items() if not scheme.static]
ORDER = 100
"""dB: float32 throughout, only the order of sums may differ. Weights mapped from a file are aligned differently, which
changes the order of sums in float products."""
PARTS = ("unet", "text_encoder", "vae")


def saved(name: str, folder: Path, **given: Any) -> Path:
    made(name).save_pretrained(folder, **given)
    return folder


def loaded(name: str, folder: Path, recipe: Any = None, **given: Any) -> Any:
    config = {} if recipe is None else {"quantization_config": BitportConfig(recipe)}
    return getattr(diffusers, type(made(name)).__name__).from_pretrained(folder, **config, **given)


def quantized(name: str, recipe: Any = "int4-g32") -> Any:
    model = made(name)
    bp.quantize_(model, recipe)
    return model


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach() for param in model.parameters() if isinstance(param, QTensor)]


@pytest.mark.parametrize("recipe", ["int4-g32", "nf4", EVERYTHING], ids=["int4", "nf4", "convolutions"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_outputs_are_those_of_the_dequantized_model(name: str, recipe: Any) -> None:
    """The reference computes in float64, the quantized model in float32 throughout."""
    model = quantized(name, recipe)
    floats = bp.dequantize_(copy.deepcopy(model)).double()
    assert float(sqnr(output(floats, name), output(model, name))) > ORDER
    assert float(sqnr(output(floats, name), output(made(name), name))) < 60


@pytest.mark.parametrize("recipe", ["int4-g32", "fp8-row", EVERYTHING], ids=["int4", "fp8", "convolutions"])
@pytest.mark.parametrize("name", [name for name in COMPONENTS if name != "wan"])
def test_quantizing_while_loading_is_quantize(tmp_path: Path, name: str, recipe: Any) -> None:
    """Also from several files."""
    saved(name, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, right = loaded(name, tmp_path, recipe), loaded(name, tmp_path)
    report = bp.quantize_(right, recipe)
    assert_same(model, right)
    assert model.hf_quantizer.report == report
    assert float(sqnr(output(right, name), output(model, name))) > ORDER
    assert not model.training


def test_what_the_class_keeps_in_float32_is_left(tmp_path: Path) -> None:
    """The rule for everything skips it, and the report says so and includes the recipe. An explicit rule overrides
    that."""
    saved("wan", tmp_path)
    model, right = loaded("wan", tmp_path, "int8", dtype=torch.bfloat16), loaded("wan", tmp_path, dtype=torch.bfloat16)
    report = model.hf_quantizer.report
    left = {layer.name: layer.reason for layer in report.skipped if "skip" in layer.reason}
    embedder = "condition_embedder.time_embedder.linear_"
    assert left == {f"{embedder}{at}.weight": "rule '*.time_embedder.*' says skip" for at in (1, 2)}
    assert right.get_parameter(f"{embedder}1.weight").dtype == torch.float32
    assert bp.quantize_(right, bp.Recipe.from_json(report.recipe)) == report
    assert_same(model, right)
    assert torch.equal(output(model, "wan"), output(right, "wan"))
    model = loaded("wan", tmp_path, {"*.time_embedder.*": "int8", "*": "int4-g32"})
    assert model.get_parameter(f"{embedder}1.weight").scheme == bp.preset("int8")


def test_algorithms_without_data(tmp_path: Path) -> None:
    saved("flux", tmp_path)
    config = BitportConfig("int4-g32", algorithm="hqq", measure=False)
    right = loaded("flux", tmp_path)
    bp.quantize_(right, "int4-g32", algorithm="hqq")
    assert_same(diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, quantization_config=config), right)


@pytest.mark.parametrize("name", COMPONENTS)
def test_checkpoints(tmp_path: Path, name: str) -> None:
    """Saved in both ways, in several shards, and loaded by every loader."""
    saved(name, tmp_path / "float")
    model = loaded(name, tmp_path / "float", {"*": "int4-g32"})
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    assert len(read_manifest(tmp_path / "one").shards) > 2
    again = loaded(name, tmp_path / "one")
    assert_same(again, model)
    assert repr(again.config.quantization_config) == f"BitportConfig(as stored: int4-g32 ({len(bits(model))}))"
    assert_same(load_model(tmp_path / "one"), model)
    assert float(sqnr(output(model, name), output(again, name))) > ORDER
    again.save_pretrained(tmp_path / "two")
    other = quantized(name, bp.Recipe.from_json(model.hf_quantizer.report.recipe))
    save_model(other, tmp_path / "three")
    for folder in ("two", "three"):
        assert_same(diffusers.AutoModel.from_pretrained(str(tmp_path / folder)), model)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"] == {"quant_method": "bitport"}
    trained = [[param.requires_grad for param in each.parameters()] for each in (model, again)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(tmp_path: Path, scheme: str) -> None:
    model = quantized("flux", scheme)
    save_model(model, tmp_path)
    assert_same(loaded("flux", tmp_path), model)


def test_a_single_file(tmp_path: Path) -> None:
    """diffusers does not tell such a model that it was quantized."""
    saved("flux", tmp_path / "float")
    save_file(made("flux").state_dict(), tmp_path / "flux.safetensors")
    model = diffusers.FluxTransformer2DModel.from_single_file(
        str(tmp_path / "flux.safetensors"),
        config=str(tmp_path / "float"),
        quantization_config=BitportConfig("int4-g32"),
    )
    assert_same(model, quantized("flux"))
    model.save_pretrained(tmp_path / "out")
    assert_same(loaded("flux", tmp_path / "out"), model)


def test_dtypes(tmp_path: Path) -> None:
    """The default is the checkpoint's own; modules that a class keeps in float32 stay so in any. Codes do not
    change."""
    save_model(quantized("wan").to(torch.bfloat16), tmp_path)
    own, half = loaded("wan", tmp_path), loaded("wan", tmp_path, dtype=torch.float16)
    for model, dtype in ((own, torch.bfloat16), (half, torch.float16)):
        assert {param.dtype for param in model.parameters()} == {dtype, torch.float32}
        assert model.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
        assert model.dtype == dtype
    for mine, theirs in zip(bits(half), bits(own), strict=True):
        assert torch.equal(mine.to(torch.float32), theirs.to(torch.float32))
    cast = loaded("wan", tmp_path).to(torch.float32)
    assert {param.dtype for param in cast.parameters()} == {torch.float32}
    with pytest.raises(ArgumentError, match=r"computes in float32, bfloat16 or float16, not in torch.float8_e4m3fn"):
        loaded("wan", tmp_path, dtype=torch.float8_e4m3fn)


def test_a_pipeline(tmp_path: Path) -> None:
    """Quantized while loading, by one configuration for both libraries, then saved and loaded, compared with
    quantize_."""
    pipeline().save_pretrained(tmp_path / "float")
    recipes = {"unet": "int8", "text_encoder": "int4-g32", "vae": EVERYTHING}
    right = pipeline()
    for name, recipe in recipes.items():
        bp.quantize_(getattr(right, name), recipe)
    mapping = {name: BitportConfig(recipe) for name, recipe in recipes.items()}
    config = diffusers.PipelineQuantizationConfig(quant_mapping=mapping)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "float", quantization_config=config)
    pipe.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    for name in PARTS:
        assert len(read_manifest(tmp_path / "out" / name).shards) > 1
        assert_same(getattr(pipe, name), getattr(right, name))
        assert_same(getattr(again, name), getattr(right, name))
    expected = image(right)
    assert float(sqnr(expected, image(pipe))) > ORDER
    assert float(sqnr(expected, image(again))) > ORDER
    for part in PARTS:
        bp.dequantize_(getattr(right, part))
    assert float(sqnr(image(right), expected)) > 90
    assert float(sqnr(image(pipeline()), expected)) < 50
    assert {param.dtype for name in PARTS for param in getattr(again.to(torch.bfloat16), name).parameters()} == {
        torch.bfloat16
    }


def test_a_pipeline_by_the_name_of_its_method(tmp_path: Path) -> None:
    pipeline().save_pretrained(tmp_path)
    given = {"quant_backend": "bitport", "quant_kwargs": {"recipe": "int8"}}
    config = diffusers.PipelineQuantizationConfig(**given, components_to_quantize=["unet", "text_encoder"])
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path, quantization_config=config)
    assert [len(bits(getattr(pipe, name))) for name in PARTS] == [50, 12, 0]


@pytest.mark.parametrize("given", [{"variant": "fp16"}, {"safe_serialization": False}, {"use_flashpack": True}])
def test_save_pretrained_does_what_it_is_told_or_nothing(tmp_path: Path, given: dict[str, Any]) -> None:
    """For the text encoder, a pipeline passes on only the variant."""
    pipeline().save_pretrained(tmp_path / "float")
    parts = ("text_encoder", "unet") if "variant" in given else ("unet",)
    for part in parts:
        config = diffusers.PipelineQuantizationConfig(quant_mapping={part: BitportConfig("int8")})
        pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "float", quantization_config=config)
        for other in set(PARTS) - {part}:
            setattr(pipe, other, None)
        with pytest.raises(ArgumentError, match=f"not {next(iter(given))}"):
            pipe.save_pretrained(tmp_path / "out", **given)
        assert not (tmp_path / "out" / part / "bitport.json").exists()


def test_a_model_quantized_after_loading_is_saved_by_save_model(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"save_model of bitport\.integrations\.huggingface .* diffusers"):
        quantized("unet").save_pretrained(tmp_path)


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = importlib.import_module("diffusers.utils.hub_utils")
    monkeypatch.setattr(hub, "create_repo", lambda repo_id, **given: types.SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(hub, "load_or_create_model_card", lambda *args, **given: types.SimpleNamespace(save=print))
    monkeypatch.setattr(hub, "populate_model_card", lambda card: card)
    save_model(quantized("flux"), tmp_path / "one")
    model = loaded("flux", tmp_path / "one")
    monkeypatch.setattr(
        type(model), "_upload_folder", lambda self, folder, *args, **given: shutil.copytree(folder, tmp_path / "hub")
    )
    model.push_to_hub("me/flux")
    assert_same(loaded("flux", tmp_path / "hub"), model)


def test_what_was_converted(tmp_path: Path) -> None:
    """Convert to another format and back."""
    save_model(quantized("flux", {"x_embedder": "skip", "*": "int4-g32-sym"}), tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "others", to="compressed-tensors", progress=False)
    convert(tmp_path / "others", tmp_path / "back", progress=False)
    assert_same(loaded("flux", tmp_path / "back"), load_model(tmp_path / "back"))
    floats = bp.dequantize_(loaded("flux", tmp_path / "back"))
    convert(tmp_path / "back", tmp_path / "float", to="float", progress=False, shard_size=50_000)
    for name, value in loaded("flux", tmp_path / "float").state_dict().items():
        assert torch.equal(value, floats.state_dict()[name])


def test_copies(tmp_path: Path) -> None:
    save_model(quantized("flux"), tmp_path / "one")
    copied = copy.deepcopy(loaded("flux", tmp_path / "one"))
    with torch.no_grad():
        copied.proj_out.bias.fill_(3)
    copied.save_pretrained(tmp_path / "two")
    assert bool((loaded("flux", tmp_path / "two").proj_out.bias == 3).all())


def test_a_model_goes_with_its_last_name(tmp_path: Path) -> None:
    save_model(quantized("flux"), tmp_path)
    model = loaded("flux", tmp_path)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def damaged(out: Path, what: str) -> None:
    (shard,) = out.glob("model-*.safetensors")
    config = json.loads((out / "config.json").read_text())
    if what == "bytes":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif what == "manifest":
        (out / "bitport.json").unlink()
    else:
        config[{"shape": "out_channels", "missing": "guidance_embeds", "unknown": "num_layers"}[what]] = {
            "shape": 8,
            "missing": True,
            "unknown": 1,
        }[what]
        (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("bytes", CheckpointError, r"the data of .* is damaged. Fetch or save the checkpoint again"),
        ("manifest", FileNotFoundError, r"bitport\.json which is required"),
        ("shape", CheckpointError, r"proj_out.weight \(checkpoint \[4, 32\], model \[8, 32\]\)"),
        (
            "missing",
            CheckpointError,
            r"does not fit FluxTransformer2DModel. 4 missing in the checkpoint: time_text_embed",
        ),
        (
            "unknown",
            CheckpointError,
            r"does not fit FluxTransformer2DModel. 32 unknown to the model: transformer_blocks.1",
        ),
    ],
)
def test_damage(tmp_path: Path, what: str, error: type[Exception], message: str) -> None:
    save_model(quantized("flux"), tmp_path)
    damaged(tmp_path, what)
    with pytest.raises(error, match=message):
        loaded("flux", tmp_path)


@pytest.mark.parametrize("given", [{"ignore_mismatched_sizes": True}, {"offload_state_dict": True}])
def test_what_would_leave_a_model_without_numbers_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    save_model(quantized("flux"), tmp_path)
    with pytest.raises(ArgumentError, match=f"skipped 108 tensors .*; load it without .*{next(iter(given))}"):
        loaded("flux", tmp_path, **given)


def test_what_wants_data_is_refused(tmp_path: Path) -> None:
    saved("flux", tmp_path)
    with pytest.raises(ArgumentError, match="gptq looks at the inputs of layers"):
        BitportConfig("int4", algorithm="gptq")
    with pytest.raises(ArgumentError, match="have a static input scale"):
        loaded("flux", tmp_path, "int8-static")


def test_calibration_by_a_run_of_the_pipeline(tmp_path: Path) -> None:
    """On the calibration prompt, gptq is closer to the float model than rounding to nearest."""
    expected, images = image(pipeline()), {}
    for algorithm in ("rtn", "gptq"):
        pipe = pipeline()
        data = {} if algorithm == "rtn" else {"calibrate": lambda model, pipe=pipe: image(pipe)}
        report = bp.quantize_(pipe.unet, "int4-g32", algorithm=algorithm, **data)
        assert {layer.algorithm for layer in report.quantized} == {algorithm}
        images[algorithm] = float(sqnr(expected, image(pipe)))
    assert images["gptq"] > images["rtn"] + 1


@pytest.mark.parametrize("name", COMPONENTS)
def test_memory_footprint(tmp_path: Path, name: str) -> None:
    save_model(quantized(name), tmp_path)
    held = [entry.nbytes for entry in read_manifest(tmp_path).tensors.values() if not entry.buffer]
    assert loaded(name, tmp_path).get_memory_footprint(return_buffers=False) == sum(held)


def test_device_maps(tmp_path: Path) -> None:
    """Each weight takes 5.25 bits instead of 32, and there is room for the largest block twice."""
    model = quantized("flux")
    save_model(model, tmp_path)
    size = 2 * read_manifest(tmp_path).nbytes
    assert size < 0.5 * made("flux").get_memory_footprint()
    for given in ({"device_map": "cpu"}, {"device_map": "auto", "max_memory": {"cpu": size}}):
        assert_same(loaded("flux", tmp_path, **given), model)
    for given in ({"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": size // 4}}):
        with pytest.raises(ArgumentError, match=r"leaves weights on disk \(.+\), from where accelerate brings plain"):
            loaded("flux", tmp_path, **given, offload_folder=tmp_path / "offload")
