"""Whole models with experts, stacked and named like mlx-lm's, in transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitport.interop import convert
from bitport.interop.mlx import STACKING
from bitport.tensor import QTensor

from .files import config_in

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
huggingface = pytest.importorskip("bitport.integrations.huggingface")

SMALL = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 128, "moe_intermediate_size": 64, "num_experts": 4},
    **{"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1, "pad_token_id": None},
}
OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")


def quantized(weight: Tensor) -> dict[str, Tensor]:
    """4 bits in groups of 32 with powers of two as scales, so that each value is exact in float32."""
    codes = (weight.float() / 2**-6).round().clamp(-8, 7).to(torch.int64) + 8
    shifts = torch.arange(8) * 4
    words = (codes.unflatten(-1, (-1, 8)) << shifts).sum(-1)
    scales = torch.full((*weight.shape[:-1], weight.shape[-1] // 32), 2.0**-6, dtype=torch.bfloat16)
    return {"weight": words.to(torch.uint32), "scales": scales, "biases": -8 * scales}


def rounded(weight: Tensor) -> Tensor:
    return (weight.float() / 2**-6).round().clamp(-8, 7) * 2**-6


@pytest.mark.parametrize("kind", STACKING)
def test_the_model_answers_as_before(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "float")
    tensors = load_file(tmp_path / "float" / "model.safetensors")
    stacks: dict[str, dict[int, Tensor]] = {}
    files = {}
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            block, number, projection = found.groups()
            stack = f"{block}.switch_mlp.{OF_MIXTRAL.get(projection, projection)}"
            stacks.setdefault(stack, {})[int(number)] = tensor
        else:
            files[name] = tensor
    for stack, each in stacks.items():
        made = quantized(torch.stack([each[number] for number in range(len(each))]))
        files |= {f"{stack}.{end}": tensor for end, tensor in made.items()}
    said = config_in(tmp_path / "float")
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "config.json").write_text(json.dumps({**said, "quantization": {"group_size": 32, "bits": 4}}))
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, tmp_path / "mlx" / "model.safetensors")

    convert(tmp_path / "mlx", tmp_path / "ours", progress=False)
    ours = huggingface.load_model(tmp_path / "ours")
    layers = len(stacks) // 3
    assert layers >= 1
    held = {name: value for name, value in ours.state_dict().items() if isinstance(value, QTensor)}
    assert len(held) == 2 * layers
    state: dict[str, Any] = model.state_dict()
    for name, value in held.items():
        assert torch.equal(value.dequantize(torch.float32), rounded(state[name])), name
        state[name].copy_(rounded(state[name]))
    ids = torch.arange(60).reshape(2, 30) * 7 % 128
    with torch.no_grad():
        wanted, found = model(input_ids=ids).logits, ours(input_ids=ids).logits
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
