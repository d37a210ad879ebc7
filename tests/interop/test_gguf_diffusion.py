"""GGUF files of diffusion models: the numbers that the library ``gguf`` reads, under diffusers' names, and the same
outputs as diffusers' own reading of the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.checkpoint import read_manifest
from bitport.cli.main import main
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.integrations.huggingface import load_model
from bitport.interop import convert
from bitport.interop.gguf import Diffusion
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .diffusion_files import (
    ORIGINALS,
    WIDTH,
    answer,
    described,
    diffusers,
    mapped,
    shapes_of,
    single_file,
    with_config,
    write,
)
from .files import assert_described, assert_same, config_in
from .gguf_files import gguf

import bitport.integrations.diffusers  # noqa: F401  # isort: skip

types = gguf.GGUFValueType
ORIGINALS_TABLE = single_file.SINGLE_FILE_LOADABLE_CLASSES
KINDS = {
    "wan": {
        r".*\.0\.self_attn\.q\.weight": "Q4_K",
        r".*\.0\.self_attn\.k\.weight": "Q6_K",
        r".*self_attn\.v\.weight": "Q5_K",
        r".*self_attn\.[qko]\.weight": "Q3_K",
        r".*cross_attn\.[qk]\.weight": "Q2_K",
        r".*cross_attn\.[vo]\.weight": "Q4_1",
        r".*ffn\.0\.weight": "Q5_0",
        r".*ffn\.2\.weight": "Q5_1",
        r"(time|text)_.*weight": "Q8_0",
        r"head\.head\.weight": "Q4_0",
    },
    "sd3": {r".*attn2?\.(qkv|proj)\.weight": "Q4_K", r".*mlp.*weight": "Q8_0", r".*adaLN.*weight": "Q5_K"},
    "ltx": {r".*attn\d\.to_[qkv]\.weight": "Q4_0", r".*ff.*weight": "Q6_K", r".*linear.*weight": "Q8_0"},
    "qwen": {r".*(attn\.(to|add)_|_mlp|_mod\.).*weight": "Q4_0", r".*txt_in\.weight": "Q8_0"},
    "z_image": {r".*attention\.(qkv|out)\.weight": "Q4_K", r".*feed_forward\.w[13]\.weight": "Q6_K"},
    "unet": {r".*attn.*weight": "Q8_0", r".*ff\.net.*weight": "Q4_0"},
}


def made(name: str, folder: Path, kinds: dict[str, str] | None = None, **given: Any) -> tuple[Path, Path, Any, Any]:
    """Return a file, the directory of its configuration, the model, and the values of its tensors as diffusers maps
    them."""
    original = ORIGINALS[name]
    model = original.model()
    shapes = original.names(shapes_of(model))
    values = write(folder / "m.gguf", original.architecture, shapes, kinds or KINDS[name], **given)
    return folder / "m.gguf", described(model, folder / "config"), model, mapped(model, values)


def assert_same_numbers(path: Path, wanted: dict[str, Tensor], rounded: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Weights with a minimum have a rounded zero point: off by 2^-24 of it, and so is the weight. ``rounded``: those
    that became floats, whose minimum is here at most 7 times the largest weight."""
    tensors = dict(Own(path).items())
    assert tensors.keys() == wanted.keys()
    for name, value in tensors.items():
        given = wanted[name]
        if name in rounded:
            assert float((value - given.reshape(value.shape)).abs().max()) <= 10 * 2.0**-24 * float(given.abs().max())
            continue
        if not isinstance(value, QTensor):
            assert torch.equal(value.float(), given.reshape(value.shape)), name
            continue
        own, bound = value.dequantize(torch.float32).double(), torch.zeros(())
        if value.zero is not None and value.zero.is_floating_point():
            bound = 2.0**-24 * ((value.zero * value.scale).abs().max().double() + 3 * given.abs().max().double())
        assert float((own - given.reshape(own.shape).double()).abs().max()) <= float(bound), name
    return tensors


