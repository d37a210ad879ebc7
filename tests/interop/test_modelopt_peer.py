"""Files written by ModelOpt, against the weights of the original model: every difference is within the rounding."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.interop.sources import source_of
from bitport.tensor import QTensor

pytestmark = pytest.mark.peers
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
quantization = pytest.importorskip("modelopt.torch.quantization", reason="pip install nvidia-modelopt")

SMALL = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32},
    **{"num_key_value_heads": 2, "vocab_size": 128},
}
IDS = torch.arange(60).reshape(1, 60) * 7 % 128


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def llama4() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    config = transformers.Llama4TextConfig(
        **SMALL, **experts, intermediate_size_mlp=256, no_rope_layers=[1], attention_chunk_size=64, pad_token_id=None
    )
    return transformers.Llama4ForCausalLM(config)


def bound(weight: Tensor, algorithm: str) -> Tensor:
    """The largest rounding error of a weight [.., N, K], from bfloat16 to a scaled number."""
    if algorithm == "FP8":
        return (
            weight.abs() * (2**-4 + 2**-7) + weight.abs().max() * 2**-18
        )  # 4 bits; numbers below 2^-6 are fixed-point
    largest = weight.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    return largest / 6 * (1 + 2**-4 + 2**-7)  # for e2m1 half the distance from 4 to 6, times a scale of 4 bits


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize("make", [llama, llama4])
def test_each_weight_is_rounded(make: Any, algorithm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().to(torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.copy_(torch.randn_like(value) * 0.1)
    weights = {name: value.float().clone() for name, value in model.state_dict().items()}
    model = quantization.quantize(model, getattr(quantization, f"{algorithm}_DEFAULT_CFG"), lambda made: made(IDS))
    with torch.inference_mode():
        importlib.import_module("modelopt.torch.export").export_hf_checkpoint(model, export_dir=tmp_path)
    found = {name: value for name, value in source_of(tmp_path).items() if isinstance(value, QTensor)}
    assert len(found) == {"llama": 7, "llama4": 9}[make.__name__]
    for name, q in found.items():
        assert str(q.scheme) == f"{algorithm.lower()}-static"
        rounded, weight = q.dequantize(torch.float32), weights[name]
        assert rounded.shape == weight.shape
        rounded, weight = (rounded.mT, weight.mT) if q.transposed else (rounded, weight)
        assert bool(((rounded - weight).abs() <= bound(weight, algorithm)).all()), name
