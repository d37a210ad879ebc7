"""Common operations on diffusers models with quantized weights: casts, offloading, compiling, fusing, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import bitport as bp
from bitport.errors import ArgumentError
from bitport.integrations.huggingface import save_model
from bitport.numerics import sqnr
from bitport.tensor import QTensor

from .components import flux_pipeline, latents, made, output, random
from .test_diffusers import ORDER, bits, loaded, quantized
from .test_pretrained import assert_same

ADAPTED, RANK = ("to_q", "to_k", "proj_mlp"), 4


def in_float(model: Any) -> torch.Tensor:
    return output(bp.dequantize_(copy.deepcopy(model)), "flux")


def test_casts() -> None:
    """Codes and scales do not change."""
    model, before = quantized("flux"), quantized("flux")
    model.to(torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert float(sqnr(in_float(model).float(), output(model, "flux").float())) > 30  # sums in bfloat16: 8 bits
    assert_same_bits(model, before)


def assert_same_bits(model: Any, right: Any) -> None:
    for mine, theirs in zip(bits(model), bits(right), strict=True):
        assert torch.equal(mine.to(torch.float32), theirs)


def test_layerwise_casting() -> None:
    """Float parameters are stored in float8, as in any model; quantized weights do not change."""
    model = quantized("flux")
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert model.proj_out.bias.dtype == torch.float32  # diffusers leaves it alone
    block = model.transformer_blocks[0]
    assert block.attn.to_q.bias.dtype == torch.float8_e4m3fn
    rounded = quantized("flux")
    for name, param in rounded.named_parameters():
        if model.get_parameter(name).dtype == torch.float8_e4m3fn and not isinstance(param, QTensor):
            param.data = param.data.to(torch.float8_e4m3fn).float()
    assert float(sqnr(output(rounded, "flux"), output(model, "flux"))) > ORDER
    assert_same_bits(model, rounded)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_group_offloading(kind: str) -> None:
    """From the CPU to the CPU: every weight is removed from its parameter and restored."""
    model, expected = quantized("flux"), output(quantized("flux"), "flux")
    device = torch.device("cpu")
    model.enable_group_offload(device, device, offload_type=kind, num_blocks_per_group=1)
    for _ in range(2):
        assert torch.equal(output(model, "flux"), expected)
    assert_same_bits(model, quantized("flux"))


def test_group_offloading_to_disk_is_refused(tmp_path: Path) -> None:
    device = torch.device("cpu")
    with pytest.raises(ArgumentError, match="a quantized tensor lies in several storages"):
        quantized("flux").enable_group_offload(
            device, device, offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compile(how: str) -> None:
    model, expected = quantized("flux"), output(quantized("flux"), "flux")
    if how == "whole":
        model.compile(fullgraph=True, backend="aot_eager")
    else:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert float(sqnr(expected, output(model, "flux"))) > ORDER


def test_projections_are_fused_before_they_are_quantized() -> None:
    model = made("flux")
    model.fuse_qkv_projections()
    report = bp.quantize_(model, "int8")
    assert sum("to_qkv" in layer.name for layer in report.quantized) == 4
    assert float(sqnr(output(quantized("flux", "int8"), "flux"), output(model, "flux"))) > ORDER
    with pytest.raises(ArgumentError, match="cannot be copied into a float one"):
        quantized("flux").fuse_qkv_projections()


def lora() -> dict[str, torch.Tensor]:
    """LoRA weights with the names used in files."""
    found: dict[str, torch.Tensor] = {}
    for name, module in made("flux").named_modules():
        if name.rpartition(".")[2] in ADAPTED and isinstance(module, torch.nn.Linear):
            found[f"transformer.{name}.lora_A.weight"] = random(RANK, module.in_features)
            found[f"transformer.{name}.lora_B.weight"] = random(module.out_features, RANK, seed=2) / 8
    return found


@pytest.mark.peers
def test_adapters_of_a_pipeline(tmp_path: Path) -> None:
    """Adapters match those over the same float numbers, can be removed, never enter a checkpoint, and cannot be fused
    into codes."""
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    save_model(quantized("flux"), tmp_path / "out")
    model = loaded("flux", tmp_path / "out")
    pipe, floats = flux_pipeline(model), flux_pipeline(bp.dequantize_(quantized("flux")))
    expected, weights = latents(pipe), lora()
    for each in (pipe, floats):
        each.load_lora_weights(weights, adapter_name="style")
    adapted = latents(pipe)
    assert float(sqnr(expected, adapted)) < 40
    assert float(sqnr(latents(floats), adapted)) > ORDER - 10
    with pytest.raises(ArgumentError, match=r"has adapters \(style\).*save_lora_adapter"):
        model.save_pretrained(tmp_path / "adapted")
    model.save_lora_adapter(tmp_path / "style", adapter_name="style")
    with pytest.raises(NotImplementedError, match=r"take the float tensor with \.dequantize\(\)"):
        pipe.fuse_lora()
    pipe.unload_lora_weights()
    assert torch.equal(latents(pipe), expected)
    model.save_pretrained(tmp_path / "two")
    assert_same(loaded("flux", tmp_path / "two"), model)
    model.load_lora_adapter(tmp_path / "style", prefix=None, use_safetensors=True)
    assert float(sqnr(adapted, latents(pipe))) > ORDER


@pytest.mark.peers
def test_adapters_that_widen_a_quantized_layer_are_refused() -> None:
    """Such as those that add an image input to Flux: diffusers copies the weight into a wider one."""
    pytest.importorskip("peft", reason="needs peft: pip install peft")
    pipe = flux_pipeline(quantized("flux"))
    wider = {
        "transformer.x_embedder.lora_A.weight": torch.ones(4, 8),
        "transformer.x_embedder.lora_B.weight": torch.ones(32, 4),
    }
    with pytest.raises(ArgumentError, match="cannot be copied into a float one"):
        pipe.load_lora_weights(wider)
