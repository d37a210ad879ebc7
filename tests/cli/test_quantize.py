"""``bitport quantize`` on the files of a small model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import bitport as bp
from bitport.calibrate.processes import Processes
from bitport.checkpoint import read_manifest
from bitport.checkpoint.output import Output
from bitport.cli import calibration
from bitport.errors import BitportError
from bitport.integrations.huggingface import load_model, load_tokenizer, token_ids
from tests.turns import slow

from ..integrations.models import logits, transformers
from .conftest import Run


def test_the_result_is_that_of_quantize(run: Run, llama: Path, tmp_path: Path) -> None:
    ran = run("quantize", llama, "--scheme", "int4-g32", "-o", tmp_path / "out", "--json")
    assert ran.code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto").eval()
    report = bp.quantize_(model, "int4-g32")
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(model))
    told = {layer["name"]: layer for layer in ran.data["layers"]}
    assert {name for name, layer in told.items() if layer["scheme"]} == {layer.name for layer in report.quantized}
    assert (ran.data["bytes_before"], ran.data["bytes_after"]) == (report.bytes_before, report.bytes_after)
    assert (ran.data["output"], ran.data["dry_run"]) == (str(tmp_path / "out"), False)


RECIPES: dict[str, list[str]] = {
    "groups": ["--scheme", "int3-g32"],
    "blocks": ["--scheme", "fp8-block"],
    "two scales": ["--scheme", "nvfp4"],
    "rules": ["--rule", "*.mlp.*=skip", "--rule", "*embed_tokens=int8", "--rule", "lm_head=int8", "--scheme", "int4"],
    "cast": ["--scheme", "int4", "--dtype", "float32"],
    "one rule": ["--rule", "re:.*q_proj=int8-dyn"],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_foretells_the_report(run: Run, llama: Path, tmp_path: Path, recipe: str) -> None:
    words = ["quantize", llama, *RECIPES[recipe], "-o", tmp_path / "out", "--json"]
    foretold = run(*words, "--dry-run").data
    assert not (tmp_path / "out").exists()
    done = run(*words).data
    for layer in done["layers"]:
        layer["sqnr"] = None
    assert done.pop("memory_peak") > 0
    assert foretold.pop("memory_peak") is None
    assert foretold.pop("memory_estimate") == pytest.approx(done.pop("memory_estimate"), rel=0.1)  # the process grows
    assert {**foretold, "dry_run": False} == done
    assert done["bytes_after"] == read_manifest(tmp_path / "out").nbytes


def test_the_first_rule_that_fits_decides(run: Run, llama: Path) -> None:
    words = ("--rule", "*.q_proj=int8", "--rule", "*.layers.0.*=skip", "--scheme", "int4", "--dry-run", "--json")
    told = {layer["name"]: layer["scheme"] for layer in run("quantize", llama, *words).data["layers"]}
    assert told["model.layers.0.self_attn.q_proj.weight"] == "int8"
    assert told["model.layers.0.self_attn.k_proj.weight"] is None
    assert told["model.layers.1.self_attn.k_proj.weight"] == "int4"


def test_recipe_file_and_rules_before_it(run: Run, llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(bp.Recipe.of({"*.mlp.*": "int4-g32", "*_proj": "int8"}).to_json())
    words = ("--recipe", recipe, "--rule", "*.down_proj=skip", "--dry-run", "--json")
    told = {layer["name"]: layer["scheme"] for layer in run("quantize", llama, *words).data["layers"]}
    assert told["model.layers.1.mlp.up_proj.weight"] == "int4-g32"
    assert told["model.layers.1.mlp.down_proj.weight"] is None
    assert told["model.layers.1.self_attn.o_proj.weight"] == "int8"


def test_text_is_a_summary_or_every_tensor(run: Run, llama: Path) -> None:
    short = run("quantize", llama, "--scheme", "int4", "--dry-run").out
    full = run("quantize", llama, "--scheme", "int4", "--dry-run", "--verbose").out
    assert "int4    14" in short
    assert "leaves embeddings as they are; a rule for them quantizes them" in short
    assert "q_proj" not in short
    assert full.count("_proj.weight") == 14
    assert short.endswith("dry run: nothing was written\n")


def test_a_checkpoint_is_replaced_only_on_demand(run: Run, llama: Path, tmp_path: Path) -> None:
    assert run("quantize", llama, "--scheme", "int4", "-o", tmp_path).code == 0
    before = (tmp_path / "bitport.json").read_bytes()
    refused = run("quantize", llama, "--scheme", "int8", "-o", tmp_path)
    assert refused.code == 1
    assert "--overwrite" in refused.err
    assert (tmp_path / "bitport.json").read_bytes() == before
    assert run("quantize", llama, "--scheme", "int8", "-o", tmp_path, "--overwrite").code == 0
    assert run("inspect", tmp_path, "--json").data["schemes"] == ["int8"]


PROBLEMS: dict[str, tuple[list[str], int, str]] = {
    "no recipe": (["--dry-run"], 2, "--scheme int4"),
    "two recipes": (["--scheme", "int4", "--recipe", "r.json", "--dry-run"], 2, "not both"),
    "no output": (["--scheme", "int4"], 2, "-o DIR"),
    "unknown scheme": (["--scheme", "int9", "--dry-run"], 2, "unknown scheme 'int9'"),
    "unknown scheme in a rule": (["--rule", "*=int9", "--dry-run"], 2, "unknown scheme 'int9'"),
    "unknown step": (["--scheme", "int4", "--algorithm", "awq+magic", "-o", "out"], 2, "unknown algorithm 'magic'"),
    "wrong order of steps": (["--scheme", "int4", "--algorithm", "gptq+awq", "-o", "out"], 2, "give transforms"),
    "data for nothing": (["--scheme", "int4", "--data", "a.txt", "--dry-run"], 2, "not for rtn"),
    "data for nothing in memory": (
        ["--scheme", "int4", "--data", "a.txt", "--in-memory", "-o", "out"],
        2,
        "not for rtn",
    ),
    "rule that fits nothing": (["--rule", "*.nowhere=int4", "--dry-run"], 1, "fits no weight"),
    "missing recipe file": (["--recipe", "nowhere.json", "--dry-run"], 1, "cannot read nowhere.json"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problems_are_told(run: Run, llama: Path, problem: str) -> None:
    words, code, message = PROBLEMS[problem]
    ran = run("quantize", llama, *words)
    assert ran.code == code
    assert message in ran.err


def test_reports_are_written(run: Run, llama: Path, tmp_path: Path) -> None:
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    words = ("quantize", llama, "--scheme", "int4", "--algorithm", "hqq", "--report", page, "--report", record)
    ran = run(*words, "-o", tmp_path / "out", "--json")
    held = json.loads(record.read_text())
    assert held["result"] == ran.data
    assert held["command"].startswith("bitport quantize ")
    assert bp.Recipe.from_json(ran.data["recipe"]) == bp.Recipe.of("int4")
    assert ran.data["algorithm"] == "hqq"
    shown = page.read_text()
    assert "bp.quantize_(model, &quot;int4&quot;, algorithm=&quot;hqq&quot;)" in shown
    assert all(layer["name"] in shown for layer in ran.data["layers"])


def test_a_single_file_is_a_source_too(run: Run, llama: Path, tmp_path: Path) -> None:
    file = next(llama.glob("*.safetensors"))
    ran = run("quantize", file, "--scheme", "int4", "-o", tmp_path, "--json")
    held = {tensor["name"] for tensor in run("inspect", file, "--json", "--tensors").data["tensors"]}
    assert set(read_manifest(tmp_path).tensors) == held
    assert ran.code == 0
    assert ran.err.startswith("memory: ")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files hold each expert separately; the model stacks them."""
    directory = tmp_path_factory.mktemp("cli") / "mixtral"
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "LICENSE").write_text("free")
    return directory


