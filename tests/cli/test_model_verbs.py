"""explain, eval and generate: what they print is what the library computes."""

from __future__ import annotations

import dataclasses
import html
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitport as bp
from bitport.checkpoint import quantize_files
from bitport.evaluate import divergence, perplexity
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids
from tests.export.test_generate import Counting

from ..integrations.zoo import ZOO, model_of, outputs, transformers
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


@pytest.mark.parametrize("name", ["t5", "vit"])
def test_explain_takes_what_is_no_language_model(run: Run, name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "float")
    assert run("explain", tmp_path / "float").out == "no quantized weight in this model\n"
    quantize_files(tmp_path / "float", tmp_path / "out", "int4")
    judge = getattr(transformers, ZOO[name].model).from_pretrained(tmp_path / "float")
    bp.quantize_(judge, "int4")
    assert run("explain", tmp_path / "out", "--rows", "1,9").out == f"{bp.explain(judge, (1, 9))}\n"
    loaded = load_model(tmp_path / "out", causal=False)
    assert all(map(torch.equal, outputs(loaded, name), outputs(judge, name)))


@pytest.mark.parametrize("kind", ["int4", "llama"])
def test_a_device_that_is_not_there(run: Run, kind: str, request: pytest.FixtureRequest) -> None:
    ran = run("explain", request.getfixturevalue(kind), "--device", "privateuseone")
    assert (ran.code, ran.out) == (1, "")
    assert "bitport: error: no device privateuseone here" in ran.err


def test_explain_of_a_float_model(run: Run, llama: Path) -> None:
    assert run("explain", llama).out == "no quantized weight in this model\n"


def test_eval_measures_perplexity(run: Run, int4: Path, text: Path) -> None:
    words = ("--text", text, "--window", 64, "--stride", 32, "--max-tokens", 200, "--dtype", "float32", "--json")
    row = run("eval", int4, *words).data
    tokens = token_ids(load_tokenizer(int4), text.read_text())[:200]
    model = load_model(int4, dtype=torch.float32)
    judge = perplexity(logits_of(model), tokens, window=64, stride=32)
    assert (row["perplexity"], row["scored"]) == (pytest.approx(judge.value, rel=1e-6), 199)
    assert row["nbytes"] == sum(param.nbytes for param in model.parameters())
    assert (row["schemes"], row["divergence"], row["original"], row["tasks"]) == (["int4"], None, None, None)


def test_eval_against_the_original(run: Run, llama: Path, int4: Path, text: Path) -> None:
    words = (int4, "--against", llama, "--text", text, "--window", 64, "--max-tokens", 200)
    row = run("eval", *words, "--json").data
    tokens = token_ids(load_tokenizer(llama), text.read_text())[:200]
    judge = divergence(*(logits_of(load_model(each)) for each in (llama, int4)), tokens, window=64)
    assert row["divergence"] == dataclasses.asdict(judge)
    assert row["original"]["model"] == str(llama)
    assert row["change_percent"] == pytest.approx(100 * (row["perplexity"] / row["original"]["perplexity"] - 1))
    compared = {layer["name"]: layer for layer in row["layers"]["layers"] if layer["scheme"]}
    assert len(compared) == 14
    assert all(layer["sqnr"] > 0 and layer["output_sqnr"] > 0 for layer in compared.values())
    ran = run("eval", *words)
    assert "lowest of 14 layers" in ran.out
    assert ran.out.count("_proj.weight") == 5
    assert "one model is in memory at a time" in ran.err
    assert run("eval", *words, "--verbose").out.count("_proj.weight") == 14


def test_compare_is_a_table(run: Run, llama: Path, int4: Path, text: Path) -> None:
    words = ("compare", llama, int4, llama, "--text", text, "--window", 32, "--max-tokens", 64)
    ran, data = run(*words), run(*words, "--json").data
    lines = ran.out.splitlines()
    assert lines[0].split("  ")[0] == "model"
    assert [line.split()[0] for line in lines[2:5]] == [str(llama), str(int4), str(llama)]
    assert lines[-1].startswith("62 tokens scored, windows of 32")
    assert f"evaluating {int4}" in ran.err
    assert [row["divergence"] is None for row in data] == [True, False, False]
    assert (data[2]["divergence"]["kl"], data[2]["divergence"]["top1"], data[2]["change_percent"]) == (0, 1, 0)
    assert f"{data[1]['divergence']['kl']:.5f}" in lines[3]
    assert data[1]["layers"] is None


