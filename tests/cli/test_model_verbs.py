"""explain, eval and generate: what they print is what the library computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.checkpoint import quantize_files
from bitport.evaluate import perplexity
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids

from .conftest import Run


@pytest.fixture(scope="module")
def int4(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "int4"
    quantize_files(llama, directory, "int4")
    return directory


def test_explain(run: Run, int4: Path) -> None:
    data = run("explain", int4, "--rows", "1,9", "--json").data
    judge = bp.explain(load_model(int4), (1, 9))
    assert data["rows"] == [1, 9]
    kernels = [[layer["decisions"][str(m)]["kernel"] for m in (1, 9)] for layer in data["layers"]]
    assert kernels == [[layer.decisions[m].kernel for m in (1, 9)] for layer in judge.layers]
    assert run("explain", int4, "--rows", "1,9").out == f"{judge}\n"


@pytest.mark.parametrize("kind", ["int4", "llama"])
def test_a_device_that_is_not_there(run: Run, kind: str, request: pytest.FixtureRequest) -> None:
    ran = run("explain", request.getfixturevalue(kind), "--device", "privateuseone")
    assert (ran.code, ran.out) == (1, "")
    assert "bitport: error: no device privateuseone here" in ran.err


def test_explain_of_a_float_model(run: Run, llama: Path) -> None:
    assert run("explain", llama).out == "no quantized weight in this model\n"


def test_eval_measures_perplexity(run: Run, llama: Path, int4: Path, text: Path) -> None:
    words = ("--text", text, "--window", 64, "--stride", 32, "--max-tokens", 200, "--dtype", "float32", "--json")
    first, second = run("eval", llama, int4, *words).data
    for row, directory in ((first, llama), (second, int4)):
        tokens = token_ids(load_tokenizer(directory), text.read_text())[:200]
        model = load_model(directory, dtype=torch.float32)
        judge = perplexity(logits_of(model), tokens, window=64, stride=32)
        assert (row["perplexity"], row["scored"]) == (pytest.approx(judge.value, rel=1e-6), 199)
        assert row["nbytes"] == sum(param.nbytes for param in model.parameters())
    assert (first["change_percent"], first["schemes"], second["schemes"]) == (0, [], ["int4"])
    assert second["change_percent"] == pytest.approx(100 * (second["perplexity"] / first["perplexity"] - 1))


def test_eval_prints_a_line_per_model_and_progress_elsewhere(run: Run, llama: Path, int4: Path, text: Path) -> None:
    ran = run("eval", llama, int4, "--text", text, "--window", 32, "--max-tokens", 64)
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == [str(llama), str(int4)]
    assert lines[-1] == "62 tokens scored, windows of 32"
    assert f"evaluating {int4}" in ran.err


def test_eval_of_a_missing_text(run: Run, llama: Path, tmp_path: Path) -> None:
    ran = run("eval", llama, "--text", tmp_path / "none.txt")
    assert ran.code == 1
    assert "none.txt" in ran.err


def test_eval_keeps_within_the_positions_of_the_model(run: Run, llama: Path, text: Path) -> None:
    ran = run("eval", llama, "--text", text, "--window", 257)
    assert ran.code == 1
    assert "256 positions" in ran.err


def test_generate_is_greedy(run: Run, int4: Path) -> None:
    data = run("generate", int4, "--prompt", "The quick", "--max-new-tokens", 6, "--json").data
    model, tokenizer = load_model(int4), load_tokenizer(int4)
    inputs = tokenizer("The quick", return_tensors="pt")
    ids = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=False,
        max_new_tokens=6,
        pad_token_id=0,
    )
    assert data["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert data["new_tokens"] == ids.shape[1] - inputs.input_ids.shape[1]


def test_generate_draws_by_its_seed_alone(run: Run, int4: Path) -> None:
    words = ("generate", int4, "--prompt", "The quick", "--max-new-tokens", 12, "--temperature", 5)
    state = torch.random.get_rng_state()
    first, again, other = (run(*words, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    "words", [("--prompt", ""), ("--prompt", "a", "--temperature", "-1"), ("--prompt", "a", "--temperature", "nan")]
)
def test_generate_refuses(run: Run, int4: Path, words: tuple[str, ...]) -> None:
    assert run("generate", int4, *words).code == 1
