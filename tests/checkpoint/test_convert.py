"""quantize_files: the same bits as quantize_ and save on the model, whatever the files look like."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bitport as bp
from bitport.checkpoint import plan_files, quantize_files, read_manifest
from bitport.checkpoint.arranged import arranged
from bitport.checkpoint.manifest import INDEX, Manifest
from bitport.checkpoint.source import Source
from bitport.errors import ArgumentError, CheckpointError, RecipeError

from .models import assert_same, raw, tensors_of

REPOSITORY = Path(__file__).resolve().parents[2]


class Block(nn.Module):
    """The weights of a Llama layer, with their names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(64, 64, bias=False) for name in "qkvo"})
        self.mlp = nn.ModuleDict({"gate_proj": nn.Linear(64, 96), "down_proj": nn.Linear(96, 64)})
        self.input_layernorm = nn.LayerNorm(64, bias=False)


class Llama(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(40, 64)
        self.model.layers = nn.ModuleList(Block() for _ in range(2))
        self.model.conv1 = nn.Conv1d(64, 8, 3)
        self.model.experts = nn.Module()
        self.model.experts.gate_up_proj = nn.Parameter(torch.randn(3, 96, 64))
        self.lm_head = nn.Linear(64, 40, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def write(model: nn.Module, directory: Path, *, shards: int = 1, tied: bool = True, **config: Any) -> None:
    """Write files like transformers: safetensors, an index if there are several, config.json, tokenizer files."""
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if tied:
        del state["lm_head.weight"]
    said = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps({**said, **config}))
    (directory / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(state)
    weight_map = {name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: state[name] for name in names if weight_map[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


RECIPES = {
    "int4": "int4-g32",
    "nvfp4": "nvfp4",
    "rules": {"*embed_tokens": "int8", "lm_head": "int8", "*.k_proj": "skip", "*conv1": "int8", "*": "int4-g32"},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_equal_to_the_model(recipe: str, shards: int, tied: bool, tmp_path: Path) -> None:
    model = Llama(tied)
    write(model, tmp_path / "hf", shards=shards, tied=tied)
    report = quantize_files(tmp_path / "hf", tmp_path / "files", RECIPES[recipe])
    expected = bp.quantize_(model, RECIPES[recipe])
    loaded = bp.load(lambda: Llama(tied), tmp_path / "files", verify=True)
    assert_same(model, loaded)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert {layer.name: layer for layer in report.layers} == {layer.name: layer for layer in expected.layers}
    assert (report.bytes_before, report.bytes_after) == (expected.bytes_before, expected.bytes_after)


class Misnamed(nn.Module):
    """Each weight is named like another kind, or has a property that its name does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(40, 64)
        self.rewritten = nn.Embedding(40, 64, max_norm=1.0)
        self.patch_embedding = nn.Linear(64, 96)
        self.upscale, self.cell = nn.ConvTranspose1d(64, 8, 3), nn.GRUCell(64, 64)
        self.bilinear = nn.Bilinear(8, 8, 16)
        self.register_buffer("table", torch.randn(8, 64))
        self.codebook = nn.Module()
        self.codebook.register_buffer("weight", torch.randn(8, 64))


@pytest.mark.parametrize("recipe", ["int4-g32", {"*": "int8"}], ids=str)
def test_modules_tell_more_than_names(recipe: Any, tmp_path: Path) -> None:
    model = Misnamed()
    write(model, tmp_path / "hf", tied=False)
    with torch.device("meta"):
        empty = Misnamed()
    plan = plan_files(tmp_path / "hf", recipe, model=empty)
    quantize_files(tmp_path / "hf", tmp_path / "files", recipe, model=empty)
    report = bp.quantize_(model, recipe)
    assert_same(model, bp.load(Misnamed, tmp_path / "files"))
    quantized = {layer.name for layer in report.quantized}
    assert {choice.name for choice in plan.quantized} == quantized
    more = {"token.weight", "upscale.weight", "cell.weight_ih", "cell.weight_hh"}
    assert quantized == {"patch_embedding.weight"} | (more if recipe != "int4-g32" else set())
    assert {choice.name for choice in plan_files(tmp_path / "hf", recipe).quantized} != quantized


def test_saved_files_are_equal_too(tmp_path: Path) -> None:
    """Beyond the loaded values: every entry of the manifests is equal, including checksums."""
    model = Llama()
    write(model, tmp_path / "hf")
    quantize_files(tmp_path / "hf", tmp_path / "files", "mxfp4")
    bp.quantize_(model, "mxfp4")
    bp.save(model, tmp_path / "model")
    files, saved = read_manifest(tmp_path / "files"), read_manifest(tmp_path / "model")
    assert files.tied == saved.tied
    assert set(files.tensors) == set(saved.tensors)
    for name, entry in files.tensors.items():
        assert (entry.parts, entry.scheme, entry.dtype) == (
            saved.tensors[name].parts,
            saved.tensors[name].scheme,
            saved.tensors[name].dtype,
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast_first(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Llama()
    write(model, tmp_path / "hf")
    quantize_files(tmp_path / "hf", tmp_path / "files", "int4-g32", dtype=dtype)
    model.to(dtype)
    bp.quantize_(model, "int4-g32")
    assert_same(model, bp.load(Llama, tmp_path / "files"))


def test_head_that_is_held_twice(tmp_path: Path) -> None:
    """Some files hold the tied weight under both names: tied if the values are equal, otherwise two weights."""
    model = Llama()
    write(model, tmp_path / "equal", tied=False, tie_word_embeddings=True)
    quantize_files(tmp_path / "equal", tmp_path / "a", {"*": "int8"})
    assert read_manifest(tmp_path / "a").tied == {"lm_head.weight": "model.embed_tokens.weight"}
    names = [choice.name for choice in plan_files(tmp_path / "equal", {"*": "int8"}).choices]
    assert sorted(names) == sorted(set(names))
    write(Llama(tied=False), tmp_path / "other", tied=False, tie_word_embeddings=True)
    quantize_files(tmp_path / "other", tmp_path / "b", {"*": "int8"})
    assert read_manifest(tmp_path / "b").tied == {}


def test_a_head_that_is_held_twice_under_other_names(tmp_path: Path) -> None:
    """As in files of a model with images, whose text model transformers has since given other names."""

    def renamed(manifest: Manifest) -> Manifest:
        entries = {name.removeprefix("text."): entry for name, entry in manifest.tensors.items()}
        return dataclasses.replace(manifest, tensors={name: arranged(name, [[each]]) for name, each in entries.items()})

    for equal in (True, False):
        head, embedded = torch.randn(2, 40, 64).unbind()
        state = {"text.lm_head.weight": embedded.clone() if equal else head, "text.embed_tokens.weight": embedded}
        save_file(state, tmp_path / "model.safetensors")
        said = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(said))
        tied = {"lm_head.weight": "embed_tokens.weight"} if equal else {}
        assert Source(tmp_path, arrangement=renamed).tied == tied


def test_a_tied_head_of_another_name(tmp_path: Path) -> None:
    """Such as Whisper's: the files do not mention it, and the model ties it itself."""

    def build() -> nn.Module:
        model = Llama()
        model.proj_out = model.lm_head
        del model.lm_head
        return model

    model = build()
    write(Llama(), tmp_path / "hf", architectures=["WhisperForConditionalGeneration"])
    save_file({k: v for k, v in model.state_dict().items() if k[:4] != "proj"}, tmp_path / "hf" / "model.safetensors")
    quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    bp.quantize_(model, "int8")
    assert_same(model, bp.load(build, tmp_path / "out"))


def test_model_without_a_head(tmp_path: Path) -> None:
    """The base model of a tied one has nothing to tie."""
    write(Llama(), tmp_path / "hf", architectures=["LlamaModel"])
    quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    assert read_manifest(tmp_path / "out").tied == {}


def test_what_is_carried_over(tmp_path: Path) -> None:
    source, out = tmp_path / "hf", tmp_path / "out"
    write(Llama(), source, shards=2)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("pool")
    for left in ("pytorch_model.bin", "original.pth", "model.gguf", ".gitattributes"):
        (source / left).write_text("weights")
    quantize_files(source, out, "int8")
    shards = read_manifest(out).shards
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {"bitport.json", INDEX, "config.json", "tokenizer.json", "1_Pooling/config.json", *shards}
    said = json.loads((source / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == said | {"quantization_config": {"quant_method": "bitport"}}


def test_a_folder_that_has_the_name_of_ours(tmp_path: Path) -> None:
    write(Llama(), tmp_path / "hf")
    (tmp_path / "hf" / "unfinished").mkdir()
    (tmp_path / "hf" / "unfinished" / "journal.json").write_text("theirs")
    with pytest.warns(UserWarning, match="hf/unfinished is not carried over"):
        quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    assert not (tmp_path / "out" / "unfinished").exists()


def test_links(tmp_path: Path) -> None:
    """Links to the whole directory and within it are treated like files."""
    write(Llama(), tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "blob")
    (tmp_path / "hf" / "model.safetensors").symlink_to("blob")
    (tmp_path / "link").symlink_to("hf")
    quantize_files(tmp_path / "link", tmp_path / "out", "int8")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_pipe_by_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        quantize_files(tmp_path / "m.safetensors", tmp_path / "out", "int8")


@pytest.mark.parametrize("given", ["", "model.safetensors"])
def test_single_file(given: str, tmp_path: Path) -> None:
    """By itself, or in a directory beside one of the same model in another precision."""
    model = Llama()
    write(model, tmp_path / "hf")
    save_file({"lm_head.weight": torch.ones(40, 64).half()}, tmp_path / "hf" / "model.fp16.safetensors")
    quantize_files(tmp_path / "hf" / given, tmp_path / "out", "int8-dyn")
    bp.quantize_(model, "int8-dyn")
    assert_same(model, bp.load(Llama, tmp_path / "out"))


def test_other_dtypes_go_through(tmp_path: Path) -> None:
    made = {
        "layer.weight": torch.randn(8, 32),
        "norm.weight": torch.randn(8, dtype=torch.float64),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "eight.weight": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }
    save_file(made, tmp_path / "m.safetensors")
    quantize_files(tmp_path / "m.safetensors", tmp_path / "out", "int8")
    manifest = read_manifest(tmp_path / "out")
    assert {name: entry.dtype for name, entry in manifest.tensors.items()} == {n: t.dtype for n, t in made.items()}
    assert [name for name, entry in manifest.tensors.items() if entry.scheme] == ["layer.weight"]


def test_plan_reads_headers_only(tmp_path: Path) -> None:
    write(Llama(), tmp_path / "hf")
    plan = plan_files(tmp_path / "hf", RECIPES["rules"])
    assert str(plan["model.embed_tokens.weight"].scheme) == str(plan["lm_head.weight"].scheme) == "int8"
    assert plan["model.layers.0.self_attn.k_proj.weight"].reason == "rule '*.k_proj' says skip"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_rule_that_fits_nothing(tmp_path: Path) -> None:
    write(Llama(), tmp_path / "hf")
    with pytest.raises(RecipeError, match=r"rule 'nowhere\.\*'"):
        quantize_files(tmp_path / "hf", tmp_path / "out", {"nowhere.*": "int8"})
    assert not (tmp_path / "out").exists()


def test_both_names_of_a_tied_weight_say_what_was_done(tmp_path: Path) -> None:
    """Each by its own rule, with the reason for any deviation from the request."""
    model = Llama()
    write(model, tmp_path / "hf")
    recipe = {"*embed_tokens": "mxfp4-wo", "lm_head": "mxfp4-wo", "*.k_proj": "int8"}
    expected = {layer.name: layer for layer in bp.quantize_(model, recipe, algorithm="hqq").layers}
    report = quantize_files(tmp_path / "hf", tmp_path / "out", recipe, algorithm="hqq")
    assert {layer.name: layer for layer in report.layers} == expected
    head = expected["lm_head.weight"]
    assert (head.tied, head.algorithm) == (True, "rtn")
    assert head.why == "rule 'lm_head'; hqq fits scales, but those of this format are powers of two"


def test_static_schemes_need_the_model(tmp_path: Path) -> None:
    write(Llama(), tmp_path / "hf")
    with pytest.raises(ArgumentError, match=r"13 weights .* have a static input scale.*bitport quantize --data FILE"):
        quantize_files(tmp_path / "hf", tmp_path / "out", "int8-static")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_weights_that_are_no_numbers(value: float, tmp_path: Path) -> None:
    model = Llama()
    with torch.no_grad():
        model.model.layers[1].self_attn["v_proj"].weight[3, 5] = value
    write(model, tmp_path / "hf")
    with pytest.raises(ArgumentError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight holds NaN or infinity"):
        quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    assert list((tmp_path / "out").iterdir()) == []


def test_failure_leaves_the_old_target(tmp_path: Path) -> None:
    good, out = Llama(), tmp_path / "out"
    write(good, tmp_path / "good")
    quantize_files(tmp_path / "good", out, "int8")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    bad = Llama()
    bad.model.layers[1].mlp["down_proj"].weight.data.fill_(float("nan"))
    write(bad, tmp_path / "bad", surprise=1)
    with pytest.raises(ArgumentError, match="NaN"):
        quantize_files(tmp_path / "bad", out, "int4-g32", shard_size=1, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_is_there_is_replaced_on_demand(tmp_path: Path) -> None:
    """Another model never is."""
    source, out = tmp_path / "hf", tmp_path / "out"
    write(Llama(), source)
    quantize_files(source, out, "int8")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for resume, message in ((False, "holds a checkpoint already; --overwrite"), (True, "nothing is left to resume")):
        with pytest.raises(ArgumentError, match=message):
            quantize_files(source, out, "int4-g32", resume=resume)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    quantize_files(source, out, "int4-g32", overwrite=True)
    assert {str(entry.scheme) for entry in read_manifest(out).tensors.values() if entry.scheme} == {"int4-g32"}
    write(Llama(), tmp_path / "other")
    with pytest.raises(ArgumentError, match="other holds another model already"):
        quantize_files(source, tmp_path / "other", "int8", overwrite=True)


def _only(name: str) -> Any:
    def make(directory: Path) -> None:
        directory.mkdir()
        (directory / name).write_bytes(b"x")

    return make


def _written(change: Any) -> Any:
    def make(directory: Path) -> None:
        write(Llama(), directory, shards=2)
        change(directory)

    return make


def _elsewhere(path: Path) -> None:
    moved = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(moved)


def _elsewhere_alone(directory: Path) -> None:
    write(Llama(), directory)
    _elsewhere(directory / "model.safetensors")


def _pipe(directory: Path) -> None:
    directory.mkdir()
    os.mkfifo(directory / "model.safetensors")


NORM, FIRST, SECOND, THIRD = "model.norm.weight", *(f"model-0000{at}-of-00002.safetensors" for at in (1, 2, 3))
TWICE = f"{NORM} is in {FIRST} and in {SECOND} of .*, and 'weight_map' of its index "


def _twice(directory: Path, said: str | None) -> None:
    """Put ``NORM`` into both shards, as twos in the second; the index names ``said``."""
    for file, value in ((FIRST, 1.0), (SECOND, 2.0)):
        save_file({**load_file(directory / file), NORM: torch.full((64,), value)}, directory / file)
    save_file({"more": torch.ones(1)}, directory / THIRD)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"more": THIRD, NORM: said}
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("said", "value"), [(FIRST, 1.0), (SECOND, 2.0)])
def test_the_index_says_which_of_two_counts(said: str, value: float, tmp_path: Path) -> None:
    _written(lambda d: _twice(d, said))(tmp_path / "hf")
    quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    (shard,) = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(shard)[NORM], torch.full((64,), value))


BAD_SOURCES = {
    "nothing": (lambda directory: None, "does not exist"),
    "empty": (lambda directory: directory.mkdir(), r"has no \.safetensors file. Give a Hugging Face directory"),
    "pickle": (_only("pytorch_model.bin"), r"pytorch_model\.bin is a pickle, which can run any code"),
    "torn": (_only("model.safetensors"), "not a whole safetensors file"),
    "config": (_written(lambda d: (d / "config.json").write_text("{")), "config.json is not JSON"),
    "config list": (_written(lambda d: (d / "config.json").write_text("[]")), "no object: it holds list"),
    "index": (_written(lambda d: (d / "model.safetensors.index.json").write_text("{}")), "has no 'weight_map'"),
    "shard lost": (
        _written(lambda d: (d / "model-00001-of-00002.safetensors").unlink()),
        "names 'model-00001-of-00002.safetensors', which is not in",
    ),
    "tensor lost": (
        _written(lambda d: save_file({"a": torch.ones(1)}, d / "model-00001-of-00002.safetensors")),
        "tensors of .* are in no file: ",
    ),
    "in two shards": (_written(lambda d: _twice(d, None)), f"{TWICE}names no file for it"),
    "in two shards but not there": (_written(lambda d: _twice(d, THIRD)), f"{TWICE}names {THIRD} for it: make it name"),
    "index leads out": (
        _written(
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
        ),
        r"names '\.\./x.safetensors', which is not in",
    ),
    "index lost": (
        _written(lambda d: (d / "model.safetensors.index.json").unlink()),
        "has 2 .safetensors files and no",
    ),
    "quantized": (
        _written(lambda d: (d / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')),
        r"is quantized already \(gptq\)",
    ),
    "quantized text model": (
        _written(lambda d: (d / "config.json").write_text('{"text_config": {"quantization_config": {"bits": 4}}}')),
        r"is quantized already \(None\)",
    ),
    "a shard elsewhere": (
        _written(lambda d: _elsewhere(d / "model-00001-of-00002.safetensors")),
        "model-00001-of-00002.safetensors is a link that leads out of its directory",
    ),
    "an index elsewhere": (_written(lambda d: _elsewhere(d / "model.safetensors.index.json")), "leads out of its"),
    "a single file elsewhere": (_elsewhere_alone, "model.safetensors is a link that leads out of its directory"),
    "a tokenizer elsewhere": (
        _written(lambda d: _elsewhere(d / "tokenizer.json")),
        r"tokenizer\.json is a link that leads out of its directory, to .*, and is not followed: put the file itself",
    ),
    "a pipe": (_pipe, "is not a regular file"),
    "bitport": (lambda directory: bp.save(nn.Linear(2, 2), directory), "is a bitport checkpoint already"),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_source(name: str, tmp_path: Path) -> None:
    make, message = BAD_SOURCES[name]
    make(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=message):
        quantize_files(tmp_path / "hf", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_pickle_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.pt is not a \.safetensors file.*is a pickle"):
        quantize_files(tmp_path / "model.pt", tmp_path / "out", "int8")


@pytest.mark.parametrize("target", [".", "below"])
def test_target_in_the_source(target: str, tmp_path: Path) -> None:
    write(Llama(), tmp_path)
    with pytest.raises(ArgumentError, match="lies in the source"):
        quantize_files(tmp_path, tmp_path / target, "int8")


def test_transposed_linear_layers(tmp_path: Path) -> None:
    """GPT-2: c_fc is stored as [K, N], and is quantized along K."""
    made = {"h.0.mlp.c_fc.weight": torch.randn(64, 24)}
    (tmp_path / "hf").mkdir()
    save_file(made, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt2"}')
    quantize_files(tmp_path / "hf", tmp_path / "out", "int4-g32")
    entry = read_manifest(tmp_path / "out").tensors["h.0.mlp.c_fc.weight"]
    assert entry.transposed
    assert entry.shape == (64, 24)
    assert entry.parts["scale"].shape == (24, 2)


@pytest.mark.skipif(not (REPOSITORY / "models/tinylm/model.safetensors").is_file(), reason="models/tinylm is not there")
def test_bundled_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = REPOSITORY / "models/tinylm"
    quantize_files(source, tmp_path, "int4")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    bp.quantize_(model, "int4", measure=False)
    loaded = bp.load(transformers.AutoModelForCausalLM.from_config(model.config, dtype=model.dtype), tmp_path).eval()
    mine, theirs = tensors_of(model), tensors_of(loaded)
    assert {name: raw(tensor) for name, tensor in mine.items()} == {name: raw(t) for name, t in theirs.items()}
    ids = torch.arange(12)[None]
    assert torch.equal(model.eval()(ids).logits, loaded(ids).logits)