def test_reports_of_models(run: Run, llama: Path, int4: Path, text: Path, tmp_path: Path) -> None:
    page, record = tmp_path / "a.html", tmp_path / "a.json"
    words = ("--text", text, "--window", 32, "--max-tokens", 64, "--report", page, "--report", record)
    for command in (("eval", int4, "--against", llama), ("compare", llama, int4, int4, "--layers", "--speed", 2)):
        ran = run(*command, *words, "--json")
        assert (ran.code, json.loads(record.read_text())["result"]) == (0, ran.data)
        shown = html.unescape(page.read_text())
        assert shlex.join(map(str, ("bitport", *command, *words, "--json"))) in shown
        assert shown.count("model.layers.1.mlp.up_proj.weight") >= 1
        assert "KL" in shown


def test_a_report_that_cannot_be_written_does_not_take_the_result_along(run: Run, llama: Path, text: Path) -> None:
    """The result may have taken hours to compute."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    words = ("--text", text, "--window", 32, "--max-tokens", 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitport.cli.reports.SUFFIXES", ("", ".json"))
        for command in (("eval", llama), ("compare", llama, llama)):
            ran = run(*command, *words, "--report", full)
            assert ran.code == 1
            assert "perplexity" in ran.out
            assert "--report /dev/full cannot be written" in ran.err


def test_a_report_without_a_folder_is_told_before_the_work(run: Run, llama: Path, text: Path, tmp_path: Path) -> None:
    ran = run("eval", llama, "--text", text, "--report", tmp_path / "none" / "a.html")
    assert ran.code == 1
    assert "there is no folder" in ran.err
    assert "evaluating" not in ran.err


def test_eval_runs_tasks(
    run: Run, llama: Path, int4: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(model: Any, tokenizer: Any, tasks: Any, **options: Any) -> Any:
        kinds = {type(param) for param in model.parameters()}
        assert (tasks, options) == (("one", "two"), {"batch": 2, "shots": 0, "limit": 7, "include": None})
        return {task: {"acc": 0.25 if bp.QTensor in kinds else 0.75} for task in tasks}

    monkeypatch.setattr("bitport.cli.evaluate.run_tasks", scored)
    monkeypatch.setattr("bitport.cli.evaluate.check_installed", lambda: None)
    words = ("--against", llama, "--tasks", "one,two", "--limit", 7, "--shots", 0, "--batch", 2)
    alone = run("eval", int4, *words, "--report", tmp_path / "tasks.html")
    assert alone.out.split()[-8:] == ["one", "acc", "0.7500", "0.2500", "two", "acc", "0.7500", "0.2500"]
    assert "0.7500" in (tmp_path / "tasks.html").read_text()
    data = run("eval", int4, *words, "--text", text, "--window", 32, "--max-tokens", 64, "--json").data
    assert data["tasks"] == {"one": {"acc": 0.25}, "two": {"acc": 0.25}}
    assert data["original"]["tasks"]["one"] == {"acc": 0.75}
    assert data["perplexity"] > 1


def test_eval_wants_something_to_measure(run: Run, llama: Path) -> None:
    ran = run("eval", llama)
    assert ran.code == 2
    assert "--text FILE" in ran.err


def test_eval_of_a_missing_text(run: Run, llama: Path, tmp_path: Path) -> None:
    ran = run("eval", llama, "--text", tmp_path / "none.txt")
    assert ran.code == 1
    assert "none.txt" in ran.err


def test_eval_keeps_within_the_positions_of_the_model(run: Run, llama: Path, text: Path) -> None:
    ran = run("eval", llama, "--text", text, "--window", 257)
    assert ran.code == 1
    assert "256 positions" in ran.err


def test_windows_that_cannot_be_are_told_before_a_model_is_loaded(run: Run, llama: Path, text: Path) -> None:
    for verb, wrong in (("eval", ("--window", 1)), ("compare", ("--stride", 600)), ("compare", ("--scratch", "none"))):
        ran = run(verb, llama, "--text", text, *wrong)
        assert ran.code == (1 if "none" in wrong else 2)
        assert len(ran.err.splitlines()) == 1, "no progress"
        assert str(wrong[1]) in ran.err


def test_a_text_of_one_token_is_told_with_the_model_that_reads_it(run: Run, llama: Path, text: Path) -> None:
    ran = run("eval", llama, "--text", text, "--max-tokens", 1)
    assert ran.code == 1
    assert f"the tokenizer of {llama} the text has fewer than 2 tokens, 1" in ran.err


def test_generate_takes_the_most_likely_token(run: Run, int4: Path, tmp_path: Path) -> None:
    """Whatever generation_config.json says about penalties and beams."""
    copied = shutil.copytree(int4, tmp_path / "int4")
    said = json.loads((copied / "generation_config.json").read_text())
    assert said["repetition_penalty"] == 1.25
    beams = {"num_beams": 3, "no_repeat_ngram_size": 2, "do_sample": True, "top_k": 9}
    (copied / "generation_config.json").write_text(json.dumps(said | beams))
    words = ("--prompt", "The quick", "--max-new-tokens", 6, "--dtype", "float32")
    data = run("generate", copied, *words, "--json").data
    model, tokenizer = load_model(int4, dtype=torch.float32), load_tokenizer(int4)
    ids = tokenizer("The quick", return_tensors="pt").input_ids
    length = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < length + 6:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert tokenizer.eos_token_id not in ids
    assert data["text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert data["new_tokens"] == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.pt2"], "--tokenizer DIR goes with a package (*.pt2), which needs it"),
        (["model", "--tokenizer", "model"], "a directory has its own"),
        (
            ["model.pt2", "--tokenizer", "model", "--kv-cache", "int8", "--dtype", "float32"],
            "--kv-cache, --dtype: a package has what it was exported with; leave it out",
        ),
    ],
)
def test_options_that_do_not_go_with_a_package(run: Run, options: list[str], said: str) -> None:
    """Before anything is read."""
    ran = run("generate", *options, "--prompt", "a")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_package_without_room_for_the_text(run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitport.cli.generate.load", lambda path: Counting())
    ran = run("generate", "model.pt2", "--tokenizer", llama, "--prompt", "The quick")
    assert ran.code == 1
    assert "64 new ones are more than the 8 positions that the package has room for; give a shorter prompt" in ran.err


def test_generate_draws_by_its_seed_alone(run: Run, int4: Path) -> None:
    words = ("generate", int4, "--prompt", "The quick", "--max-new-tokens", 12, "--temperature", 5)
    state = torch.random.get_rng_state()
    first, again, other = (run(*words, "--seed", seed).out for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--prompt", ""), "no tokens"),
        (
            ("--prompt", "abc", "--max-new-tokens", 255),
            "256 positions that the model supports; give --max-new-tokens 254",
        ),
        (("--prompt", "a" * 257), "give a shorter prompt"),
    ],
)
def test_generate_refuses(run: Run, int4: Path, words: tuple[object, ...], message: str) -> None:
    ran = run("generate", int4, *words)
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err


@pytest.mark.parametrize("value", ["-1", "nan", "1e-300"])
def test_generate_refuses_a_temperature(run: Run, int4: Path, value: str) -> None:
    ran = run("generate", int4, "--prompt", "a", "--temperature", value)
    assert (ran.code, ran.out) == (2, "")
    assert "give 0, or a number from 1e-30 on" in ran.err


def test_generate_goes_to_the_last_position(run: Run, int4: Path) -> None:
    words = ("generate", int4, "--prompt", "abc", "--temperature", 1e-30, "--max-new-tokens", 254)
    assert run(*words).code == 0


def test_tokens_that_the_model_does_not_have(run: Run, llama: Path, text: Path, tmp_path: Path) -> None:
    """A tokenizer with one token more than the model has rows, and ids made for another model."""
    other = shutil.copytree(llama, tmp_path / "other")
    said = json.loads((other / "tokenizer.json").read_text())
    said["model"]["vocab"]["e"] = 320
    (other / "tokenizer.json").write_text(json.dumps(said))
    np.save(tmp_path / "ids.npy", np.array([1, 2, 320]))
    gptq = ["quantize", llama, "--scheme", "int4", "--algorithm", "gptq", "--data", tmp_path / "ids.npy"]
    for words in (
        ["eval", other, "--text", text, "--window", "64"],
        ["generate", other, "--prompt", "the"],
        [*gptq, "-o", tmp_path / "out"],
    ):
        ran = run(*words)
        assert ran.code == 1
        assert "the data have a token 320, but the model has only 320" in ran.err
