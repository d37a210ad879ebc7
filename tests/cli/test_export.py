"""``bitport export``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bitport.cli.main import main
from bitport.export import load
from bitport.integrations.huggingface import load_model

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tinylm"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "model.zip"], "a .pt2 file"),
        (["-o", "model.pt2", "--capacity", "4"], "a cache of 4 positions"),
        (["-o", "model.pt2", "--capacity", "4096"], "which the model knows"),
        (["-o", "model.pt2", "--weights", "../weights"], "name of a file"),
        (["-o", "there.pt2"], "--overwrite"),
    ],
    ids=["suffix", "short", "long", "weights", "there"],
)
def test_what_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.pt2").write_bytes(b"")
    assert main(["export", str(MODEL), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_quantized_model_writes_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized, output = tmp_path / "int4", tmp_path / "model.pt2"
    rules = ["--rule", "lm_head=int8", "--rule", "*.embed_tokens=int8"]
    assert main(["quantize", str(MODEL), "--scheme", "int4-g32", *rules, "-o", str(quantized)]) == 0
    capsys.readouterr()
    assert main(["export", str(quantized), "-o", str(output), "--weights", "model.weights", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert set(manifest["methods"]) == {"prefill", "decode"}
    assert (tmp_path / "model.weights").stat().st_size == manifest["weights"]["size"]
    assert output.stat().st_size < 6_000_000

    model, program = load_model(quantized), load(output, verify=True)
    prompt, count = torch.tensor([[5, 17, 200, 31, 9]]), 20
    wanted = model.generate(input_ids=prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
    inputs = manifest["methods"]["decode"]["inputs"][2:]
    cache = [torch.zeros(each["shape"], dtype=torch.bfloat16) for each in inputs]
    tokens = prompt[0].tolist()
    logits = program.prefill(prompt, torch.arange(5), cache)
    while len(tokens) < len(wanted):
        tokens.append(int(logits.argmax()))
        logits = program.decode(torch.tensor([tokens[-1:]]), torch.tensor([len(tokens) - 1]), cache)
    assert tokens == wanted