def test_other_names_in_the_model_are_told(run: Run, mixtral: Path, llama: Path, tmp_path: Path) -> None:
    """Except for the experts of Mixtral, which load_model stacks."""
    assert "note" not in run("quantize", mixtral, "--scheme", "int8", "--dry-run").err
    assert "note" not in run("quantize", llama, "--scheme", "int8", "--dry-run").err
    other = shutil.copytree(llama, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        values = load_file(file)
        renamed = {name.replace("model.norm.", "model.other."): value for name, value in values.items()}
        save_file(renamed, file, {"format": "pt"})
    for file in other.glob("*.index.json"):
        file.write_text(file.read_text().replace("model.norm.", "model.other."))
    told = run("quantize", other, "--scheme", "int8", "--dry-run").err
    assert "has no model.other.weight" in told
    assert "--in-memory" in told
    said = (other / "config.json").read_text().replace("LlamaForCausalLM", "MyLlamaForCausalLM")
    (other / "config.json").write_text(said)
    told = run("quantize", other, "--scheme", "int8", "--dry-run").err
    assert "load_model builds a LlamaForCausalLM, not the MyLlamaForCausalLM" in told
    assert "--in-memory" not in told


def test_what_is_wrong_with_files_is_told_once(run: Run, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "cut")
    lost = sorted((tmp_path / "cut").glob("*.safetensors"))[0]
    lost.unlink()
    for words in (["quantize", "--scheme", "int8", "--dry-run"], ["inspect"]):
        ran = run(*words, tmp_path / "cut")
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith("bitport: error: ")
        assert f"names {lost.name!r}, which is not in" in ran.err


def test_in_memory_quantizes_the_form_of_the_model(run: Run, mixtral: Path, tmp_path: Path) -> None:
    words = ["quantize", mixtral, "--scheme", "int4-g32", "--in-memory", "-o", tmp_path / "out", "--json"]
    foretold = run(*words, "--dry-run")
    assert not (tmp_path / "out").exists()
    done = run(*words)
    assert (done.code, foretold.data["bytes_after"]) == (0, done.data["bytes_after"])
    model = transformers.AutoModelForCausalLM.from_pretrained(mixtral, dtype="auto").eval()
    bp.quantize_(model, "int4-g32")
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(model))
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == json.loads((mixtral / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "bitport"}
    }


