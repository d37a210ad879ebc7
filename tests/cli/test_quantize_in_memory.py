"""``bitport quantize --in-memory`` on models that are more than a causal language model."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bitport as bp
from bitport.checkpoint import read_manifest
from bitport.integrations.huggingface import load_model

from ..integrations.models import make_tokenizer, transformers
from .conftest import Run

SIZES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 1, "attention_heads": 4, "ffn_dim": 96}.items()
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which AutoModelForCausalLM loads only the decoder."""
    directory = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    config = transformers.WhisperConfig(
        vocab_size=320, d_model=64, num_mel_bins=16, max_source_positions=32, max_target_positions=64, **SIZES, **ends
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that AutoModelForCausalLM does not know."""
    directory = tmp_path_factory.mktemp("t5")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=320, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(directory)
    make_tokenizer(directory)
    return directory


def test_all_of_an_encoder_and_a_decoder_is_written(run: Run, whisper: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers.core_model_loading", reason="from_pretrained of bitport needs transformers 5")
    import bitport.integrations.transformers  # noqa: F401

    words = ("quantize", whisper, "--scheme", "int4", "--in-memory", "-o", tmp_path / "out", "--json")
    foretold, ran = run(*words, "--dry-run"), run(*words)
    assert ran.code == 0, ran.err
    assert foretold.data["bytes_after"] == ran.data["bytes_after"]
    right = transformers.WhisperForConditionalGeneration.from_pretrained(whisper)
    held = read_manifest(tmp_path / "out")
    assert held.tensors.keys() | held.tied.keys() == right.state_dict().keys()
    bp.quantize_(right, "int4")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    given = {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": torch.arange(12).reshape(2, 6)}
    assert torch.equal(model(**given).logits, right(**given).logits)


def test_no_checkpoint_without_the_files_beside_it(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They appear together, so a run that fails while it copies them leaves no checkpoint."""

    def fails(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ("quantize", llama, "--scheme", "int4", "--in-memory", "-o", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fails)
        ran = run(*words)
    assert ran.code == 1
    assert "No space left on device. What was there before is untouched" in ran.err
    assert [*(tmp_path / "out").iterdir()] == []
    assert run(*words).code == 0
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("model", ["whisper", "t5"])
def test_advice_for_a_model_that_no_text_calibrates(
    run: Run, request: pytest.FixtureRequest, text: Path, tmp_path: Path, model: str
) -> None:
    """What it advises is done here; --in-memory, which it advised before, refuses these models."""
    source = request.getfixturevalue(model)
    ran = run("quantize", source, "--scheme", "int4", "--algorithm", "gptq", "--data", text, "-o", tmp_path / "out")
    assert ran.code == 1
    assert "calibrate=batches" in ran.err
    assert "--in-memory" not in ran.err
    whole = load_model(source, causal=False)
    ids = torch.arange(12).reshape(2, 6)
    given = {"input_features": torch.randn(2, 16, 64)} if model == "whisper" else {"input_ids": ids}
    report = bp.quantize_(whole, "int4", algorithm="gptq", calibrate=[{**given, "decoder_input_ids": ids}])
    assert "gptq" in {layer.algorithm for layer in report.layers}


@pytest.mark.parametrize("how", [["--algorithm", "gptq"], ["--scheme", "auto", "--bits", "5"]], ids=["gptq", "auto"])
def test_a_part_is_not_written_for_the_whole(
    run: Run, whisper: Path, text: Path, tmp_path: Path, how: list[str]
) -> None:
    words = ("quantize", whisper, "--scheme", "int4", *how, "--data", text, "--in-memory")
    ran = run(*words, "-o", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert "is more than a WhisperForCausalLM, which has no model.encoder." in ran.err


def test_tensors_that_the_model_has_no_place_for(run: Run, llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "llama"
    source.mkdir()
    for path in llama.glob("*"):
        if path.suffix != ".safetensors" and "index" not in path.name:
            (source / path.name).write_bytes(path.read_bytes())
    tensors = {name: held for path in llama.glob("*.safetensors") for name, held in load_file(path).items()}
    save_file(tensors | {"model.extra.weight": torch.ones(4, 4)}, source / "model.safetensors", {"format": "pt"})
    ran = run("quantize", source, "--scheme", "int4", "--in-memory", "-o", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (1, False)
    assert "is more than a LlamaForCausalLM, which has no model.extra.weight: " in ran.err
