"""The models for generation benchmarks: the bundled one, and a Llama of a billion random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bitport.integrations.huggingface import load_model

TINYLM = Path(__file__).parents[1] / "models" / "tinylm"

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Its head is a separate matrix, so that every library quantizes it like the other linear layers."""

SMALLER = {
    "llama-tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512},
    "llama-400m": {"num_hidden_layers": 8, "vocab_size": 32000},
}
"""Other random models -> the settings that differ: one for tests, and one of 400 MB in four bits."""
NAMES = ("tinylm", "llama-1b", *SMALLER)


def settings_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """``layers``: use this many instead of all."""
    return {**LLAMA_1B, **SMALLER.get(name, {}), **({"num_hidden_layers": layers} if layers else {})}


def model_of(name: str, layers: int | None = None) -> Any:
    """The model in bfloat16 on the CPU. ``layers`` does not apply to the bundled model."""
    if name == "tinylm":
        return load_model(TINYLM)
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings_of(name, layers))).bfloat16()
    rotary = type(model.model.rotary_emb)(model.config)  # computed rather than stored, so lost on meta
    model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.eval()