@pytest.mark.parametrize("mode", [[], ["--in-memory"]], ids=["files", "in memory"])
def test_the_source_is_never_written_to(run: Run, llama: Path, mode: list[str]) -> None:
    before = sorted(llama.iterdir())
    for output in (llama, llama / "below"):
        assert run("quantize", llama, "--scheme", "int4", "-o", output, *mode).code == 1
    assert sorted(llama.iterdir()) == before


def test_an_algorithm_without_data_works_on_the_files(run: Run, llama: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int3-g32", "--algorithm", "hqq", "-o", tmp_path / "out", "--json")
    foretold, done = run(*words, "--dry-run").data, run(*words).data
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto").eval()
    report = bp.quantize_(model, "int3-g32", algorithm="hqq")
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(model))
    errors = {layer["name"]: layer["sqnr_rtn"] for layer in done["layers"] if layer["scheme"]}
    assert errors == {layer.name: layer.sqnr_rtn for layer in report.quantized}
    for layer in done["layers"]:
        layer["sqnr"] = layer["sqnr_rtn"] = None
    for memory in ("memory_estimate", "memory_peak"):
        foretold[memory] = done[memory] = None
    assert {**foretold, "dry_run": False} == done


def test_an_algorithm_with_data_runs_the_model(run: Run, llama: Path, text: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int3-g32", "--algorithm", "gptq", "-o", tmp_path / "out")
    ran = run(*words, "--data", text, "--json")
    assert (ran.code, run(*words, "--dry-run").code) == (0, 0)
    layers = [layer for layer in ran.data["layers"] if layer["scheme"]]
    assert {layer["algorithm"] for layer in layers} == {"gptq"}
    assert all(layer["output_sqnr"] > layer["output_sqnr_rtn"] for layer in layers)
    assert logits(load_model(tmp_path / "out")).isfinite().all()
    again = run(*words, "--data", text, "--overwrite", "--activations", "disk")
    assert "int3-g32 by gptq" in again.out
    assert f"calibrated on at most 65536 tokens of {text}" in again.out
    assert "memory estimate" in again.out
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto").eval()
    ids = token_ids(load_tokenizer(llama), text.read_text())
    bp.quantize_(model, "int3-g32", algorithm="gptq", calibrate=[part[None] for part in ids.split(256)])
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(model))


