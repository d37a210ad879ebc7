"""Whole checkpoints converted between formats: every number, all accompanying files, and no output after an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bitport as bp
from bitport.checkpoint import quantize_files, read_manifest
from bitport.checkpoint.source import Source
from bitport.cli.main import main
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import convert, gptq
from bitport.interop.sources import Foreign, Own
from bitport.tensor import QTensor

from .files import assert_same, config_in, edited
from .published_files import nf4

models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_directory(tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="module")
def ours(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ours")
    quantize_files(float_model, target, "int4-g32", progress=False)
    return target


@pytest.fixture(scope="module")
def theirs(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("theirs")
    convert(ours, target, to="gptq_v2", shard_size=100_000, progress=False)
    return target


def tensors(path: Path) -> dict[str, Tensor]:
    return dict(Own(path).items())


def test_there_and_back(ours: Path, theirs: Path, tmp_path: Path) -> None:
    done = convert(theirs, tmp_path / "back", progress=False)
    assert_same(tensors(tmp_path / "back"), tensors(ours))
    assert read_manifest(tmp_path / "back").tied == read_manifest(ours).tied
    assert (done.read, done.written, set(done.weights.values()), done.notes) == ("gptq", "bitport", {"int4-g32"}, ())
    assert len(done.weights) + done.others == len(tensors(ours))
    assert "int4-g32" in str(done)


def test_the_gate_of_a_gated_mlp_is_a_linear_layer(tmp_path: Path) -> None:
    """Unlike that of a block of experts, which other libraries keep in float."""
    layers = {name: nn.Linear(64, 32, bias=False) for name in ("gate", "up")} | {"down": nn.Linear(32, 64, bias=False)}
    model = nn.ModuleDict({"mlp": nn.ModuleDict(layers)})
    bp.quantize_(model, "int4-g32")
    bp.save(model, tmp_path / "ours")
    done = convert(tmp_path / "ours", tmp_path / "theirs", to="compressed-tensors", progress=False)
    assert set(done.weights) == {f"mlp.{name}.weight" for name in layers}
    routed = nn.ModuleDict({"mlp": nn.ModuleDict({**layers, "experts": nn.Linear(64, 32)})})
    bp.quantize_(routed, {"mlp.gate": "int4-g32"})
    bp.save(routed, tmp_path / "routed")
    with pytest.raises(ArgumentError, match=r"of the kind 'other': mlp\.gate\.weight"):
        convert(tmp_path / "routed", tmp_path / "no", to="compressed-tensors", progress=False)


def test_what_lies_beside_the_weights_comes_along(float_model: Path, ours: Path, theirs: Path, tmp_path: Path) -> None:
    convert(theirs, tmp_path / "back", progress=False)
    before, there, after = (config_in(path) for path in (ours, theirs, tmp_path / "back"))
    assert before == after
    assert there.pop("quantization_config")["quant_method"] == "gptq"
    assert before.pop("quantization_config") == {"quant_method": "bitport"}
    assert there == before
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (float_model / name).read_bytes()


def test_the_model_answers_as_before(ours: Path, theirs: Path, tmp_path: Path) -> None:
    huggingface = pytest.importorskip("bitport.integrations.huggingface")
    convert(theirs, tmp_path / "back", progress=False)
    before, after = (huggingface.load_model(path) for path in (ours, tmp_path / "back"))
    assert torch.equal(models.logits(before), models.logits(after))


def test_shards_are_as_transformers_wants_them(theirs: Path) -> None:
    index = json.loads((theirs / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in theirs.glob("*.safetensors"))
    assert len(files) > 1
    assert files == [f"model-{at + 1:05}-of-{len(files):05}.safetensors" for at in range(len(files))]
    read = {name: file for file in files for name in load_file(theirs / file)}
    assert read == index["weight_map"]
    nbytes = sum(tensor.nbytes for file in files for tensor in load_file(theirs / file).values())
    assert index["metadata"]["total_size"] == nbytes
    assert not (theirs / "unfinished").exists()


def test_one_file_where_it_is_enough(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path, to="gptq_v2", progress=False)
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model.safetensors"]


def test_what_was_left_is_named(ours: Path, float_model: Path, tmp_path: Path) -> None:
    quantize_files(float_model, tmp_path / "q", {"*.down_proj": "skip", "*_proj": "int4-g32"}, progress=False)
    convert(tmp_path / "q", tmp_path / "out", to="gptq_v2", progress=False)
    said = config_in(tmp_path / "out")["quantization_config"]
    assert said["lm_head"] is False
    assert list(said["dynamic"]) == [f"-:^model\\.layers\\.{at}\\.mlp\\.down_proj$" for at in range(2)]


def test_all_that_cannot_be_written_is_told_at_once(float_model: Path, tmp_path: Path) -> None:
    rules = {"*.q_proj": "nf4", "*.k_proj": "fp8-row", "*_proj": "int4-g32"}
    quantize_files(float_model, tmp_path / "q", rules, progress=False)
    with pytest.raises(ArgumentError, match=r"k_proj.*q_proj|q_proj.*k_proj"):
        convert(tmp_path / "q", tmp_path / "out", to="gptq", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_number_that_does_not_fit_leaves_nothing(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq.Writer, "write", _refuse)
    with pytest.raises(ArgumentError, match="does not fit"):
        convert(ours, tmp_path / "out", to="gptq", progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def _refuse(*_: Any) -> None:
    raise ArgumentError("does not fit")


def test_where_it_may_write(ours: Path, theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "theirs").symlink_to(theirs)
    for source, target, to, overwrite, reason in (
        (ours, ours / "in", "gptq_v2", False, "lies in the other"),
        (ours, ours, "gptq_v2", True, "lies in the other"),
        (theirs, theirs.parent, "bitport", False, "lies in the other"),
        (tmp_path / "links" / "theirs", tmp_path / "links", "bitport", False, "lies in the other"),
        (ours, theirs, "gptq_v2", False, "--overwrite replaces"),
        (theirs, ours, "bitport", False, "--overwrite replaces"),
        (ours, tmp_path / "f", "gptq_v2", True, "is a file"),
        (ours, tmp_path / "begun", "gptq_v2", True, "ended early"),
        (ours, tmp_path / "new", "bitport", False, "bitport already"),
        (ours, tmp_path / "new", "gguf9", False, "formats are bitport, .*gptq"),
    ):
        (tmp_path / "f").write_text("")
        (tmp_path / "begun" / "unfinished").mkdir(parents=True, exist_ok=True)
        with pytest.raises(ArgumentError, match=reason):
            convert(source, target, to=to, overwrite=overwrite, progress=False)


def test_overwriting_replaces_every_file(ours: Path, float_model: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    convert(ours, out, to="gptq_v2", shard_size=100_000, progress=False)
    convert(ours, out, to="gptq_v2", overwrite=True, progress=False)
    assert sorted(path.name for path in out.glob("model*")) == ["model.safetensors"]
    convert(out, back, progress=False)
    convert(out, back, overwrite=True, progress=False)
    assert_same(tensors(back), tensors(ours))
    with pytest.raises(ArgumentError, match="remove it"):
        convert(ours, back, to="gptq_v2", overwrite=True, progress=False)


def test_methods_that_are_not_read_are_named(theirs: Path, float_model: Path, tmp_path: Path) -> None:
    for at, (said, reason) in enumerate(
        [({"quant_method": "aqlm"}, "'aqlm'; gptq"), ([], "does not say how"), ({"quant_method": 7}, "'7'")]
    ):
        path = edited(theirs, tmp_path / str(at), quantization_config=said)
        with pytest.raises(CheckpointError, match=reason):
            convert(path, tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError, match="bitport quantize"):
        convert(float_model, tmp_path / "out", progress=False)


def test_a_model_of_diffusers_in_several_files(tmp_path: Path) -> None:
    """As diffusers saves it with bitsandbytes, with its own names for files and index."""
    source, stem = tmp_path / "source", "diffusion_pytorch_model"
    source.mkdir()
    listed = {}
    for at in (1, 2):
        name = f"{stem}-{at:05}-of-00002.safetensors"
        layer = {f"blocks.{at}.to_q.{end}": tensor for end, tensor in nf4().items()} | {
            f"blocks.{at}.scale": torch.ones(1)
        }
        save_file(layer, source / name)
        listed |= dict.fromkeys(layer, name)
    (source / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = {"_class_name": "FluxTransformer2DModel", "quantization_config": said}
    (source / "config.json").write_text(json.dumps(config))
    done = convert(source, tmp_path / "out", progress=False)
    assert done.weights == {f"blocks.{at}.to_q.weight": "nf4" for at in (1, 2)}
    convert(tmp_path / "out", tmp_path / "float", to="float", shard_size=150_000, progress=False)
    assert sorted(path.name for path in (tmp_path / "float").glob(f"{stem}*")) == [
        f"{stem}-00001-of-00002.safetensors",
        f"{stem}-00002-of-00002.safetensors",
        f"{stem}.safetensors.index.json",
    ]


def test_the_form_of_mistral_is_named(theirs: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "consolidated.safetensors").write_bytes(min(theirs.glob("*.safetensors")).read_bytes())
    (source / "params.json").write_text(json.dumps({"quantization": {"qformat_weight": "fp8_e4m3"}}))
    with pytest.raises(CheckpointError, match=r"Mistral's own form \(params\.json\).*with a config\.json"):
        convert(source, tmp_path / "out", progress=False)


def test_older_files_say_it_beside_config_json(ours: Path, theirs: Path, tmp_path: Path) -> None:
    said = config_in(theirs)["quantization_config"]
    del said["quant_method"]
    path = edited(theirs, tmp_path / "old", quantization_config=None)
    (path / "quantize_config.json").write_text(json.dumps(said))
    convert(path, tmp_path / "back", progress=False)
    assert_same(tensors(tmp_path / "back"), tensors(ours))
    assert not (tmp_path / "back" / "quantize_config.json").exists()


def test_a_damaged_configuration_of_ours(ours: Path, tmp_path: Path) -> None:
    for at, (text, reason) in enumerate([("{", "is not JSON"), ("[]", "holds list")]):
        path = edited(ours, tmp_path / str(at))
        (path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            convert(path, tmp_path / "out", to="gptq_v2", progress=False)


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "model.safetensors.index.json"])
def test_a_key_that_is_there_twice(file: str, theirs: Path, tmp_path: Path) -> None:
    """Programs take the first or the last of them: 4 bits here, or 8."""
    inner = file == "quantize_config.json"
    path = edited(theirs, tmp_path / "twice", **({"quantization_config": None} if inner else {}))
    said = json.loads((theirs / ("config.json" if inner else file)).read_text())
    text = json.dumps(said["quantization_config"] if inner else said)
    (path / file).write_text(text.replace('{"', '{"bits": 8, "bits": 4, "', 1))
    with pytest.raises(CheckpointError, match=rf"{file} is not JSON: a key appears twice in one object: 'bits'"):
        convert(path, tmp_path / "out", progress=False)


def test_a_config_inside_a_config(theirs: Path, tmp_path: Path) -> None:
    config = config_in(theirs)
    said = config["quantization_config"]
    inner = {"dtype": "bfloat16", "quantization_config": said}
    path = edited(theirs, tmp_path / "nested", quantization_config=None, dtype=None, text_config=inner)
    assert Foreign(path).reader.dtype == torch.bfloat16
    convert(path, tmp_path / "back", progress=False)
    assert config_in(tmp_path / "back")["text_config"] == {"dtype": "bfloat16"}


def test_methods_that_older_files_do_not_name(theirs: Path, tmp_path: Path) -> None:
    for at, (said, method) in enumerate(
        [
            ({"load_in_4bit": True}, "bitsandbytes"),
            ({"load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes"),
            ({"producer": {"name": "modelopt"}}, "modelopt"),
        ]
    ):
        source = Source(edited(theirs, tmp_path / str(at), quantization_config=said), quantized=True)
        assert source.quantization == {**said, "quant_method": method}


def changed(theirs: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """Copy the directory, adding ``tensors`` to its files."""
    path = edited(theirs, target)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    save_file(tensors, path / "more.safetensors")
    index["weight_map"].update(dict.fromkeys(tensors, "more.safetensors"))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_biases_that_only_the_file_has(theirs: Path, ours: Path, tmp_path: Path) -> None:
    """AutoGPTQ gives every layer a bias, of zeros if the model has none."""
    name = "model.layers.0.mlp.up_proj.bias"
    done = convert(changed(theirs, tmp_path / "zero", {name: torch.zeros(256)}), tmp_path / "out", progress=False)
    (note,) = done.notes
    assert note.startswith("left out: biases of zeros that the model does not have")
    assert_same(tensors(tmp_path / "out"), tensors(ours))
    path = changed(theirs, tmp_path / "more", {name: torch.ones(256)})
    assert convert(path, tmp_path / "kept", progress=False).notes == ()
    assert name in tensors(tmp_path / "kept")


def test_bytes_that_nobody_explains(theirs: Path, tmp_path: Path) -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    path = changed(theirs, tmp_path / "odd", {"model.layers.0.mlp.gate.weight": weight})
    with pytest.raises(CheckpointError, match="nothing says what its numbers mean"):
        convert(path, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("last", "dtype"), [("global_scale", torch.float32), ("weight", torch.float32), ("bias", torch.int32)]
)
def test_a_part_of_a_weight_that_is_not_known(last: str, dtype: torch.dtype, theirs: Path, tmp_path: Path) -> None:
    """Newer versions of a library may add parts; ignoring one would change the numbers of the weight. A bias in
    integers has a scale."""
    path = changed(theirs, tmp_path / "more", {f"model.layers.0.mlp.up_proj.{last}": torch.ones(1, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"up_proj.{last}, {dtype}, lies beside a quantized weight, and is none"):
        convert(path, tmp_path / "out", progress=False)


def test_an_index_with_a_name_longer_than_any_file_has(theirs: Path, tmp_path: Path) -> None:
    path = changed(theirs, tmp_path / "more", {})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match=r"names 'x{200}', which is not in"):
        convert(path, tmp_path / "out", progress=False)


def test_a_quantized_head_is_not_tied(tmp_path: Path) -> None:
    """Whatever config.json says about it."""
    source = models.make_directory(tmp_path / "float", tie_word_embeddings=False)
    quantize_files(source, tmp_path / "q", {"lm_head": "int4-g32", "*_proj": "int4-g32"}, progress=False)
    convert(tmp_path / "q", tmp_path / "whole", to="gptq_v2", progress=False)
    path = edited(tmp_path / "whole", tmp_path / "tied", tie_word_embeddings=True)
    done = convert(path, tmp_path / "out", progress=False)
    assert done.weights["lm_head.weight"] == "int4-g32"
    assert read_manifest(tmp_path / "out").tied == {}


def test_the_dtype_where_config_json_is_silent(theirs: Path, tmp_path: Path) -> None:
    assert Foreign(edited(theirs, tmp_path / "a", dtype=None)).reader.dtype == torch.bfloat16


@pytest.mark.parametrize("said", ["float8_e4m3fn", "float64", "int8", "float12"])
def test_a_dtype_that_is_none_to_compute_in(said: str, theirs: Path, tmp_path: Path) -> None:
    """In that case the dtype of the tensors is used."""
    source = edited(theirs, tmp_path / "source", dtype=said)
    convert(source, tmp_path / "out", progress=False)
    assert {q.dtype for q in tensors(tmp_path / "out").values() if isinstance(q, QTensor)} == {torch.bfloat16}


def test_without_a_config(tmp_path: Path) -> None:
    """The result gets one, which contains only how its weights are quantized."""
    model = nn.Sequential(nn.Linear(64, 64)).half()
    bp.quantize_(model, "int4-g32-sym")
    bp.save(model, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="gptq", progress=False)
    assert config_in(tmp_path / "theirs").keys() == {"quantization_config"}
    convert(tmp_path / "theirs", tmp_path / "back", progress=False)
    assert_same(tensors(tmp_path / "back"), tensors(tmp_path / "ours"))
    convert(tmp_path / "ours", tmp_path / "float", to="float", progress=False)
    assert not (tmp_path / "float" / "config.json").exists()


def test_a_damaged_weight_is_named(theirs: Path, tmp_path: Path) -> None:
    path = edited(theirs, tmp_path / "damaged")
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in index if name.endswith("scales"))
    file = path / index[name]
    stored = load_file(file)
    save_file({**stored, name: stored[name][:, :-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=name.removesuffix(".scales").replace(".", "\\.")):
        convert(path, tmp_path / "out", progress=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_verb(ours: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(theirs), "-o", str(tmp_path / "back")]) == 0
    out = capsys.readouterr()
    assert "int4-g32" in out.out
    assert f"written to {tmp_path / 'back'}" in out.out
    assert "note" not in out.err
    assert main(["convert", str(ours), "--to", "gptq_v2", "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == "gptq_v2"
    assert main(["convert", str(ours), "--to", "gptq", "-o", str(tmp_path / "out")]) == 1
    assert "--overwrite" in capsys.readouterr().err


def test_quantizing_a_quantized_model_points_here(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bitport convert"):
        quantize_files(theirs, tmp_path, "int4")


def test_a_float_model(ours: Path, theirs: Path, float_model: Path, tmp_path: Path) -> None:
    done = convert(theirs, tmp_path / "out", to="float", progress=False)
    assert done.notes == ("weights are rounded to torch.bfloat16",)
    before, after = (config_in(path) for path in (float_model, tmp_path / "out"))
    assert before == after
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == load_file(float_model / "model.safetensors").keys()
    for name, tensor in tensors(ours).items():
        wanted = tensor.dequantize(torch.bfloat16) if isinstance(tensor, QTensor) else tensor
        assert torch.equal(stored[name], wanted), name
    quantize_files(tmp_path / "out", tmp_path / "anew", "int8", progress=False)


def test_a_float_model_rounds_no_inputs(float_model: Path, tmp_path: Path) -> None:
    quantize_files(float_model, tmp_path / "q", "fp8-block", progress=False)
    done = convert(tmp_path / "q", tmp_path / "out", to="float", progress=False)
    assert done.notes[1] == "inputs are not rounded any more, as they were for fp8-128"


def test_layers_that_lie_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's Conv1D is [K, N] in the model; in a GPTQ file it is an ordinary layer."""
    transformers, huggingface = models.transformers, pytest.importorskip("bitport.integrations.huggingface")
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 320, "n_positions": 64}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "float")
    quantize_files(tmp_path / "float", tmp_path / "q", "int4-g32", dtype=torch.bfloat16, progress=False)
    convert(tmp_path / "q", tmp_path / "out", to="gptq_v2", progress=False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    (name,) = (name for name in stored if name.endswith("0.mlp.c_fc.scales"))
    assert tuple(stored[name].shape) == (64 // 32, 256)
    convert(tmp_path / "out", tmp_path / "back", progress=False)
    assert_same(tensors(tmp_path / "back"), tensors(tmp_path / "q"))
    for to in ("torchao", "mlx", "hqq", "quanto"):
        with pytest.raises(ArgumentError, match=r"this one as \[K, N\] \(Conv1D\)"):
            convert(tmp_path / "back", tmp_path / to, to=to, progress=False)
    before, after = (huggingface.load_model(tmp_path / name) for name in ("q", "back"))
    assert torch.equal(models.logits(before), models.logits(after))
    convert(tmp_path / "back", tmp_path / "dense", to="float", progress=False)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    assert [tuple(value.shape) for name, value in dense.items() if name.endswith("c_fc.weight")] == [(64, 256)]


def test_a_model_without_any_quantized_weight_is_an_error(float_model: Path, tmp_path: Path) -> None:
    path = edited(
        float_model, tmp_path / "said", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 64}
    )
    with pytest.raises(CheckpointError, match="holds no such weight"):
        convert(path, tmp_path / "out", progress=False)


def test_others_point_here_too(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(theirs)]) == 0
    assert "quantized by gptq (bitport convert reads" in capsys.readouterr().out
    assert main(["explain", str(theirs)]) == 1
    assert f"bitport convert {theirs} -o OUT reads it" in capsys.readouterr().err
