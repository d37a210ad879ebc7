"""Training the scales of a quantized model with the Trainer of transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.train import convert_, learn_scales_
from tests.integrations.models import logits, make_directory, transformers

pytest.importorskip("accelerate", reason="needs the extra: pip install 'bitport[diffusers]'")

from bitport.integrations.transformers import BitportConfig


def trainer(model: torch.nn.Module, folder: Path) -> transformers.Trainer:
    torch.manual_seed(0)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 320, (16, 24))]
    settings = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    return transformers.Trainer(model, settings, train_dataset=data)


def test_scales_are_trained_and_kept(tmp_path: Path) -> None:
    source = make_directory(tmp_path / "model")
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(source, quantization_config=BitportConfig("int4-g32"))
    with pytest.raises(ValueError, match="purely quantized"):
        trainer(model, tmp_path / "refused")
    before = copy.deepcopy(model)
    model.requires_grad_(False)
    learn_scales_(model)
    other = copy.deepcopy(model)
    trainer(model, tmp_path / "training").train()
    trained = logits(model)
    convert_(model)
    assert torch.equal(logits(model), trained)
    assert not torch.equal(logits(before), trained)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), trained)

    kept = bp.load(lambda: other, tmp_path / "training" / "checkpoint-4")
    assert torch.equal(logits(kept), trained)
