"""Modules of sentence-transformers that follow a model, in folders of their own, are a part of what is quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bitport.checkpoint import quantize_files
from bitport.errors import CheckpointError

MODULES = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "./3_Dense/"}, {"path": "4_Dense"}]


def write(path: Path, modules: object = MODULES) -> None:
    path.mkdir()
    save_file({"a.query.weight": torch.randn(64, 64)}, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "bert"}')
    (path / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    for folder in ("1_Pooling", "2_Dense", "3_Dense", "4_Dense", "onnx"):
        (path / folder).mkdir()
        (path / folder / "config.json").write_text("{}")
    for folder in ("2_Dense", "3_Dense", "onnx"):
        save_file({"linear.weight": torch.randn(8, 64)}, path / folder / "model.safetensors")
    for folder in ("2_Dense", "4_Dense", "."):
        torch.save({"linear.weight": torch.randn(8, 64)}, path / folder / "pytorch_model.bin")


def weights(path: Path) -> set[str]:
    every = (file.relative_to(path) for file in path.rglob("*") if file.suffix in (".safetensors", ".bin"))
    return {str(file) for file in every if len(file.parts) > 1}


def test_the_weights_that_are_loaded_are_carried_over(tmp_path: Path) -> None:
    """As they are; no second form of them, nor of the model."""
    source, out = tmp_path / "source", tmp_path / "out"
    write(source)
    with pytest.warns(UserWarning, match=r"not carried over from .*source: onnx/model.safetensors\. Weights in other"):
        quantize_files(source, out, "int8")
    assert weights(out) == {"2_Dense/model.safetensors", "3_Dense/model.safetensors", "4_Dense/pytorch_model.bin"}
    for name in ("2_Dense/model.safetensors", "4_Dense/pytorch_model.bin"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    "modules",
    [
        [],
        {},
        None,
        [
            None,
            3,
            {"path": 3},
            {},
            {"path": "missing"},
            {"path": "../beside"},
            {"path": "/etc"},
            {"path": 999 * "x"},
            {"path": "\0"},
        ],
    ],
    ids=["none", "object", "null", "damaged"],
)
def test_other_lists(modules: Any, tmp_path: Path) -> None:
    write(tmp_path / "source", modules)
    (tmp_path / "beside").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "beside" / "model.safetensors")
    with pytest.warns(
        UserWarning, match=r"2_Dense/model.safetensors, 3_Dense/model.safetensors, onnx/model.safetensors\."
    ):
        quantize_files(tmp_path / "source", tmp_path / "out", "int8")
    assert weights(tmp_path / "out") == set()


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "source", "[{")
    with pytest.raises(CheckpointError, match=r"modules\.json is not JSON"):
        quantize_files(tmp_path / "source", tmp_path / "out", "int8")
