"""The config.json of models that everybody knows, as they were published, in the settings of a GGUF file."""

from __future__ import annotations

from typing import Any

import pytest

from bitport.errors import ArgumentError
from bitport.interop.gguf.names import ARCHITECTURES
from bitport.interop.gguf.settings import settings_of

ALL = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True}
LLAMA = {**ALL, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "pretraining_tp": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {
        **ALL,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Llama 3.2 1B": {
        **LLAMA,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Mistral 7B 0.3": {
        **ALL,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "Qwen 2.5 7B": {
        **ALL,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen 3 30B-A3B": {
        **ALL,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Phi 3 mini 128k": {
        **ALL,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.07 + at for at in range(48)],
            "short_factor": [1.1] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "Gemma 2 9B": {
        **ALL,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "vocab_size": 256000,
    },
    "Gemma 3 1B": {
        **ALL,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
NONE = {"attention_bias": False, "mlp_bias": False}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model: str) -> None:
    config = PUBLISHED[model]
    said = settings_of(config, {**NONE, "attention_bias": config["model_type"] == "qwen2"})
    name = said.settings["general.architecture"]
    assert ARCHITECTURES[name] is said.architecture
    assert said.settings[f"{name}.rope.freq_base"] == config.get("rope_theta", 10000.0)
    assert said.settings[f"{name}.vocab_size"] == config["vocab_size"]
    assert said.settings["tokenizer.ggml.bos_token_id"] == config["bos_token_id"]


def test_what_follows_from_the_sizes() -> None:
    assert settings_of(PUBLISHED["Qwen 2.5 7B"], NONE).settings["qwen2.attention.key_length"] == 128
    phi = settings_of(PUBLISHED["Phi 3 mini 128k"], NONE)
    assert phi.settings["phi3.rope.scaling.attn_factor"] == pytest.approx(1.1902380714238083, rel=1e-7)
    assert phi.vectors["rope_factors_long.weight"].tolist() == pytest.approx([1.07 + at for at in range(48)], rel=1e-6)
    assert settings_of(PUBLISHED["Gemma 3 1B"], NONE).settings["gemma3.rope.freq_base_swa"] == 10000.0


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("Gemma 2 9B", {"query_pre_attn_scalar": 224}, r"query_pre_attn_scalar = 224 \(it would be 256\)"),
        ("Gemma 2 9B", {"query_pre_attn_scalar": None}, r"no query_pre_attn_scalar \(it would be 256\)"),
        ("Gemma 2 9B", {"head_dim": None}, "head_dim None"),
        ("Gemma 2 9B", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("Gemma 3 1B", {"sliding_window_pattern": 5}, "layer_types"),
        ("Gemma 3 1B", {"sliding_window_pattern": 0}, "sliding_window_pattern 0"),
        ("Qwen 3 30B-A3B", {"norm_topk_prob": False}, r"norm_topk_prob = False \(it would be True\)"),
        ("Qwen 3 30B-A3B", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("Qwen 2.5 7B", {"use_sliding_window": True}, "sliding_window"),
        ("Mistral 7B 0.3", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("Phi 3 mini 128k", {"original_max_position_embeddings": 1}, "original_max_position_embeddings 1"),
        ("Phi 3 mini 128k", {"partial_rotary_factor": 0.7}, "partial_rotary|rope_parameters"),
    ],
)
def test_what_would_be_another_model(model: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        settings_of({**PUBLISHED[model], **changes}, NONE)
