"""Reading and writing Hugging Face directories: a loaded model computes exactly what the quantized model computed."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bitport as bp
from bitport import checkpoint
from bitport.cli.calibration import WINDOW, window_of
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.integrations import huggingface as hf
from bitport.integrations.empty import EmptyOnMeta
from bitport.integrations.generation import own_text, random_apart

from .models import config, logits, make_directory, transformers
from .zoo import ZOO


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_directory(tmp_path_factory.mktemp("hf") / "llama", tie_word_embeddings=request.param)


def pretrained(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"pad_token_id": 10**6},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0, "rope_theta": 1.0}},
    ],
    ids=str,
)
def test_settings_that_transformers_does_not_expect(change: dict[str, Any], directory: Path, tmp_path: Path) -> None:
    """ZeroDivisionError and AssertionError of transformers came out as they were."""
    said = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | change))
    with pytest.raises(BitportError, match="transformers cannot read"):
        hf.empty_model(tmp_path)


@pytest.mark.parametrize("quantized", [False, True])
def test_more_layers_than_tensors(quantized: bool, directory: Path, tmp_path: Path) -> None:
    """A list of a billion layers would fill the memory before a weight is looked for. Other settings look
    alike: in Gemma 3n a number of words, and in small models a default that is larger than the model."""
    if quantized:
        checkpoint.quantize_files(directory, tmp_path / "model", "int4", progress=False)
    else:
        shutil.copytree(directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"num_hidden_layers": 10**9}))
    for build in (hf.load_model, hf.empty_model, hf.named_model):
        with pytest.raises(CheckpointError, match=r"config\.json describes 1000000000 layers, and its"):
            build(tmp_path / "model")
    path.write_text(json.dumps(said | {"vocab_size_per_layer_input": 10**5, "max_window_layers": 28}))
    hf.load_model(tmp_path / "model")


@pytest.mark.parametrize("scheme", ["int4", "int8-dyn", "mxfp4"])
def test_files_and_model_are_quantized_alike(directory: Path, tmp_path: Path, scheme: str) -> None:
    model = pretrained(directory)
    before = logits(model)
    bp.quantize_(model, scheme)
    checkpoint.quantize_files(directory, tmp_path, scheme)
    loaded = hf.load_model(tmp_path)
    assert not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), before)
    assert loaded.generation_config.repetition_penalty == 1.25


def test_float_directory_is_loaded_as_transformers_does(directory: Path) -> None:
    model, judge = hf.load_model(directory), pretrained(directory)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), logits(judge))


def test_save_model_makes_a_whole_directory(directory: Path, tmp_path: Path) -> None:
    model = pretrained(directory)
    bp.quantize_(model, {"*.mlp.*": "int4-g32", "model.embed_tokens": "int8", "*": "int8"})
    hf.save_model(model, tmp_path, hf.load_tokenizer(directory))
    loaded = hf.load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert hf.load_tokenizer(tmp_path).decode(hf.token_ids(hf.load_tokenizer(tmp_path), "a b")) == "a b"
    assert loaded.generation_config.repetition_penalty == 1.25


def test_a_float_model_that_was_saved_over_a_quantized_one(directory: Path, tmp_path: Path) -> None:
    """load_model, and with it the command line, gave the older one, and transformers the newer."""
    model = pretrained(directory)
    bp.quantize_(model, "int4")
    hf.save_model(model, tmp_path)
    pretrained(directory).save_pretrained(tmp_path)
    with pytest.raises(BitportError, match=r"holds two models.*\(model\.safetensors\): remove bitport\.json, or"):
        hf.load_model(tmp_path)
    (tmp_path / "bitport.json").unlink()
    assert torch.equal(logits(hf.load_model(tmp_path)), logits(pretrained(directory)))


def test_what_is_no_model_of_transformers_is_refused_before_anything_is_written(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=r"not a Linear; bitport.save\(model, directory\) writes any other"):
        hf.save_model(nn.Linear(3, 3), tmp_path / "out")
    with pytest.raises(ArgumentError, match="a tokenizer is one of transformers, not 'name'"):
        hf.save_model(hf.load_model(directory), tmp_path / "out", "name")
    assert not (tmp_path / "out").exists()


def test_tied_head_stays_one_parameter(directory: Path, tmp_path: Path) -> None:
    tied = transformers.AutoConfig.from_pretrained(directory).tie_word_embeddings
    checkpoint.quantize_files(directory, tmp_path, {"*embed_tokens": "int8", "*": "int8"})
    loaded = hf.load_model(tmp_path)
    assert isinstance(loaded.lm_head.weight, bp.QTensor)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("name", ["llava", "emu3"])
def test_language_models_that_transformers_does_not_list(name: str, tmp_path: Path) -> None:
    """AutoModelForCausalLM takes neither: config.json names the class."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "emu3":
        ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        said = transformers.Emu3TextConfig(vocab_size=320, num_key_value_heads=2, **sizes, **ends)
        kind = transformers.Emu3ForCausalLM
    else:
        seen = transformers.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=32, **sizes)
        said = transformers.LlavaConfig(vision_config=seen, text_config=config(pad_token_id=0), image_token_index=319)
        kind = transformers.LlavaForConditionalGeneration
    torch.manual_seed(0)
    kind(said).bfloat16().save_pretrained(tmp_path / "float")
    right = kind.from_pretrained(tmp_path / "float")
    assert torch.equal(logits(hf.load_model(tmp_path / "float")), logits(right))
    checkpoint.quantize_files(tmp_path / "float", tmp_path / "out", "int4")
    bp.quantize_(right, "int4")
    loaded = hf.load_model(tmp_path / "out")
    assert isinstance(loaded, kind)
    assert torch.equal(logits(loaded), logits(right))


