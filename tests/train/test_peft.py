"""Adapters by PEFT, over quantized weights and over weights in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bitport as bp
from bitport.train import convert_, prepare_

pytestmark = pytest.mark.peers
peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

IDS = torch.arange(20)[None]


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=96, **sizes))


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))


def trained(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("scheme", ["int4-g32", "nf4", "int8-dyn"])
def test_adapters_over_quantized_weights(scheme: str, tmp_path: Path) -> None:
    """The losses are those of adapters over a float model with the same numbers, where inputs are not rounded."""
    base = model_of()
    bp.quantize_(base, scheme)
    model = adapted(base)
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.2
    if not bp.preset(scheme).act:
        floats = model_of()
        bp.quantize_(floats, scheme)
        assert trained(adapted(bp.dequantize_(floats))) == pytest.approx(losses, rel=1e-4)
    model.save_pretrained(tmp_path)
    fresh = model_of()
    bp.quantize_(fresh, scheme)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_merging_into_quantized_weights_is_refused() -> None:
    base = model_of()
    bp.quantize_(base, "int4-g32")
    model = adapted(base)
    with pytest.raises(NotImplementedError, match=r"take the float tensor with \.dequantize\(\)"):
        model.merge_and_unload()


def test_adapters_over_weights_in_training_are_merged_and_converted() -> None:
    base = model_of()
    prepare_(base, "int4-g32")
    model = adapted(base)
    losses = trained(model)
    assert losses[-1] < losses[0] - 0.2
    merged = model.merge_and_unload()
    report = convert_(merged)
    assert len(report.quantized) == 15
    with torch.no_grad():
        assert float(merged(input_ids=IDS, labels=IDS).loss) < losses[0]
