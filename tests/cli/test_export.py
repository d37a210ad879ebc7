"""``bitport export``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bitport import dequantize_
from bitport.backends.cpu.native import PATH
from bitport.cli.main import main
from bitport.export import generate, load
from bitport.integrations.cache_name import with_cache
from bitport.integrations.huggingface import load_model
from bitport.integrations.kv_cache import KVCache

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tinylm"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "model.pt2", "--capacity", "4"], "a cache of 4 positions"),
        (["-o", "model.pt2", "--capacity", "4096"], "which the model supports"),
        (["-o", "there.pt2"], "there.pt2 exists already; --overwrite"),
        (["-o", "model.pt2", "--weights", "there.pt2"], "there.pt2 exists already; --overwrite"),
        (["--executorch", "model.pte", "--capacity", "4"], "a cache of 4 positions"),
        (["-o", "model.pt2", "--kv-cache", "int8+last64"], "int8+last64 keeps some in float until later"),
    ],
    ids=["short", "long", "there", "weights-there", "executorch-short", "cache"],
)
def test_what_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt2").write_bytes(b"")
    assert main(["export", str(MODEL), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "model.zip"], "'model.zip': a package is a file *.pt2"),
        (["--executorch", "model.onnx"], "'model.onnx': a program of ExecuTorch is a file *.pte"),
        (["--onnx", "model"], "'model': an ONNX model is a file *.onnx"),
        (["--onnx", "model.onnx", "--level", "x86-64-v3", "--capacity", "8"], "--level, --capacity: not for ONNX"),
        (["--executorch", "model.pte", "--weights", "w"], "--weights: not for ExecuTorch"),
        (["--onnx", "model.onnx", "--kv-cache", "int8"], "--kv-cache: not for ONNX"),
        (["-o", "model.pt2", "--kv-cache", "int7x"], "int7x"),
        (["--onnx", "model.onnx", "--dtype", "bfloat16"], "compute in float32, not bfloat16"),
        (["--executorch", "model.pte", "--standard"], "--standard goes with --onnx"),
    ],
    ids=[
        "suffix",
        "executorch-suffix",
        "onnx-suffix",
        "onnx",
        "executorch",
        "onnx-cache",
        "cache",
        "dtype",
        "standard",
    ],
)
def test_options_that_are_refused(run: Run, tmp_path: Path, options: list[str], said: str) -> None:
    """Before anything is read."""
    ran = run("export", tmp_path / "nowhere", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_wrong_place_for_weights_is_told_before_the_model_is_read(run: Run, tmp_path: Path) -> None:
    ran = run("export", tmp_path / "nowhere", "-o", tmp_path / "model.pt2", "--weights", "../weights")
    assert ran.code == 1
    assert "name of a file" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_a_quantized_model_writes_the_same_tokens(
    kv_cache: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized, output = tmp_path / "int4", tmp_path / "model.pt2"
    rules = ["--rule", "lm_head=int8", "--rule", "*.embed_tokens=int8"]
    caches = [] if kv_cache is None else ["--kv-cache", kv_cache]
    assert main(["quantize", str(MODEL), "--scheme", "int4-g32", *rules, "-o", str(quantized)]) == 0
    capsys.readouterr()
    assert main(["export", str(quantized), "-o", str(output), "--weights", "model.weights", "--json", *caches]) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert set(manifest["methods"]) == {"prefill", "decode"}
    assert (tmp_path / "model.weights").stat().st_size == manifest["weights"]["size"]
    assert output.stat().st_size < 2 * PATH.stat().st_size, "two libraries, each with the kernels that it calls"

    model, program = load_model(quantized), load(output, verify=True)
    prompt, count = torch.tensor([[5, 17, 200, 31, 9]]), 20
    given = {} if kv_cache is None else with_cache(model, KVCache.of(model, kv_cache))
    made = model.generate(input_ids=prompt, max_new_tokens=count, do_sample=False, pad_token_id=0, **given)
    wanted = made[0].tolist()
    assert [*prompt[0].tolist(), *generate(program, prompt[0].tolist(), count)] == wanted

    texts = []
    for given in ([str(output), "--tokenizer", str(quantized)], [str(quantized), *caches]):
        assert main(["generate", *given, "--prompt", "Once upon a time", "--max-new-tokens", "12"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def small(folder: Path, scheme: str, *rules: str) -> Path:
    """Write a quantized model of two layers with tied embeddings, using the command line."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "model")
    options = [part for each in rules for part in ("--rule", each)]
    quantized = folder / "quantized"
    assert main(["quantize", str(folder / "model"), "--scheme", scheme, *options, "-o", str(quantized)]) == 0
    return quantized


