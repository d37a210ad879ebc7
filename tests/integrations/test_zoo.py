"""quantize_ on models unlike Llama; and quantizing their files, which gives the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.cli.main import main
from bitport.numerics import sqnr
from bitport.schemes import RecipeLike

from .test_pretrained import assert_same
from .zoo import ZOO, model_of, outputs, transformers

from bitport.integrations.transformers import BitportConfig  # isort: skip

SCHEME = "int4"


@pytest.mark.parametrize("recipe", [SCHEME, {"*": SCHEME}], ids=["by name", "a rule for all"])
@pytest.mark.parametrize("name", ZOO)
def test_it_computes_its_dequantized_values(name: str, recipe: RecipeLike) -> None:
    """Float32 throughout: only the order of sums may differ. A rule for everything includes tables and convolutions,
    except those that a model reads in another way."""
    model = model_of(name)
    report = bp.quantize_(model, recipe)
    assert all(layer.reason for layer in report.skipped)
    dense = bp.dequantize_(copy.deepcopy(model))
    pairs = list(zip(outputs(model, name), outputs(dense, name), strict=True))
    assert pairs
    assert min(float(sqnr(expected, quantized)) for quantized, expected in pairs) > 90


@pytest.mark.parametrize("name", ZOO)
def test_its_files_become_what_it_becomes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `bitport quantize`, tensor by tensor, and while transformers loads it."""
    model_of(name).save_pretrained(tmp_path / "float")
    kind = getattr(transformers, ZOO[name].model)
    right = kind.from_pretrained(tmp_path / "float")
    bp.quantize_(right, SCHEME)
    assert main(["quantize", str(tmp_path / "float"), "--scheme", SCHEME, "-o", str(tmp_path / "out")]) == 0
    assert "note: " not in capsys.readouterr().err
    assert_same(kind.from_pretrained(tmp_path / "out"), right)
    config = BitportConfig(SCHEME)
    loaded = kind.from_pretrained(tmp_path / "float", quantization_config=config)
    assert_same(loaded, right)
    for mine, expected in zip(outputs(loaded, name), outputs(right, name), strict=True):
        torch.testing.assert_close(mine, expected)
