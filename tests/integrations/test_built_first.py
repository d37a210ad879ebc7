"""Models of transformers that are built from a config before their weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.errors import CheckpointError
from bitport.integrations.huggingface import load_model, save_model

from .test_pretrained import CAUSAL, IDS, quantized, transformers


def test_a_model_that_is_built_first(tmp_path: Path) -> None:
    """With its buffers where a model was saved; files quantized one by one have none that a model computes itself."""
    out = quantized(tmp_path)
    config, right = transformers.AutoConfig.from_pretrained(tmp_path / "float"), load_model(out)
    save_model(right, tmp_path / "saved")
    bp.save(right, tmp_path / "plain")
    for directory in (tmp_path / "saved", tmp_path / "plain"):
        assert torch.equal(bp.load(lambda: CAUSAL.from_config(config), directory)(IDS).logits, right(IDS).logits)
    with pytest.raises(CheckpointError, match=r"by load\(build\(\), \.\.\) .*rotary_emb\.inv_freq"):
        bp.load(lambda: CAUSAL.from_config(config), out)
    assert torch.equal(bp.load(CAUSAL.from_config(config), out)(IDS).logits, right(IDS).logits)


def test_floats_beside_the_config_of_a_quantized_model(tmp_path: Path) -> None:
    """transformers writes the entry of the config whatever the weights are; docs/troubleshooting.md says what to do."""
    CAUSAL.from_pretrained(quantized(tmp_path)).save_pretrained(tmp_path / "saved")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    model = bp.load(lambda: CAUSAL.from_config(config), tmp_path / "saved")
    bp.dequantize_(model)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="Can't find a checkpoint index"):
        CAUSAL.from_pretrained(tmp_path / "plain")
    said = json.loads((tmp_path / "plain" / "config.json").read_text())
    del said["quantization_config"]
    (tmp_path / "plain" / "config.json").write_text(json.dumps(said))
    again = CAUSAL.from_pretrained(tmp_path / "plain")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
