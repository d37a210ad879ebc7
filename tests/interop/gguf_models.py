"""Configs of small models, for each architecture of GGUF files."""

from __future__ import annotations

from typing import Any

from .gguf_files import SIZES, transformers

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NEAR_AND_FAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 8,
} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 15e4, "factor": 4.0, "truncate": False}
    | {"original_max_position_embeddings": 32}
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} | {
    "shared_expert_intermediate_size": 96,
    "sliding_window": None,
}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.03125} | {
    "logits_scaling": 8.0
}
MINISTRAL: dict[str, Any] = {"head_dim": 32} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
}
GLM4 = {"head_dim": 32, "pad_token_id": None}
GLM4_MOE: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64} | {
    **{"n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3, "routed_scaling_factor": 1.5},
    **{"head_dim": 32, "attention_bias": True},
}
DEEPSEEK: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64} | {
    **{"n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3, "routed_scaling_factor": 1.5},
    **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64},
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1},
}
DEEPSEEK_2: dict[str, Any] = {**DEEPSEEK, "q_lora_rank": 96} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    | {"original_max_position_embeddings": 16}
}
DEEPSEEK_3: dict[str, Any] = {**DEEPSEEK, "q_lora_rank": 96, "norm_topk_prob": True}
INDEX = {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 16}
"""With few heads many scores would be 0, and nobody says which of them are the best."""
DEEPSEEK_32: dict[str, Any] = {**DEEPSEEK_3, **INDEX} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 16}
}
GLM_5: dict[str, Any] = {**DEEPSEEK_3, **INDEX, "indexer_types": ["full", "shared", "full"]}
MISTRAL4: dict[str, Any] = {**DEEPSEEK_3, "n_group": 4, "topk_group": 2} | {
    "rope_parameters": {**DEEPSEEK_32["rope_parameters"], "llama_4_scaling_beta": 0.1}
}
KINDS_OF_LAYERS = {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_hidden_layers": 4}
LFM2: dict[str, Any] = {**KINDS_OF_LAYERS, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5}
LFM2_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64} | {
    **{**KINDS_OF_LAYERS, "num_dense_layers": 2, "norm_eps": 1e-5}
}
MINIMAX_M2: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
}
GEMMA4: dict[str, Any] = {"head_dim": 32, "global_head_dim": 64, "sliding_window": 8} | {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    **{"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": SIZES["vocab_size"]},
    **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1} | {
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
}
BESIDE_MLP = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}
COHERE2 = {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.25, "layer_norm_eps": 1e-5}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64} | {
    **{"linear_value_head_dim": 64, "head_dim": 32, "num_hidden_layers": 3, "full_attention_interval": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
}
QWEN3_NEXT: dict[str, Any] = {**LINEAR, **SHARED} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 8.0} | {
    "short_factor": [1.0 + at / 24 for at in range(24)],
    "long_factor": [1.08 + at for at in range(24)],
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MORE = {
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5}),
    "granite": ("GraniteConfig", GRANITE),
    "olmo2": ("Olmo2Config", {}),
    "mistral3": ("Ministral3Config", MINISTRAL),
    "glm4": ("Glm4Config", GLM4),
    "glm4moe": ("Glm4MoeConfig", GLM4_MOE),
    "glm4moe-groups": ("Glm4MoeConfig", {**GLM4_MOE, "n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "deepseek2": ("DeepseekV2Config", DEEPSEEK_2),
    "deepseek3": ("DeepseekV3Config", DEEPSEEK_3),
    "deepseek3-groups": ("DeepseekV3Config", {**DEEPSEEK_3, "n_group": 4, "topk_group": 2}),
    "deepseek32": ("DeepseekV32Config", DEEPSEEK_32),
    "glm-dsa": ("GlmMoeDsaConfig", GLM_5),
    "mistral4": ("Mistral4Config", MISTRAL4),
    "gemma4": ("Gemma4TextConfig", GEMMA4),
    "gemma4-values": ("Gemma4TextConfig", {**GEMMA4, **KEYS_AS_VALUES}),
    "gemma4-experts": ("Gemma4TextConfig", {**GEMMA4, **KEYS_AS_VALUES, **BESIDE_MLP}),
    "minimax-m2": ("MiniMaxM2Config", MINIMAX_M2),
    "lfm2": ("Lfm2Config", LFM2),
    "lfm2moe": ("Lfm2MoeConfig", LFM2_MOE),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32}),
    "starcoder2": ("Starcoder2Config", {"norm_epsilon": 1e-5}),
    "cohere2": ("Cohere2Config", COHERE2),
    "qwen3next": ("Qwen3NextConfig", QWEN3_NEXT),
    "qwen35": ("Qwen3_5TextConfig", LINEAR),
    "qwen35moe": ("Qwen3_5MoeTextConfig", {**LINEAR, **SHARED}),
}
"""Architecture -> a model with it."""
OF = {
    "gpt-oss": ("GptOssConfig", GPT_OSS),
    "mixtral": ("MixtralConfig", MIXTRAL),
    "qwen2moe": ("Qwen2MoeConfig", SHARED),
    **MORE,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


EPSILONS = ("norm_eps", "norm_epsilon", "layer_norm_eps")
"""Names of the setting in models without rms_norm_eps."""


def small(kind: str, **changes: Any) -> Any:
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps" or not {*EPSILONS} & {*changes}}
    return getattr(transformers, kind)(**{**sizes, **changes})


def config_of(name: str, **changes: Any) -> Any:
    kind, its = OF[name]
    return small(kind, **{**its, **changes})
