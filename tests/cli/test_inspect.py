"""``bitport inspect`` on what ``bitport quantize`` wrote, on what others wrote, and on what is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import bitport as bp
from bitport.integrations.huggingface import load_model

from ..integrations.models import transformers
from .conftest import Run


def test_inspect_counts_what_is_there(run: Run, llama: Path, tmp_path: Path) -> None:
    run("quantize", llama, "--scheme", "int4", "--rule", "*.down_proj=int8", "-o", tmp_path)
    data = run("inspect", tmp_path, "--json", "--tensors").data
    model = load_model(tmp_path)
    quantized = [param for param in model.parameters() if isinstance(param, bp.QTensor)]
    assert data["total"]["bytes"] == sum(param.nbytes for param in model.parameters())
    assert data["total"]["weights"] == sum(param.numel() for param in model.parameters())
    counts = {kind["kind"]: kind["tensors"] for kind in data["kinds"]}
    assert counts["int4"] == sum(str(param.scheme) == "int4" for param in quantized)
    assert counts["int8"] == 2
    assert data["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert sum(kind["bytes"] for kind in data["kinds"]) == sum(t["nbytes"] for t in data["tensors"])
    shown = run("inspect", tmp_path, "--tensors").out
    assert "tied: lm_head.weight = model.embed_tokens.weight" in shown
    assert "model.layers.1.mlp.down_proj.weight" in shown


def test_inspect_reads_plain_directories_and_files(run: Run, llama: Path) -> None:
    whole = run("inspect", llama, "--json").data
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    assert whole["format"] == "safetensors"
    assert len(whole["files"]) > 1
    assert whole["total"]["bytes"] == sum(param.nbytes for param in model.parameters())
    assert "tensors" not in whole
    parts = [run("inspect", llama / name, "--json").data["total"]["bytes"] for name in whole["files"]]
    assert sum(parts) == whole["total"]["bytes"]


def test_inspect_tells_of_damage(run: Run, llama: Path, tmp_path: Path) -> None:
    run("quantize", llama, "--scheme", "int4", "-o", tmp_path)
    manifest = json.loads((tmp_path / "bitport.json").read_text())
    manifest["version"] = 99
    (tmp_path / "bitport.json").write_text(json.dumps(manifest))
    assert run("inspect", tmp_path).code == 1
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(b"\xff" * 9)
    ran = run("inspect", cut)
    assert ran.code == 1
    assert "not a whole safetensors file" in ran.err
    ran = run("inspect", cut.rename(tmp_path / "model.gguf"))
    assert ran.code == 1
    assert "bitport convert" in ran.err


def test_inspect_verifies_the_data(run: Run, llama: Path, tmp_path: Path) -> None:
    run("quantize", llama, "--scheme", "int8", "-o", tmp_path / "q")
    assert run("inspect", tmp_path / "q", "--verify").code == 0
    shard = next((tmp_path / "q").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert run("inspect", tmp_path / "q").code == 0
    ran = run("inspect", tmp_path / "q", "--verify")
    assert ran.code == 1
    assert "is damaged" in ran.err
    assert "holds no checksums" in run("inspect", llama, "--verify").err


def test_inspect_of_nothing(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "nope")
    assert ran.code == 1
    assert ran.err.rstrip().endswith("nope does not exist")


def test_inspect_does_not_wait_for_a_pipe(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        ran = run("inspect", path)
        assert ran.code == 1
        assert "not a regular file" in ran.err


def test_inspect_lists_numbers_that_nothing_reads(run: Run, tmp_path: Path) -> None:
    """Their size is that of their data, which no dtype of PyTorch tells."""
    kinds = {"a": ("F4", [2, 4], 4), "b": ("F6_E2M3", [4], 3), "c": ("Q4_9", [8, 8], 40), "d": ("BF16", [3], 6)}
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in kinds.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    path = tmp_path / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    listed = run("inspect", path, "--json", "--tensors").data["tensors"]
    assert {each["name"]: (each["kind"], each["shape"], each["nbytes"]) for each in listed} == kinds
    ran = run("quantize", path, "--scheme", "int4", "-o", tmp_path / "out")
    assert (ran.code, "has the dtype 'F4'" in ran.err) == (1, True)


def test_inspect_refuses_what_no_verb_reads(run: Run, tmp_path: Path) -> None:
    """A key that is there twice, of which the safetensors library takes the last."""
    one = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
    text = f"{{{one},{one}}}".encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    ran = run("inspect", tmp_path / "a.safetensors")
    assert (ran.code, "a key appears twice" in ran.err) == (1, True)