STATIC: dict[str, tuple[str, str]] = {
    "rtn": ("int8-static", "rtn"),
    "gptq": ("nvfp4-static", "gptq"),
    "awq": ("fp8-static", "awq+gptq"),
}


@pytest.mark.parametrize("case", ["gptq", *slow("rtn", "awq")])
def test_static_scales_are_measured_on_data(run: Run, llama: Path, text: Path, tmp_path: Path, case: str) -> None:
    scheme, algorithm = STATIC[case]
    words = ("quantize", llama, "--scheme", scheme, "--algorithm", algorithm, "--data", text, "--json")
    ran, foretold = run(*words, "-o", tmp_path / "out"), run(*words, "--dry-run")
    assert ran.code == 0, ran.err
    assert ran.data["calibration"] == f"at most 65536 tokens of {text}"
    assert foretold.data["bytes_after"] == ran.data["bytes_after"] == read_manifest(tmp_path / "out").nbytes
    whole = run(*words, "-o", tmp_path / "whole", "--in-memory")
    assert run(*words, "--in-memory", "--dry-run").data["bytes_after"] == ran.data["bytes_after"]
    assert whole.data["layers"] == ran.data["layers"]
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto").eval()
    ids = token_ids(load_tokenizer(llama), text.read_text())
    bp.quantize_(model, scheme, algorithm=algorithm, calibrate=[part[None] for part in ids.split(256)])
    for directory in ("out", "whole"):
        loaded = load_model(tmp_path / directory)
        scales = {name: q.act_scale.item() for name, q in quantized(loaded)}
        assert scales == {name: q.act_scale.item() for name, q in quantized(model)}
        assert len(scales) == 14
        assert torch.equal(logits(loaded), logits(model))


def test_static_scales_of_experts(run: Run, mixtral: Path, tmp_path: Path) -> None:
    """The files hold them one by one, the model as one weight with one scale."""
    ids = torch.randint(0, 320, (300,), generator=torch.Generator().manual_seed(0))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    words = ("quantize", mixtral, "--scheme", "int8-static", "--data", tmp_path / "ids.safetensors", "--json")
    ran, whole = run(*words, "-o", tmp_path / "out"), run(*words, "-o", tmp_path / "whole", "--in-memory")
    assert (ran.code, whole.code) == (0, 0), ran.err + whole.err
    assert ran.data["layers"] == whole.data["layers"]
    scales, expected = (
        {name: q.act_scale.item() for name, q in quantized(load_model(tmp_path / each))} for each in ("out", "whole")
    )
    assert scales == expected
    assert sum("experts" in name for name in scales) == 2


def quantized(model: torch.nn.Module) -> list[tuple[str, bp.QTensor]]:
    return [(name, param) for name, param in model.named_parameters() if isinstance(param, bp.QTensor)]