def test_positions_are_those_of_what_writes() -> None:
    """A model that sees too has them in the config of its decoder, and XLNet has no limit, which it says by -1."""
    with torch.device("meta"):
        seen = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(text_config=config()))
        unlimited = transformers.XLNetLMHeadModel(transformers.XLNetConfig(n_layer=1))
        plain = transformers.LlamaForCausalLM(config())
    assert [hf.positions_of(each) for each in (plain, seen, unlimited)] == [256, 256, None]
    assert window_of(unlimited) == WINDOW


def test_dtype_is_what_is_computed_in_and_numbers_stay(directory: Path, tmp_path: Path) -> None:
    checkpoint.quantize_files(directory, tmp_path, "int4")
    plain, cast = hf.load_model(tmp_path), hf.load_model(tmp_path, dtype=torch.float32)
    assert logits(cast).dtype == torch.float32
    assert cast.lm_head.weight.dtype == torch.float32
    for (name, before), after in zip(plain.named_parameters(), cast.parameters(), strict=True):
        if isinstance(before, bp.QTensor):
            assert torch.equal(before.qdata, after.qdata), name
            assert torch.equal(before.scale, after.scale), name
    down = hf.load_model(tmp_path, dtype=torch.float16)
    assert {buffer.dtype for buffer in down.buffers()} == {torch.float32}
    with pytest.raises(BitportError, match=r"dtype must be a dtype of floats, .* not torch.int8"):
        hf.load_model(tmp_path, dtype=torch.int8)


ROTARY: dict[str, Callable[[], Any]] = {
    "llama": config,
    "llama3-scaled": lambda: config(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "gemma3-embedding-scale": lambda: transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ),
}


@pytest.mark.parametrize("kind", ROTARY)
def test_empty_model_has_real_buffers_and_no_matrices(kind: str, tmp_path: Path) -> None:
    ROTARY[kind]().save_pretrained(tmp_path)
    empty = hf.empty_model(tmp_path)
    judge = transformers.AutoModelForCausalLM.from_config(ROTARY[kind]())
    assert {p.device.type for p in empty.parameters() if p.dim() > 1} == {"meta"}
    buffers = dict(empty.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], value) for name, value in judge.named_buffers())


def test_an_empty_model_of_zeros(tmp_path: Path) -> None:
    """The experts of Llama 4 are created as zeros, and are most of the model."""
    config, fields = ZOO["llama 4, transposed experts"][1:3]
    getattr(transformers, config)(**fields).save_pretrained(tmp_path)
    empty = hf.empty_model(tmp_path)
    assert {param.device.type for param in empty.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in empty.buffers()} == {"cpu"}


def test_the_empty_context_leaves_tied_parameters_tied() -> None:
    with EmptyOnMeta():
        shared = nn.Parameter(torch.zeros(2, 3))
        model = nn.Module()
        model.first, model.second, model.third = shared, shared, nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    assert model.first is model.second
    assert [param.device.type for param in model.parameters()] == ["meta", "meta"]
    assert [param.requires_grad for param in model.parameters()] == [True, False]
    outside = nn.Linear(2, 2)
    assert outside.weight.device.type == "cpu"


def test_the_empty_context_is_of_its_thread() -> None:
    found: list[str] = []
    with EmptyOnMeta():
        other = threading.Thread(
            target=lambda: found.extend((torch.empty(1).device.type, nn.LayerNorm(1).weight.device.type))
        )
        other.start()
        other.join()
        assert torch.empty(2, 3, dtype=torch.float16).device.type == "meta"
        assert torch.ones(1).device.type == "cpu"
    assert [*found, torch.empty(1).device.type] == ["cpu", "cpu", "cpu"]


def _no_directory(path: Path) -> None:
    hf.load_model(path / "none")


def _no_config(path: Path) -> None:
    hf.load_model(path)