@pytest.mark.parametrize("name", ORIGINALS)
def test_numbers_and_answers(name: str, tmp_path: Path) -> None:
    path, config, model, wanted = made(name, tmp_path)
    done = convert(path, tmp_path / "out", config=config, progress=False)
    assert (done.read, done.written) == ("gguf", "bitport")
    tensors = assert_same_numbers(tmp_path / "out", wanted)
    assert {key for key, value in tensors.items() if isinstance(value, QTensor)} == set(done.weights)
    assert len(done.weights) > 10
    model.load_state_dict(wanted)
    right = answer(model.eval(), ORIGINALS[name].inputs)
    for loaded in (type(model).from_pretrained(tmp_path / "out"), load_model(tmp_path / "out")):
        found = answer(loaded.eval(), ORIGINALS[name].inputs)
        assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())


@pytest.mark.parametrize("name", [name for name in ORIGINALS if name not in ("qwen", "unet")])
def test_answers_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    """diffusers expects another prefix for UNets, and does not strip Qwen's. It dequantizes in float16: two roundings
    put a weight off by 2^-10 of itself."""
    path, config, model, _ = made(name, tmp_path)
    said = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    theirs = type(model).from_single_file(str(path), config=str(config), quantization_config=said, dtype=torch.float32)
    right = answer(theirs, ORIGINALS[name].inputs)
    convert(path, tmp_path / "out", config=config, progress=False)
    found = answer(type(model).from_pretrained(tmp_path / "out"), ORIGINALS[name].inputs)
    assert float((found - right).norm()) <= 2.0**-10 * float(right.norm())


