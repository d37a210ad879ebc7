"""The supported architectures of GGUF files: names of modules in transformers, by those in llama.cpp.

The files hold what llama.cpp computes with, which differs from the model of transformers in the order of rows, and in
more (:mod:`bitport.interop.gguf.changes`). Experts of ``gpt-oss``: gate and up projections, two stacks [experts, N, K]
in the file, are one [experts, K, 2 N] in transformers, with interleaved columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from bitport.errors import CheckpointError
from bitport.interop.gguf import changes, gemma4, indexed, latent
from bitport.interop.gguf import special as specials
from bitport.interop.gguf.architecture import MLP, OUTSIDE, SHARED, STACKS, UNSCALED, Architecture

OUTSIDE_OF_LFM2 = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
}
LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
MIXED = {
    **{leaf: path for leaf, path in LINEAR.items() if leaf not in (*changes.MIXED, "ssm_alpha", "ssm_beta")},
    "ssm_ba": "linear_attn.in_proj_ba",
}
"""Linear attention whose queries, keys, values and gates are made by one matrix (ALL_OF_A_HEAD)."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
ALL_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
"""Embeddings for each layer."""
BESIDE_MLP = {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
"""What experts beside an MLP bring along."""
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
ROUTED = {"ffn_gate_inp": "mlp.gate"}
ALWAYS_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Experts that all tokens share, without a gate."""
EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
"""Parameter -> the tensors whose rows it concatenates."""
CONVOLUTION = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
ATTENTION_OF_LFM2 = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
LFM2 = {
    **{"attn_norm": "operator_norm", **CONVOLUTION, **ATTENTION_OF_LFM2, "ffn_norm": "ffn_norm"},
    **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
}
HYBRID = {
    "linear_attention": tuple(LINEAR),
    "full_attention": (*(leaf for leaf in ATTENTION if leaf != "attn_norm"), *HEAD_NORMS),
}
"""Type of a layer -> the tensors that layers of other types do not have."""
HYBRID_OF_MIXED = {**HYBRID, "linear_attention": (*MIXED, *changes.MIXED, "ssm_in")}
CONVOLVING = {"conv": tuple(CONVOLUTION), "full_attention": tuple(ATTENTION_OF_LFM2)}
ALL_OF_A_HEAD = {"linear_attn.in_proj_qkvz.weight": changes.MIXED}
KEYS_AND_VALUES = {"self_attn.kv_b_proj.weight": latent.PARTS}
OF_QUERIES = {"queries": latent.QUERIES, "latent queries": latent.LATENT_QUERIES}
SPARSE = {"n_routed_experts": ..., "num_experts_per_tok": ..., "n_shared_experts": ...} | {
    **{"moe_intermediate_size": ..., "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 1.0, "norm_topk_prob": False},
}
"""Layers with routed and shared experts after some without."""
RANKS = {"kv_lora_rank": ..., "q_lora_rank": None}
CHOSEN = {"num_experts": ..., "num_experts_per_tok": ...}
LOCAL_EXPERTS = {"num_local_experts": ..., "num_experts_per_tok": ...}
OF_ONE_SIZE = {"moe_intermediate_size": ...}
SIZES = dict.fromkeys(specials.LINEAR, ...)
"""Of linear attention."""
SIGMOID = {"expert_gating_func": 2}
"""Experts are chosen by the sigmoid of their scores."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", {**ATTENTION, **BEFORE_MLP, **MLP}, specials.llama, interleaved=True, unscaled=()
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "mixtral",
        {**ATTENTION, **BEFORE_MLP, **ROUTED},
        specials.llama,
        interleaved=True,
        stacked=EXPERTS,
        more=LOCAL_EXPERTS,
        unscaled=(),
        declared={},
        file="llama",
        older={"block_sparse_moe.": "mlp."},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**ATTENTION, **BEFORE_MLP, **MLP}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**ATTENTION, **HEAD_NORMS, **BEFORE_MLP, **MLP}, unscaled=()),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**ATTENTION, **BEFORE_MLP, **ROUTED, **SHARED},
        specials.qwen2moe,
        stacked=EXPERTS,
        more=CHOSEN | {"moe_intermediate_size": None, "shared_expert_intermediate_size": None},
        declared={"qkv_bias": "self_attn.q_proj.bias"},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**ATTENTION, **HEAD_NORMS, **BEFORE_MLP, **ROUTED},
        specials.qwen3moe,
        stacked=EXPERTS,
        unscaled=(),
        more=CHOSEN | OF_ONE_SIZE,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **{**ATTENTION, **HEAD_NORMS, **MIXED, "post_attention_norm": "post_attention_layernorm"},
            **{**ROUTED, **SHARED},
        },
        specials.qwen3next,
        unscaled=("attn_qkv", "attn_gate", "ssm_ba", "ssm_out"),
        norms_less_one=True,
        stacked={**EXPERTS, **ALL_OF_A_HEAD},
        more=SIZES | CHOSEN | OF_ONE_SIZE | {"shared_expert_intermediate_size": ...},
        of_layers=HYBRID_OF_MIXED,
        dense=False,
        declared={},
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        {**ATTENTION, **HEAD_NORMS, **LINEAR, "post_attention_norm": "post_attention_layernorm", **MLP},
        specials.qwen35,
        norms_less_one=True,
        unscaled=(),
        more=SIZES,
        of_layers=HYBRID,
        declared={},
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {
            **{**ATTENTION, **HEAD_NORMS, **LINEAR, "post_attention_norm": "post_attention_layernorm"},
            **{**ROUTED, **SHARED},
        },
        specials.qwen35,
        unscaled=(),
        norms_less_one=True,
        stacked=EXPERTS,
        more=SIZES | CHOSEN | OF_ONE_SIZE | {"shared_expert_intermediate_size": ...},
        of_layers=HYBRID,
        dense=False,
        declared={},
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **ATTENTION,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        specials.gpt_oss,
        stacked=EXPERTS,
        in_turn=True,
        more={**LOCAL_EXPERTS, "sliding_window": ...},
        biased=("attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {**ATTENTION, **HEAD_NORMS, **BEFORE_MLP, **ROUTED, "exp_probs_b": "mlp.e_score_correction_bias"},
        specials.minimax_m2,
        stacked=EXPERTS,
        more=LOCAL_EXPERTS,
        declared={},
        fixed=SIGMOID,
        older={"block_sparse_moe.": "mlp."},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", **BEFORE_MLP, **FUSED},
        specials.phi3,
        more={"sliding_window": 0},
    ),
    "gemma": Architecture(
        "GemmaForCausalLM", "gemma", {**ATTENTION, **BEFORE_MLP, **MLP}, norms_less_one=True, gelu=True
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        {**ATTENTION, **FOUR_NORMS, **MLP},
        specials.gemma2,
        norms_less_one=True,
        gelu=True,
        more={"sliding_window": ..., "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**ATTENTION, **HEAD_NORMS, **FOUR_NORMS, **MLP},
        specials.gemma3,
        norms_less_one=True,
        gelu=True,
        more={"sliding_window": ..., "final_logit_softcapping": None},
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **{**ATTENTION, **HEAD_NORMS, **FOUR_NORMS, **MLP, **INPUTS, **BESIDE_MLP},
            "layer_output_scale": "layer_scalar",
        },
        gemma4.special,
        outside={**OUTSIDE, **ALL_INPUTS},
        gelu=True,
        stacked={parameter.removeprefix("mlp."): leaves for parameter, leaves in EXPERTS.items()},
        more={"sliding_window": ..., "final_logit_softcapping": 30.0}
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        | dict.fromkeys(gemma4.EXPERTS),
        several=("num_key_value_heads", "intermediate_size"),
        of_layers={
            **{"keys": ("attn_k", "attn_k_norm"), "values": ("attn_v",), "inputs": (*INPUTS, *ALL_INPUTS)},
            "experts": (*BESIDE_MLP, *STACKS),
        },
        unscaled=(*INPUTS, *ALL_INPUTS, "ffn_down_exps"),
        declared={},
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        {**ATTENTION, **BEFORE_MLP, **MLP},
        specials.smollm3,
        interleaved=True,
        declared={},
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        {**ATTENTION, **BEFORE_MLP, **MLP},
        specials.granite,
        interleaved=True,
        more={"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        | {"attention_multiplier": None, "logits_scaling": ...},
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            **{leaf: path for leaf, path in ATTENTION.items() if leaf != "attn_norm"},
            **HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            **MLP,
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        declared={},
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        "ministral3",
        {**ATTENTION, **BEFORE_MLP, **MLP},
        specials.mistral3,
        interleaved=True,
        unscaled=(),
        declared={},
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        {
            **ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            **BEFORE_MLP,
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        specials.turned,
        declared={"attention_bias": "self_attn.q_proj.bias"},
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **{**ATTENTION, **HEAD_NORMS, "post_attention_norm": "post_attention_layernorm", **MLP},
            **{**ROUTED, "exp_probs_b": "mlp.gate.e_score_correction_bias", **ALWAYS_SHARED},
        },
        specials.glm4moe,
        stacked=EXPERTS,
        more=SPARSE,
        of_layers={"dense": tuple(MLP), "sparse": (*ROUTED, "exp_probs_b", *ALWAYS_SHARED, *STACKS)},
        optional=tuple(HEAD_NORMS),
        declared={"attention_bias": "self_attn.q_proj.bias", "use_qk_norm": "self_attn.q_norm.weight"},
        fixed=SIGMOID,
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**LATENT, **BEFORE_MLP, **MLP, **ROUTED, **ALWAYS_SHARED},
        latent.deepseek2,
        stacked={**EXPERTS, **KEYS_AND_VALUES},
        latent=True,
        more=SPARSE | RANKS,
        of_layers={**OF_QUERIES, "dense": tuple(MLP), "sparse": (*ROUTED, *ALWAYS_SHARED, *STACKS)},
        unscaled=(*LATENT, *UNSCALED),
        declared={},
        fixed={"expert_gating_func": 1},
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        LFM2,
        specials.lfm2,
        outside=OUTSIDE_OF_LFM2,
        epsilon="norm_eps",
        more={"conv_L_cache": ...},
        several=("num_key_value_heads",),
        of_layers=CONVOLVING,
        unscaled=(*UNSCALED, *CONVOLUTION),
        declared={},
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {**LFM2, "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"},
        specials.lfm2moe,
        outside=OUTSIDE_OF_LFM2,
        stacked={parameter.replace("mlp", "feed_forward"): leaves for parameter, leaves in EXPERTS.items()},
        epsilon="norm_eps",
        more=CHOSEN | OF_ONE_SIZE | {"conv_L_cache": ..., "num_dense_layers": 0},
        several=("num_key_value_heads",),
        of_layers={**CONVOLVING, "dense": tuple(MLP), "sparse": ("ffn_gate_inp", "exp_probs_b", *STACKS)},
        unscaled=(*UNSCALED, *CONVOLUTION),
        declared={},
        fixed=SIGMOID,
    ),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {**ATTENTION, "post_attention_norm": "post_attention_layernorm", **MLP},
        declared={"attention_bias": "self_attn.q_proj.bias"},
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", {**ATTENTION, **BEFORE_MLP, **MLP}, declared={}),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {**ATTENTION, **BEFORE_MLP, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        specials.starcoder2,
        epsilon="norm_epsilon",
        gelu=True,
        more={"sliding_window": 0},
        declared={"use_bias": "self_attn.q_proj.bias"},
        biased=("output_norm", "attn_norm", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        {**ATTENTION, **MLP},
        specials.cohere2,
        epsilon="layer_norm_eps",
        tied=True,
        more={"logit_scale": ..., "sliding_window": ...},
        unscaled=(),
        declared={},
    ),
}
DEEPSEEK2 = ARCHITECTURES["deepseek2"]
ARCHITECTURES["deepseek3"] = dataclasses.replace(
    DEEPSEEK2,
    classname="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    names={**DEEPSEEK2.names, "exp_probs_b": "mlp.gate.e_score_correction_bias"},
    special=latent.deepseek3,
    of_layers={**DEEPSEEK2.of_layers, "sparse": (*DEEPSEEK2.of_layers["sparse"], "exp_probs_b")},
    file="deepseek2",
    fixed=SIGMOID,
)
DEEPSEEK3 = ARCHITECTURES["deepseek3"]
ARCHITECTURES["deepseek32"] = dataclasses.replace(
    DEEPSEEK3,
    classname="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    names={**DEEPSEEK3.names, **indexed.NAMES},
    more=SPARSE | dict.fromkeys((*RANKS, *indexed.SIZES), ...),
    biased=indexed.BIASED,
    file="",
    unscaled=(*DEEPSEEK3.unscaled, *indexed.NAMES),
)
ARCHITECTURES["glm-dsa"] = dataclasses.replace(
    ARCHITECTURES["deepseek32"],
    classname="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    special=indexed.glm_dsa,
    of_layers={**DEEPSEEK3.of_layers, "indexer": tuple(indexed.NAMES)},
)
ARCHITECTURES["mistral4"] = dataclasses.replace(
    DEEPSEEK2, classname="Mistral4ForCausalLM", model_type="mistral4", special=latent.mistral4
)
ARCHITECTURES["glm4moelite"] = dataclasses.replace(
    DEEPSEEK3, classname="Glm4MoeLiteForCausalLM", model_type="glm4_moe_lite"
)
"""Written as what it computes, and read as that."""


def architecture(said: Mapping[str, Any]) -> Architecture:
    """The architecture of a file with these settings."""
    name = said.get("general.architecture")
    known = [name for name, its in ARCHITECTURES.items() if not its.file]
    if name not in known:
        raise CheckpointError(
            f"the architecture {short(name)} is not read; {', '.join(known)} are (llama is Mistral's and Mixtral's "
            f"too, deepseek2 is DeepSeek V3's and Kimi K2's). A diffusion model needs the config.json that diffusers "
            f"has of it (--config); of others quantize the original with bitport quantize"
        )
    if name == "llama" and said.get("llama.expert_count"):
        name = "mixtral"
    if name == "deepseek2" and said.get("deepseek2.expert_gating_func") == SIGMOID["expert_gating_func"]:
        name = "deepseek3"
    if name == "deepseek2" and f"deepseek2.{latent.TEMPERATURE}" in said:
        name = "mistral4"  # what Mistral Large 3 computes
    if name == "mistral3" and "mistral3.attention.temperature_scale" not in said:
        name = "llama"  # what Mistral Small 3 computes
    return ARCHITECTURES[str(name)]
