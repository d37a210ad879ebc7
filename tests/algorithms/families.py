"""Tiny random models of the common families, and inputs for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitport.algorithms.pairs import find_pairs, shared_parameters
from bitport.algorithms.trial import Trial
from bitport.calibrate.batches import Call
from bitport.calibrate.blocks import blocks_of

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
WHISPER = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 0}
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", HEADS),
    "mistral": ("MistralConfig", HEADS),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", HEADS),
    "phi": ("PhiConfig", SMALL),
    "phi3": ("Phi3Config", GROUPED),
    "gemma": ("GemmaConfig", HEADS),
    "gemma2": ("Gemma2Config", HEADS),
    "olmo2": ("Olmo2Config", GROUPED),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "opt": ("OPTConfig", {**{key: SMALL[key] for key in SMALL if key != "intermediate_size"}, **OPT}),
    "bert": ("BertConfig", SMALL),
    "whisper": ("WhisperConfig", WHISPER),
    "mixtral": ("MixtralConfig", {**HEADS, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeConfig", {**HEADS, "num_experts": 4, **EXPERTS}),
    "gpt-oss": ("GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": ("DeepseekV3Config", {**SMALL, "num_key_value_heads": 4, **EXPERTS, **LATENT, **GROUPS}),
}


def model_of(name: str) -> nn.Module:
    """A model in float32 whose norms and biases differ from ones and zeros."""
    config, fields = CONFIGS[name]
    kinds = {"bert": transformers.AutoModel, "whisper": transformers.AutoModelForSpeechSeq2Seq}
    torch.manual_seed(0)
    model = kinds.get(name, transformers.AutoModelForCausalLM).from_config(getattr(transformers, config)(**fields))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.2)
            else:
                param.mul_(4)  # far enough from zero that a GELU is not linear
    return model.float().eval()


def batch_of(name: str, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (rows, 24), generator=torch.Generator().manual_seed(1))
    if name == "whisper":
        sound = torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(2))
        return {"input_features": sound, "decoder_input_ids": ids[:, :12]}
    return {"input_ids": ids}


def output(model: nn.Module, name: str) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**batch_of(name))[0]
    return found


def calls_of(model: nn.Module, name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Return the (name, arguments, keywords) of each call of a block."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def note(block: str) -> Any:
        return lambda module, args, kwargs: calls.append((block, args, kwargs))

    hooks = [
        model.get_submodule(block).register_forward_pre_hook(note(block), with_kwargs=True)
        for block in blocks_of(model)
    ]
    with torch.no_grad():
        model(**batch_of(name), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def plant_outliers(model: nn.Module, name: str) -> None:
    """Make three channels of the input of each product 40 times as large, and the matching weight columns as much
    smaller: the model computes the same as before."""
    for block, args, kwargs in calls_of(model, name):
        module = model.get_submodule(block)
        pairs, _ = find_pairs(Trial(module, [Call(args, kwargs)]), shared_parameters(model, block))
        for pair in pairs:
            scale = torch.ones(pair.shape)
            scale[..., [1, 5, 11]] = 1 / 40
            pair.scale_(module, scale)