@pytest.mark.parametrize("name", ["wan", "sd3", "unet"])
def test_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Modules that the class keeps in float32 stay so, including quantized ones."""
    path, config, model, wanted = made(name, tmp_path)
    convert(path, tmp_path / "out", config=config, progress=False)
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    inputs = {key: value.bfloat16() for key, value in ORIGINALS[name].inputs.items()}
    model.load_state_dict(wanted)
    right = answer(model.eval(), ORIGINALS[name].inputs)
    # Each number is rounded to bfloat16 about ten times.
    assert float((answer(loaded, inputs).float() - right).norm()) <= 0.05 * float(right.norm())


def test_blocks_that_reach_over_rows(tmp_path: Path) -> None:
    """Rows of 64 are stored as rows of 256. Blocks of 32 do not cross them, but blocks of 256 do; a row of a
    convolution spans its inputs and its window."""
    shapes = ORIGINALS["unet"].names(shapes_of(ORIGINALS["unet"].model()))
    kept, lost = "middle_block.1.transformer_blocks.0.attn1.to_q.weight", "middle_block.1.proj_in.weight"
    convolution, small = "middle_block.0.in_layers.2.weight", "input_blocks.0.0.weight"
    kinds = {kept: "Q8_0", lost: "Q4_K", convolution: "Q5_0", small: "Q8_0"}
    stored = {name: (torch.Size(shapes[name]).numel() // 32, 32) for name in (convolution, small)}
    stored |= {name: (torch.Size(shapes[name]).numel() // 256, 256) for name in (kept, lost)}
    path, config, model, wanted = made("unet", tmp_path, kinds, stored=stored)
    done = convert(path, tmp_path / "out", config=config, progress=False)
    assert done.weights == {
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight": "int8-g32",
        "mid_block.resnets.0.conv1.weight": "int5-g32-sym",
    }
    assert any("conv_in.weight, mid_block.attentions.0.proj_in.weight" in note for note in done.notes)
    assert_same_numbers(tmp_path / "out", wanted, rounded=("mid_block.attentions.0.proj_in.weight",))
    model.load_state_dict(wanted)
    right = answer(model.eval(), ORIGINALS["unet"].inputs)
    found = answer(type(model).from_pretrained(tmp_path / "out"), ORIGINALS["unet"].inputs)
    assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())


def test_what_is_no_layer_becomes_floats(tmp_path: Path) -> None:
    """A parameter and a buffer; a tensor that lost its leading dimension of 1."""
    path, config, _, wanted = made("sd3", tmp_path, {"pos_embed": "Q8_0", r"joint.*mlp.*weight": "Q4_0"})
    done = convert(path, tmp_path / "out", config=config, progress=False)
    assert any("pos_embed.pos_embed" in note for note in done.notes)
    assert_same_numbers(tmp_path / "out", wanted)
    kinds = {"blocks.*modulation": "Q5_1", **KINDS["wan"]}
    original = ORIGINALS["wan"]
    shapes = original.names(shapes_of(original.model()))
    squeezed = {name: shape[1:] if "modulation" in name else shape for name, shape in shapes.items()}
    values = write(tmp_path / "n.gguf", "wan", squeezed, kinds)
    config = described(original.model(), tmp_path / "wan")
    done = convert(tmp_path / "n.gguf", tmp_path / "wan-out", config=config / "config.json", progress=False)
    assert any("blocks.0.scale_shift_table, blocks.1.scale_shift_table" in note for note in done.notes)
    assert dict(Own(tmp_path / "wan-out").items())["blocks.0.scale_shift_table"].shape == (1, 6, WIDTH)
    tables = tuple(f"blocks.{at}.scale_shift_table" for at in range(2))
    assert_same_numbers(tmp_path / "wan-out", mapped(original.model(), values), rounded=tables)


def test_types_that_are_read_by_grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grids come from the library gguf: without it, there is an error before anything is written."""
    kinds = {r".*attn.*weight": "IQ4_XS", r".*ffn.*weight": "IQ3_S", r"head\.head\.weight": "IQ2_XXS"}
    path, config, _, wanted = made("wan", tmp_path, kinds)
    convert(path, tmp_path / "out", config=config, progress=False)
    tensors = assert_same_numbers(tmp_path / "out", wanted)
    assert isinstance(tensors["proj_out.weight"], QTensor)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(BitportError, match=r"IQ2_XXS, IQ3_S.*pip install 'bitport\[gguf\]'"):
        convert(path, tmp_path / "again", config=config, progress=False)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ({".*qkv.weight": "Q8_0", ".*": "BF16"}, torch.bfloat16),
        ({".*qkv.weight": "Q8_0", ".*bias": "F32", ".*": "BF16"}, torch.float32),
        ({".*qkv.weight": "Q4_0", ".*": "F16"}, torch.float16),
        ({".*qkv.weight": "Q4_0", ".*mlp.*": "BF16", ".*": "F16"}, torch.float32),
    ],
)
def test_the_dtype_holds_every_float(kinds: dict[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    path, config, model, wanted = made("sd3", tmp_path, kinds)
    convert(path, tmp_path / "out", config=config, progress=False)
    tensors = assert_same_numbers(tmp_path / "out", wanted)
    assert {value.dtype for value in tensors.values()} == {dtype}
    assert type(model).from_pretrained(tmp_path / "out").dtype == dtype


def test_what_is_written(tmp_path: Path) -> None:
    """config.json is as `bitport quantize` leaves it; the same from several files, and from the command line."""
    path, config, _, _ = made("ltx", tmp_path)
    done = convert(path, tmp_path / "out", config=str(config), progress=False)
    said = config_in(config)
    written = config_in(tmp_path / "out")
    assert written == {**said, "quantization_config": {"quant_method": "bitport"}}
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    (tmp_path / "parts").mkdir()
    original = ORIGINALS["ltx"]
    shapes = original.names(shapes_of(original.model()))
    write(tmp_path / "parts" / "m.gguf", original.architecture, shapes, KINDS["ltx"], parts=20)
    assert len(list((tmp_path / "parts").glob("m-*-of-*.gguf"))) > 1
    for at, source in enumerate((tmp_path / "parts", path)):
        out = tmp_path / f"out{at}"
        words = ["convert", str(source), "--config", str(config / "config.json"), "-o", str(out)]
        assert main(words) == 0
        assert_same(dict(Own(out).items()), dict(Own(tmp_path / "out").items()))
    assert done.bytes_before == sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)


def test_what_is_described_is_what_comes(tmp_path: Path) -> None:
    path, config, _, _ = made("wan", tmp_path)
    assert_described(Diffusion(path, config))


def test_to_others(tmp_path: Path) -> None:
    path, config, model, wanted = made("sd3", tmp_path)
    done = convert(path, tmp_path / "float", to="float", config=config, progress=False)
    assert done.written == "float"
    loaded = type(model).from_pretrained(tmp_path / "float")
    for name, value in loaded.state_dict().items():
        assert torch.allclose(value, wanted[name], rtol=0, atol=2.0**-22 * float(wanted[name].abs().max()))
    convert(path, tmp_path / "smaller", scales="float16", config=config, progress=False)
    assert read_manifest(tmp_path / "smaller").nbytes < done.bytes_after
    with pytest.raises(ArgumentError, match="cannot be written as gguf"):
        convert(path, tmp_path / "again.gguf", to="gguf", config=config, progress=False)
    with pytest.raises(ArgumentError, match="cannot be written as awq"):
        convert(path, tmp_path / "awq", to="awq", config=config, progress=False)
    assert {each.name for each in tmp_path.iterdir()} == {"m.gguf", "config", "float", "smaller"}


def test_tensors_that_the_model_does_not_have(tmp_path: Path) -> None:
    """diffusers drops one that it knows; others are reported."""
    original = ORIGINALS["z_image"]
    shapes = original.names(shapes_of(original.model()))
    config = described(original.model(), tmp_path / "config")
    write(tmp_path / "m.gguf", "lumina2", {**shapes, "norm_final.weight": (WIDTH,)}, KINDS["z_image"])
    done = convert(tmp_path / "m.gguf", tmp_path / "out", config=config, progress=False)
    assert "left out: norm_final.weight, which the model of diffusers does not have" in done.notes
    marked = {f"model.diffusion_model.{name}": shape for name, shape in shapes.items()}
    write(tmp_path / "m.gguf", "lumina2", {"vae.encoder.weight": (8, 8), **marked}, KINDS["z_image"])
    done = convert(tmp_path / "m.gguf", tmp_path / "marked", config=config, progress=False)
    assert "left out: vae.encoder.weight, which the model of diffusers does not have" in done.notes
    for changed, reason in (
        ({**shapes, "spare.weight": (8, 8)}, "1 unknown to the model: spare.weight"),
        ({name: shape for name, shape in shapes.items() if "layers.1" not in name}, "missing in it: layers.1."),
        ({**shapes, "cap_embedder.0.weight": (8,)}, r"1 of another shape: cap_embedder.0.weight \(file \[8\], model"),
        (
            {**shapes, "layers.0.attention.norm_q.weight": (64,)},
            r"attention.q_norm.weight and another become layers.0.attention.norm_q.weight",
        ),
    ):
        write(tmp_path / "m.gguf", "lumina2", changed, KINDS["z_image"])
        with pytest.raises(CheckpointError, match=reason):
            convert(tmp_path / "m.gguf", tmp_path / "wrong", config=config, progress=False)
    assert not (tmp_path / "wrong").exists()


def test_a_file_of_another_model(tmp_path: Path) -> None:
    path, _, _, _ = made("ltx", tmp_path)
    for name, reason in (("sd3", "not those of a SD3Transformer2DModel as diffusers knows them"), ("wan", "missing")):
        config = described(ORIGINALS[name].model(), tmp_path / name)
        with pytest.raises(CheckpointError, match=reason):
            convert(path, tmp_path / "out", config=config, progress=False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_class_name": None}, "does not name a class of diffusers"),
        ({"_class_name": ["x"]}, "does not name a class of diffusers"),
        ({"_class_name": "NewTransformerModel"}, "diffusers .* does not have: upgrade it"),
        ({"_class_name": "FluxPipeline"}, "diffusers .* does not have: upgrade it"),
        ({"_class_name": "DiTTransformer2DModel"}, "reads from no single file; it does .*FluxTransformer2DModel"),
        ({"num_layers": 10**9}, "describes 1000000000 layers, and its files have"),
        ({"num_layers": "two"}, "describes no LTXVideoTransformer3DModel that diffusers can make: TypeError"),
        ({"num_attention_heads": 0}, "describes no LTX|of another shape"),
    ],
)
def test_configurations_that_are_none(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path, config, _, _ = made("ltx", tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        convert(path, tmp_path / "out", config=with_config(tmp_path / "bad", config, **changes), progress=False)


def test_where_a_configuration_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config, _, _ = made("ltx", tmp_path)
    with pytest.raises(CheckpointError, match=r"'ltxv' is not read.*--config"):
        convert(path, tmp_path / "out", progress=False)
    (tmp_path / "text").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipeline" / "transformer").mkdir(parents=True)
    (tmp_path / "pipeline" / "transformer" / "config.json").write_text("{}")
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    for name, reason in (
        ("absent", "does not exist; .*hf download"),
        ("text", "is not JSON"),
        ("empty", "has no config.json"),
        ("pipeline", "pipeline of diffusers; give one of its models: .*transformer"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            convert(path, tmp_path / "out", config=tmp_path / name, progress=False)
    convert(path, tmp_path / "out", config=config, progress=False)
    with pytest.raises(ArgumentError, match="--config is for diffusion models in GGUF"):
        convert(tmp_path / "out", tmp_path / "again", to="float", config=config, progress=False)
    write(tmp_path / "llama.gguf", "llama", {"token_embd.weight": (8, 32)}, {".*": "Q8_0"})
    with pytest.raises(ArgumentError, match=r"is a language model \(llama\), which says its own configuration"):
        convert(tmp_path / "llama.gguf", tmp_path / "again", config=config, progress=False)
    write(tmp_path / "float.gguf", "ltxv", {"a.weight": (8, 32)}, {})
    with pytest.raises(CheckpointError, match="holds no quantized weight, only F32"):
        convert(tmp_path / "float.gguf", tmp_path / "again", config=config, progress=False)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(BitportError, match=r"pip install 'bitport\[diffusers\]'"):
        convert(path, tmp_path / "again", config=config, progress=False)


@pytest.mark.parametrize(
    "shape",
    [
        ("64, 32", types.STRING),
        ([64.0, 128.0], types.ARRAY),
        ([64, 33], types.ARRAY),
        ([-64, -4], types.ARRAY),
        ([256, *[1] * 20], types.ARRAY),
    ],
)
def test_shapes_that_are_none(shape: Any, tmp_path: Path) -> None:
    key = "comfy.gguf.orig_shape.proj_out.weight"
    path, config, _, _ = made("ltx", tmp_path, changes={key: shape})
    with pytest.raises(CheckpointError, match=f"{key} is .*, and must be the sizes of 8192 numbers"):
        convert(path, tmp_path / "out", config=config, progress=False)


def test_rows_of_several_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No function of diffusers does this: rows of two types in one tensor."""
    path, config, _, _ = made("ltx", tmp_path)
    table = dict(ORIGINALS_TABLE["LTXVideoTransformer3DModel"])
    before = table["checkpoint_mapping_fn"]
    name = "transformer_blocks.0.attn1.to_q.weight"

    def mixed(checkpoint: dict[str, Tensor], **given: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = before(checkpoint, **given)
        half = found["transformer_blocks.0.ff.net.2.weight"].reshape(-1, WIDTH)
        return {**found, name: torch.cat([found[name][:9], half[: WIDTH - 9]])}

    monkeypatch.setitem(ORIGINALS_TABLE, "LTXVideoTransformer3DModel", {"checkpoint_mapping_fn": mixed})
    with pytest.raises(CheckpointError, match=rf"{name} is made of tensors of one type, not of .* Q4_0, .* Q6_K"):
        convert(path, tmp_path / "out", config=config, progress=False)
    summed = {"checkpoint_mapping_fn": lambda checkpoint, **given: {n: v * 2 for n, v in before(checkpoint).items()}}
    monkeypatch.setitem(ORIGINALS_TABLE, "LTXVideoTransformer3DModel", summed)
    with pytest.raises(CheckpointError, match=r"diffusers computes .* from its numbers"):
        convert(path, tmp_path / "out", config=config, progress=False)
