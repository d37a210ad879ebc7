"""A model in the table- and grid-based types of ggml, from a file to its outputs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.errors import ArgumentError, BitportError
from bitport.interop import convert

from .gguf_files import SIZES, model_of, transformers, write
from .test_gguf import assert_same_answers

huggingface = pytest.importorskip("bitport.integrations.huggingface")

KINDS = {
    r"token_embd.*": "IQ4_XS",
    r"output\..*": "IQ4_NL",
    r".*attn_q\..*": "IQ2_XXS",
    r".*attn_k\..*": "IQ2_XS",
    r".*attn_v\..*": "IQ2_S",
    r".*attn_output\..*": "IQ3_XXS",
    r".*ffn_down\..*": "IQ3_S",
    r".*ffn_up\..*": "IQ1_S",
    r".*ffn_gate\..*": "IQ1_M",
}


def model(path: Path) -> Any:
    made = model_of(transformers.LlamaConfig(**SIZES))
    write(path, made, KINDS)
    return made


def test_the_same_model(tmp_path: Path) -> None:
    """``write`` gives the model the values that the library gguf reads from the file."""
    made = model(tmp_path / "m.gguf")
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    groups = {"ggml_iq4": (32,), "ggml_iq3": (32,), "ggml_iq3s": (32,), "ggml_iq2": (32, 16)}
    assert set(done.weights.values()) == {f"custom({name}-g{each})" for name in groups for each in groups[name]}
    state = huggingface.load_model(tmp_path / "out").state_dict()
    for name, value in made.state_dict().items():
        if "proj" in name:
            assert torch.equal(state[name].dequantize(torch.float32), value), name
    assert_same_answers(made, tmp_path / "out")


def test_what_is_not_written(tmp_path: Path) -> None:
    model(tmp_path / "m.gguf")
    with pytest.raises(ArgumentError, match=r"no type for .*ggml_iq"):
        convert(tmp_path / "m.gguf", tmp_path / "again.gguf", to="gguf", progress=False)
    assert not (tmp_path / "again.gguf").exists()


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "m.gguf")
    found = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "gguf.quants":
            raise ModuleNotFoundError(name)
        return found(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BitportError, match=r"IQ1_M, IQ1_S, IQ2_S.*pip install 'bitport\[gguf\]'"):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