def _bad_config(path: Path) -> None:
    (path / "config.json").write_text("{")
    hf.load_model(path)


def _unknown_model(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "nothing-known"}')
    hf.empty_model(path)


def _no_language_model(path: Path) -> None:
    transformers.T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(path)
    hf.empty_model(path)


def _no_text_without_an_image(path: Path) -> None:
    transformers.BlipConfig(architectures=["BlipForConditionalGeneration"]).save_pretrained(path)
    hf.empty_model(path)


def _class_that_is_a_number(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({**config().to_dict(), "architectures": 5}, default=str))
    hf.named_model(path)


def _uneven_heads(path: Path) -> None:
    made = config().to_dict()
    (path / "config.json").write_text(json.dumps({**made, "hidden_size": 77}, default=str))
    hf.empty_model(path)


def _part_of_another_library(path: Path) -> None:
    made = config().to_dict()
    (path / "config.json").write_text(json.dumps({**made, "text_config": {"quantization_config": {}}}, default=str))
    hf.empty_model(path)


def _no_weights(path: Path) -> None:
    config().save_pretrained(path)
    hf.load_model(path)


def _cut_weights(path: Path) -> None:
    config().save_pretrained(path)
    (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    hf.load_model(path)


def _pickled_weights(path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config())
    model.config.save_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    hf.load_model(path)


def _weights_that_lack_a_head(path: Path) -> None:
    make_directory(path, tie_word_embeddings=False)
    file = path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "lm_head" not in name}, file, {"format": "pt"})
    hf.load_model(path)


def _no_tokenizer(path: Path) -> None:
    config().save_pretrained(path)
    hf.load_tokenizer(path)


PROBLEMS = {
    "no directory": (_no_directory, "is not a directory.*hf download"),
    "no config": (_no_config, r"has no config\.json"),
    "config is no JSON": (_bad_config, "config.json is not JSON"),
    "unknown model": (_unknown_model, "nothing-known"),
    "class that is a number": (_class_that_is_a_number, "says architectures=5, which must be a list of class names"),
    "sizes that do not fit": (_uneven_heads, "transformers cannot read .* multiple of the number of attention heads"),
    "config of another shape": (_part_of_another_library, "transformers cannot read"),
    "no language model": (
        _no_language_model,
        "cannot read [^ ]+: it is no causal language model; .{,99}$",
    ),
    "no text without an image": (_no_text_without_an_image, "it is no causal language model; "),
    "no weights": (_no_weights, r"has no \.safetensors file"),
    "cut weights": (_cut_weights, "not a whole safetensors file"),
    "pickled weights": (_pickled_weights, r"pytorch_model\.bin is a pickle"),
    "weights that lack a head": (
        _weights_that_lack_a_head,
        r"no whole LlamaForCausalLM: .* lack lm_head\.weight$",
    ),
    "no tokenizer": (_no_tokenizer, "cannot read [^ ]+: it has no tokenizer that can be read: fetch .*tokenizer.json"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_cannot_be_read_gives_one_clear_error(problem: str, tmp_path: Path) -> None:
    act, message = PROBLEMS[problem]
    with pytest.raises(BitportError, match=message):
        act(tmp_path)


@pytest.mark.parametrize("read", [hf.load_model, hf.empty_model, hf.load_tokenizer])
def test_code_beside_a_model_is_never_run(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever transformers asks, and even if the answer is yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    make_directory(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    kinds = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "model_type": "own", "auto_map": kinds}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": kinds}))
    with pytest.raises(BitportError, match="code of its own, which is never run"):
        read(tmp_path)
    assert not ran.exists()


def test_missing_transformers_is_named_with_its_command(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BitportError, match=r"pip install 'bitport\[hf\]'"):
        hf.load_model(directory)


def test_a_text_of_the_models_own_is_drawn_by_its_seed_alone(directory: Path) -> None:
    model, state = pretrained(directory), torch.random.get_rng_state()
    first, again, other = (own_text(model, tokens=24, window=16, seed=seed) for seed in (1, 1, 2))
    assert [ids.shape for ids in first] == [(1, 16), (1, 8)]
    assert torch.equal(torch.cat(first, 1), torch.cat(again, 1))
    assert not torch.equal(torch.cat(first, 1), torch.cat(other, 1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_text_of_the_models_own_tells_how_far_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, since a large model writes for hours."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("bitport.report.progress.WATCHED_AFTER", 0.0)
    own_text(pretrained(directory), tokens=6, window=4, seed=1)
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("writing calibration text [########################] 6/6")
    )


def test_random_numbers_of_the_models_device_alone_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: drawn.append(device) or torch.empty(0))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *args: None)
    for device in ("cpu", "cuda:3"):
        with random_apart(torch.device(device)):
            pass
    assert drawn == [torch.device("cuda:3")]
