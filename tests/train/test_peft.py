"""PEFT adapters over quantized weights and over weights in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def adapted(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **{"target_modules": "all-linear", **options}))


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
    """Where inputs are not rounded, the losses are those of adapters over a float model with the same numbers."""
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


def test_adapters_of_a_quantized_head_are_saved_alone(tmp_path: Path) -> None:
    """PEFT would write the head beside them, into a safetensors file."""

    def quantized() -> torch.nn.Module:
        base = model_of()
        bp.quantize_(base, "int4-g32")
        return base

    model = adapted(quantized(), target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with pytest.raises(bp.errors.ArgumentError, match="save_embedding_layers=False"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = peft.PeftModel.from_pretrained(quantized(), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


def experts_of() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(vocab_size=96, num_key_value_heads=2, num_local_experts=4, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("make", "options"),
    [pytest.param(model_of, {"use_dora": True}, id="dora"), pytest.param(experts_of, EXPERTS, id="experts")],
)
def test_adapters_that_add_to_weights(make: Callable[[], torch.nn.Module], options: dict[str, Any]) -> None:
    """This needs aten.add on a QTensor."""
    losses = []
    for as_floats in (False, True):
        base = make()
        bp.quantize_(base, "int4-g32")
        model = adapted(bp.dequantize_(base) if as_floats else base, **options)
        losses.append(trained(model))
    assert losses[0][-1] < losses[0][0] - 0.05
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_merged_once_the_model_is_a_float_one(dora: bool) -> None:
    """LoRA adds to a weight in place, DoRA assigns the sum to its .data."""
    base = model_of()
    bp.quantize_(base, "int4-g32")
    model = adapted(base, use_dora=dora)
    trained(model)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        with pytest.raises(bp.errors.BitportError, match=r"dequantize_\(model\), as before adapters are merged"):
            model.merge_and_unload()
        assert torch.equal(model(input_ids=IDS).logits, wanted)
        merged = bp.dequantize_(model).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, rtol=1e-4, atol=1e-4)


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