def test_static_scales_without_data_are_measured_on_text_of_the_model(run: Run, llama: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int8-static", "--data-tokens", 24, "-o", tmp_path / "out", "--json")
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert ran.data["calibration"] == "24 tokens that the model wrote itself, seed 0"


def test_memory_is_foretold(run: Run, llama: Path) -> None:
    words = ("quantize", llama, "--scheme", "int4-g32", "--algorithm", "gptq", "--dry-run", "--json", "--data-tokens")
    few, many = (run(*words, tokens).data["memory_estimate"] for tokens in (256, 25600))
    hidden, itemsize = 128, 2
    assert many - few > (25600 - 256) * hidden * itemsize - 10**7


def test_memory_is_foretold_without_data_too(run: Run, llama: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int4-g32", "-o", tmp_path / "out")
    foretold, done = run(*words, "--dry-run", "--json").data, run(*words, "--json").data
    assert foretold["memory_estimate"] > 320 * 128 * 2
    assert foretold["memory_peak"] is None
    assert done["memory_peak"] > 0
    refused = run(*words, "--overwrite", "--memory-limit", "1MB")
    assert refused.code == 1
    assert "1.0 MB are allowed" in refused.err


def test_without_data_the_model_writes_its_own(run: Run, llama: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int3-g32", "--algorithm", "gptq", "--data-tokens", 24, "--json")
    ran, same, other = (
        run(*words, "--data-seed", seed, "-o", tmp_path / name) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert ran.data["calibration"] == "24 tokens that the model wrote itself, seed 1"
    assert ran.data["layers"] == same.data["layers"] != other.data["layers"]


@pytest.mark.parametrize(
    ("algorithm", "done"), [("gptq", "3 of 3 steps"), ("awq", "3 of 3 steps"), ("hqq", "20 of 20 tensors")]
)
def test_an_interrupted_run_is_resumed_on_demand(
    run: Run, llama: Path, text: Path, tmp_path: Path, algorithm: str, done: str
) -> None:
    out = tmp_path / "out"
    words = ["quantize", llama, "--scheme", "int4-g32", "--algorithm", algorithm, "-o", out]
    words += ["--data", text] if algorithm != "hqq" else []
    assert run(*words).code == 0
    expected = {path.name: path.read_bytes() for path in out.iterdir()}
    shutil.rmtree(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "publish", lambda *args: (_ for _ in ()).throw(BitportError("the power fails")))
        assert "the power fails" in run(*words).err
    refused = run(*words)
    assert refused.code == 1
    assert "resume it (--resume)" in refused.err
    resumed = run(*words, "--resume")
    assert f"resumed: {done} are done" in resumed.err
    assert "is finished, nothing is left to resume" in run(*words, "--resume").err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_processes_of_torchrun_work_together(run: Run, llama: Path, text: Path, tmp_path: Path) -> None:
    words = ["quantize", llama, "--scheme", "int4-g32", "--algorithm", "gptq", "--data", text, "--json", "-o"]
    alone = run(*words, tmp_path / "alone")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bitport"]
    command = [str(word) for word in (*start, *words, tmp_path / "together")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert (alone.code, ran.returncode) == (0, 0), ran.stderr
    assert (alone.err.count("calibration:"), ran.stderr.count("calibration:")) == (1, 1)
    assert json.loads(ran.stdout)["layers"] == alone.data["layers"]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "together")]
    assert files[0] == files[1]


@pytest.mark.parametrize("words", [["--algorithm", "hqq"], ["--algorithm", "gptq", "--in-memory"]], ids=" ".join)
def test_what_one_process_does_alone(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(Processes, "of_torchrun", lambda: contextlib.nullcontext(Processes(1, 2)))
    ran = run("quantize", llama, "--scheme", "int4", *words, "-o", tmp_path / "out")
    assert ran.code == 1
    assert "several processes (2) share the batches" in ran.err


def test_steps_in_a_row(run: Run, llama: Path, text: Path, tmp_path: Path) -> None:
    words = ("quantize", llama, "--scheme", "int3-g32", "--algorithm", "awq+gptq", "-o", tmp_path / "out")
    ran = run(*words, "--data", text, "--json")
    assert (ran.code, run(*words, "--dry-run").code) == (0, 0)
    layers = [layer for layer in ran.data["layers"] if layer["scheme"]]
    assert {layer["algorithm"] for layer in layers} == {"awq+gptq"}
    assert any("awq: input_layernorm.weight takes a scale" in layer["note"] for layer in layers)
    assert logits(load_model(tmp_path / "out")).isfinite().all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--algorithm", "gptq", "-o", "out", "--memory-limit", "10kB"], "Give a text with --data", id="no data"
        ),
        pytest.param(
            ["--algorithm", "gptq", "--dry-run", "--memory-limit", "1MB"], "1.0 MB are allowed", id="no memory"
        ),
        pytest.param(
            ["--rule", "lm_head=int8-static", "--data", "a.txt", "-o", "out"], "cannot read a.txt", id="one rule"
        ),
        pytest.param(["--algorithm", "gptq", "--data", "a.txt", "-o", "out"], "cannot read a.txt", id="missing data"),
    ],
)
def test_problems_with_data_are_told(
    run: Run, llama: Path, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run("quantize", llama, "--scheme", "int4", *words)
    assert ran.code == 1
    assert message in ran.err


def test_bits_are_chosen_by_text_of_the_model_itself(run: Run, llama: Path, tmp_path: Path) -> None:
    words = ["--scheme", "auto", "--bits", "4.6", "--candidates", "int3-g32,int4-g32,int8", "--data-tokens", "64"]
    ran = run("quantize", llama, *words, "-o", tmp_path / "out", "--json")
    assert ran.code == 0, ran.err
    assert ran.data["calibration"] == "64 tokens that the model wrote itself, seed 0"
    assert len({layer["scheme"] for layer in ran.data["layers"]} - {None}) > 1


@pytest.mark.parametrize("cost", [[], ["--cost", "output"]], ids=["default", "output"])
def test_bits_are_chosen_for_each_weight(run: Run, llama: Path, text: Path, cost: list[str], tmp_path: Path) -> None:
    words = ["--scheme", "auto", "--bits", "4.6", "--candidates", "int3-g32,int4-g32,int8", *cost, "--data", text]
    rules = ["--rule", "*.q_proj=int2-g32"]
    ran = run("quantize", llama, *words, *rules, "--algorithm", "hqq", "-o", tmp_path / "out", "--json")
    assert ran.code == 0
    layers = [layer for layer in ran.data["layers"] if layer["scheme"]]
    queries = [layer["scheme"] for layer in layers if "q_proj" in layer["name"]]
    others = [layer for layer in layers if "q_proj" not in layer["name"]]
    assert set(queries) == {"int2-g32"}
    assert {layer["scheme"] for layer in others} <= {"int3-g32", "int4-g32", "int8"}
    assert len({layer["scheme"] for layer in others}) > 1
    weights = sum(layer["bytes_before"] for layer in others) / load_model(llama).dtype.itemsize
    assert 8 * sum(layer["bytes_after"] for layer in others) <= 4.6 * weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--scheme", "auto"], "--scheme auto and --bits belong together", id="no size"),
        pytest.param(["--scheme", "int4", "--bits", "4"], "--scheme auto and --bits belong together", id="no auto"),
        pytest.param(["--scheme", "auto", "--bits", "4", "--dry-run"], "give no --recipe and no", id="dry run"),
        pytest.param(["--scheme", "auto", "--bits", "0"], "above 0, not 0.0", id="no bits"),
        pytest.param(["--scheme", "auto", "--bits", "1"], "smallest choice", id="too few bits"),
        pytest.param(["--scheme", "auto", "--bits", "4", "--candidates", "int9"], "unknown scheme", id="candidate"),
    ],
)
def test_problems_with_chosen_bits_are_told(
    run: Run, llama: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """At once, rather than after the model has generated its own text, which takes minutes."""
    monkeypatch.setattr(calibration, "own_text", lambda *args, **options: pytest.fail("too late"))
    ran = run("quantize", llama, *words, "-o", llama.parent / "never")
    assert ran.code != 0
    assert message in ran.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--algorithm", "rotate"], "or --in-memory", id="rotate"),
        pytest.param(["--algorithm", "gptq", "--rule", "nothing=int8"], "fits no weight", id="rule"),
        pytest.param(
            ["--algorithm", "gptq", "--in-memory", "--rule", "nothing=int8"], "fits no weight", id="in memory"
        ),
        pytest.param(["--algorithm", "gptq", "-o", "BEGUN"], "has begun: resume it", id="begun"),
    ],
)
def test_what_is_wrong_is_told_before_the_model_writes_its_text(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Generating the text takes minutes."""
    monkeypatch.setattr(calibration, "own_text", lambda *args, **options: pytest.fail("too late"))
    journal = tmp_path / "begun" / "unfinished" / "journal.json"
    journal.parent.mkdir(parents=True)
    journal.write_text("{}")
    words = [str(tmp_path / "begun") if word == "BEGUN" else word for word in words]
    ran = run("quantize", llama, "--scheme", "int4", "-o", tmp_path / "out", *words)
    assert ran.code == 1
    assert message in ran.err