IDS = torch.tensor([[5, 17, 90, 31, 9, 2, 44, 3]])
PARTS = ((0, 4), (4, 5), (5, 8))
"""A prompt, one token, several tokens."""


@pytest.mark.peers
@pytest.mark.parametrize("standard", [[], ["--standard"]], ids=["microsoft", "standard"])
def test_onnx_runtime_gives_the_same_logits(
    standard: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both compute in float32: half of the digits agree, as for packages. By default ONNX Runtime rounds the inputs of
    products built from standard operators to int8."""
    quantized, output = small(tmp_path, "int4-g32", "lm_head=int8", "*embed_tokens=int8"), tmp_path / "model.onnx"
    capsys.readouterr()
    assert main(["export", str(quantized), "--onnx", str(output), *standard, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["operators"]["DequantizeLinear" if standard else "com.microsoft::MatMulNBits"] == 15
    assert report["files"] == {"model.onnx": output.stat().st_size}

    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = runtime.InferenceSession(str(output), options, ["CPUExecutionProvider"])
    (ids, *states), wanted = session.get_inputs(), load_model(quantized, dtype=torch.float32)(input_ids=IDS).logits
    assert [each.shape[2] for each in states] == ["past"] * 4
    past = [torch.zeros(1, 2, 0, 16).numpy()] * 4
    for start, end in PARTS:
        feeds = dict(zip([each.name for each in states], past, strict=True))
        logits, *past = session.run(None, {ids.name: IDS[:, start:end].numpy(), **feeds})
        atol = float(wanted.abs().max()) * torch.finfo(torch.float32).eps ** 0.5
        torch.testing.assert_close(torch.from_numpy(logits), wanted[:, end - 1], rtol=0, atol=atol)


@pytest.mark.peers
def test_executorch_gives_logits_as_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """XNNPACK and bitport both round inputs to 8 bits, but to different values: measured against the logits for
    unrounded inputs, its error is at most twice ours, since rounding may happen to favour us."""
    rules = ("lm_head=int8-dyn", "*embed_tokens=int8-dyn")
    quantized, output = small(tmp_path, "int4-int8-g32", *rules), tmp_path / "model.pte"
    capsys.readouterr()
    assert main(["export", str(quantized), "--executorch", str(output), "--capacity", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["taken"]["aten::linear"] == 15
    assert not [name for name in report["left"] if "linear" in name or "quantize" in name]

    model = load_model(quantized, dtype=torch.float32)
    ours = model(input_ids=IDS).logits
    exact = dequantize_(model)(input_ids=IDS).logits
    lib = pytest.importorskip("executorch.extension.pybindings.portable_lib")
    program = lib._load_for_executorch(str(output))
    for _ in range(2):  # state left by another text must not matter
        theirs = [program.forward((IDS[:, a:b], torch.arange(a, b)))[0].clone() for a, b in PARTS]
        ends = [end - 1 for _, end in PARTS]
        off, own = torch.cat(theirs) - exact[0, ends], ours[0, ends] - exact[0, ends]
        assert 0 < off.norm() < 2 * own.norm()
