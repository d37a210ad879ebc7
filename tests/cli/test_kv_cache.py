"""--kv-cache: generate, eval and compare with a quantized KV cache give what the library computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bitport.cli import main as cli
from bitport.cli.generate import cache_for
from bitport.errors import ArgumentError
from bitport.evaluate import perplexity
from bitport.integrations import kv_cache
from bitport.integrations.cache_name import with_cache
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids
from bitport.ops import use_kernel
from tests.backends.taken import compiled

from .conftest import Run

READING = ("--window", 64, "--max-tokens", 200, "--dtype", "float32", "--json")


def test_generate(run: Run, llama: Path) -> None:
    words = ("--max-new-tokens", 8, "--kv-cache", "int4-g32+first2", "--json")
    data = run("generate", llama, "--prompt", "The quick", *words).data
    model, tokenizer = load_model(llama), load_tokenizer(llama)
    inputs = tokenizer("The quick", return_tensors="pt")
    cache = kv_cache.KVCache.of(model, "int4-g32+first2")
    greedy = {"do_sample": False, "repetition_penalty": 1.0}  # generation_config.json says 1.25
    options = {**greedy, "max_new_tokens": 8, "pad_token_id": 0, **with_cache(model, cache)}
    ids = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, **options)
    assert data["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that caches are made in; a model whose cache is another kind is "other"."""
    formats: list[str] = []
    make = kv_cache.KVCache.of

    def made(model: Any, format: str) -> Any:
        formats.append(format)
        if formats[0] == "other":
            raise ArgumentError("no layer of this model keeps every token")
        return make(model, format)

    monkeypatch.setattr(kv_cache.KVCache, "of", made)
    return formats


WORDS = ("--prompt", "The quick", "--max-new-tokens", 8, "--dtype", "float32", "--json")


@compiled
def test_generate_reads_floats_in_place_where_that_is_faster(
    run: Run, llama: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    text = run("generate", llama, *WORDS).data["text"]
    assert asked == ["float"]
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert run("generate", llama, *WORDS).data["text"] == text
    with use_kernel("attention=generic"):
        assert run("generate", llama, *WORDS).data["text"] == text
    assert asked == ["float"]


@compiled
def test_generate_leaves_other_caches_to_transformers(run: Run, llama: Path, asked: list[str]) -> None:
    asked.append("other")
    assert run("generate", llama, *WORDS).code == 0
    assert run("generate", llama, *WORDS, "--kv-cache", "int8").code == 1


@compiled
def test_generate_leaves_a_model_with_an_attention_of_its_own_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    fields = {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    model = transformers.MptForCausalLM(transformers.MptConfig(**fields))
    assert cache_for(model, None) == {}
    assert cache_for(model, "int8")
    assert model.config._attn_implementation == "eager"


def test_generate_where_the_model_names_a_cache(run: Run, llama: Path, tmp_path: Path) -> None:
    """transformers takes only one of the two."""
    shutil.copytree(llama, tmp_path / "llama")
    said = json.loads((llama / "generation_config.json").read_text())
    (tmp_path / "llama" / "generation_config.json").write_text(json.dumps({**said, "cache_implementation": "static"}))
    words = ("--prompt", "The quick", "--max-new-tokens", 8, "--kv-cache", "int8", "--temperature", 0.8, "--json")
    assert run("generate", tmp_path / "llama", *words).data["text"] == run("generate", llama, *words).data["text"]


def test_eval(run: Run, llama: Path, text: Path) -> None:
    """The original of --against always uses a float cache."""
    tokens = token_ids(load_tokenizer(llama), text.read_text())[:200]
    model = load_model(llama, dtype=torch.float32)
    floats = perplexity(logits_of(model), tokens, window=64).value
    int2 = perplexity(kv_cache.logits_of(model, "int2-g16"), tokens, window=64).value
    assert int2 != pytest.approx(floats, rel=1e-4)
    alone = run("eval", llama, "--text", text, *READING, "--kv-cache", "int2-g16").data
    assert alone["perplexity"] == pytest.approx(int2, rel=1e-6)
    beside = run("eval", llama, "--against", llama, "--text", text, *READING, "--kv-cache", "int2-g16").data
    assert beside["original"]["perplexity"] == pytest.approx(floats, rel=1e-6)
    assert beside["perplexity"] == pytest.approx(int2, rel=1e-6)
    assert beside["divergence"]["kl"] > 0


def test_the_format_is_named_beside_the_figures(run: Run, llama: Path, text: Path) -> None:
    out = run("compare", llama, llama, "--text", text, *READING[:-1], "--kv-cache", "int8").out
    assert "keys and values in int8" in out


@pytest.mark.parametrize("words", [("--tasks", "one"), ("--text", "t", "--tasks", "one")])
def test_eval_of_tasks_has_no_such_cache(run: Run, llama: Path, words: tuple[str, ...]) -> None:
    ran = run("eval", llama, *words, "--kv-cache", "int8")
    assert ran.code == 2
    assert "--kv-cache applies to reading a text" in ran.err


def test_compare_times_no_such_cache(run: Run, llama: Path, text: Path) -> None:
    ran = run("compare", llama, "--text", text, "--speed", 2, "--kv-cache", "int8")
    assert ran.code == 2
    assert "not to --speed" in ran.err


@pytest.mark.parametrize("name", ["int9", "int8-dyn", "int8+last", "nvfp4-wo"])
def test_a_name_that_is_no_format_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "llama", "--prompt", "a", "--kv-cache", name])
    assert stopped.value.code == 2
    assert name.split("-")[0].split("+")[0] in capsys.readouterr().err
