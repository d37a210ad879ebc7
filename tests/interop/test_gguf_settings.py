"""Settings of GGUF files for published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitport.errors import BitportError
from bitport.interop.gguf.architectures import architecture
from bitport.interop.gguf.config import config_of
from bitport.interop.gguf.keys import KEYS, Settings
from bitport.interop.gguf.settings import settings_of

from .gguf_published import PUBLISHED

NONE: tuple[str, ...] = ()
BIASED = dict.fromkeys(
    ("qwen2", "qwen2_moe", "gpt_oss", "seed_oss", "starcoder2", "glm4_moe"), ("self_attn.q_proj.bias",)
)


WITHOUT = {key: value for key, value in PUBLISHED["DeepSeek V2 Lite"]["rope_scaling"].items() if "mscale" not in key}
LESS = {**WITHOUT, "mscale": 1.0, "mscale_all_dim": 0.707}


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_models(model: str) -> None:
    config = PUBLISHED[model]
    said = settings_of(config, BIASED.get(config["model_type"], NONE))
    name = said.settings["general.architecture"]
    read_as = "deepseek_v3" if config["model_type"] == "glm4_moe_lite" else said.architecture.model_type
    assert architecture(said.settings).model_type == read_as
    rope = config.get("rope_parameters", config)
    theta = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    assert said.settings[f"{name}.rope.freq_base"] == pytest.approx(theta, rel=2**-24)
    assert said.settings[f"{name}.vocab_size"] == config["vocab_size"]
    assert said.settings.get("tokenizer.ggml.bos_token_id") == config.get("bos_token_id")


def test_what_follows_from_the_sizes() -> None:
    assert settings_of(PUBLISHED["Qwen 2.5 7B"], NONE).settings["qwen2.attention.key_length"] == 128
    phi = settings_of(PUBLISHED["Phi 3 mini 128k"], NONE)
    assert phi.settings["phi3.rope.scaling.attn_factor"] == pytest.approx(1.1902380714238083, rel=1e-7)
    assert phi.vectors["rope_factors_long.weight"].tolist() == pytest.approx([1.07 + at for at in range(48)], rel=1e-6)
    large, small = (settings_of(PUBLISHED[f"Gemma 4 {size}"], NONE) for size in ("31B", "E2B"))
    assert large.settings["gemma4.attention.head_count_kv"] == [*[16] * 5, 4] * 10
    assert small.settings["gemma4.attention.head_count_kv"] == 1
    assert small.settings["gemma4.feed_forward_length"] == [6144] * 15 + [12288] * 20
    assert small.vectors["rope_freqs.weight"].tolist() == [1.0] * 64 + [torch.tensor(1e30).item()] * 192
    lfm2 = settings_of(PUBLISHED["LFM2 1.2B"], NONE).settings
    assert lfm2["lfm2.feed_forward_length"] == 8192
    assert lfm2["lfm2.attention.head_count_kv"] == [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]
    assert settings_of(PUBLISHED["Gemma 3 1B"], NONE).settings["gemma3.rope.freq_base_swa"] == 10000.0
    hybrid = settings_of(PUBLISHED["Qwen 3 Next 80B-A3B"], NONE).settings
    assert hybrid["qwen3next.attention.recurrent_layers"] == [True, True, True, False] * 12
    assert (hybrid["qwen3next.full_attention_interval"], hybrid["qwen3next.rope.dimension_count"]) == (4, 64)
    assert (hybrid["qwen3next.ssm.inner_size"], hybrid["qwen3next.feed_forward_length"]) == (4096, 5120)
    assert "qwen3next.rope.dimension_sections" not in hybrid
    deepseek = settings_of(PUBLISHED["DeepSeek V3"], NONE).settings
    sizes = {"key_length": 576, "value_length": 512, "key_length_mla": 192, "value_length_mla": 128, "head_count_kv": 1}
    assert {key: deepseek[f"deepseek2.attention.{key}"] for key in sizes} == sizes
    assert deepseek["deepseek2.rope.dimension_count"] == 64
    assert deepseek["deepseek2.expert_gating_func"] == 2
    assert deepseek["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1, rel=2**-24)
    indexed = settings_of(PUBLISHED["DeepSeek V3.2"], NONE).settings
    chosen = {"indexer.head_count": 64, "indexer.key_length": 128, "indexer.top_k": 2048}
    assert {key: indexed[f"deepseek32.attention.{key}"] for key in (*sizes, *chosen)} == sizes | chosen
    assert indexed["deepseek32.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1, rel=2**-24)
    glm = settings_of(PUBLISHED["GLM 5"], NONE).settings
    assert glm["glm-dsa.attention.indexer.types"] == [True] * 78
    assert (glm["glm-dsa.attention.key_length_mla"], glm["glm-dsa.leading_dense_block_count"]) == (256, 3)
    mistral = settings_of(PUBLISHED["Mistral Small 4"], NONE).settings
    assert mistral["mistral4.attention.temperature_scale"] == pytest.approx(0.1, rel=2**-24)
    assert mistral["mistral4.attention.temperature_length"] == 8192
    assert (mistral["mistral4.rope.dimension_count"], mistral["mistral4.attention.key_length_mla"]) == (64, 128)
    assert (mistral["mistral4.expert_weights_norm"], mistral["mistral4.expert_gating_func"]) == (True, 1)
    lite = settings_of(PUBLISHED["DeepSeek V2 Lite"], NONE).settings
    assert lite["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707, rel=2**-24)
    assert "deepseek2.attention.q_lora_rank" not in lite


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("SmolLM 3 3B", {"no_rope_layers": None, "no_rope_layer_interval": None}),
        ("gpt-oss 20b", {"layer_types": None}),
        ("gpt-oss 20b", {"rope_theta": None}),
        ("Command R7B", {"sliding_window_pattern": None}),
        ("GLM 4 9B", {"partial_rotary_factor": None}),
        ("ERNIE 4.5 0.3B", {"rope_theta": None}),
        ("GLM 4.5 Air", {"partial_rotary_factor": None, "n_group": None, "norm_topk_prob": None, "use_qk_norm": None}),
        ("MiniMax M2", {"rope_theta": None}),
        ("DeepSeek V2 Lite", {"n_group": None, "topk_method": None, "norm_topk_prob": None, "scoring_func": None}),
        ("GLM 4.7 Flash", {"first_k_dense_replace": None, "n_group": None, "routed_scaling_factor": None}),
        ("GLM 4.7 Flash", {"first_k_dense_replace": None, "mlp_layer_types": ["dense", *["sparse"] * 46]}),
        ("DeepSeek V3", {"model_type": "kimi_k2"}),
        ("Mistral Small 4", {"head_dim": None, "first_k_dense_replace": None, "norm_topk_prob": None}),
        ("DeepSeek V3.2", {"mlp_layer_types": [*["dense"] * 3, *["sparse"] * 58], "first_k_dense_replace": None}),
        ("DeepSeek V3.2", {"layer_types": ["indexed_attention"] * 61, "n_group": None, "topk_group": None}),
        ("GLM 5", {"indexer_types": ["full"] * 78, "first_k_dense_replace": None, "n_group": None}),
        ("DeepSeek V3", {"n_group": None, "topk_group": None, "first_k_dense_replace": None}),
        ("DeepSeek V3", {"routed_scaling_factor": None, "scoring_func": None, "topk_method": None}),
        ("DeepSeek V3", {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "num_mtp_layers": 1}),
        ("Gemma 4 31B", {"layer_types": None, "rope_parameters": None, "global_head_dim": None}),
        ("Gemma 4 31B", {"vocab_size_per_layer_input": 0, "use_double_wide_mlp": True}),
        ("Gemma 4 E2B", {"num_global_key_value_heads": 4, "vocab_size_per_layer_input": None}),
        ("Qwen 3 Next 80B-A3B", {"full_attention_interval": None, "partial_rotary_factor": None}),
        ("MiniMax M2", {"rotary_dim": None, "partial_rotary_factor": 0.5}),
        ("LFM2 1.2B", {"block_auto_adjust_ff_dim": None, "rope_theta": None, "conv_L_cache": None}),
        ("LFM2 8B-A1B", {"use_expert_bias": None, "num_dense_layers": None, "routed_scaling_factor": None}),
    ],
)
def test_what_transformers_takes_for_granted(model: str, changes: dict[str, Any]) -> None:
    biased = BIASED.get(PUBLISHED[model]["model_type"], NONE)
    found, wanted = settings_of({**PUBLISHED[model], **changes}, biased), settings_of(PUBLISHED[model], biased)
    assert (found.settings, found.config) == (wanted.settings, wanted.config)


def test_settings_of_single_layers() -> None:
    """As transformers writes them since 5.24."""
    config = PUBLISHED["Gemma 4 31B"]
    full = {str(at): {"head_dim": 512, "num_key_value_heads": 4} for at in range(5, 60, 6)}
    newer = {key: value for key, value in config.items() if "global" not in key} | {"per_layer_config": full}
    found, wanted = settings_of(newer, NONE), settings_of(config, NONE)
    assert (found.settings, found.config) == (wanted.settings, wanted.config)
    with pytest.raises(BitportError, match="per_layer_config"):
        settings_of({**newer, "per_layer_config": {**full, "5": {"head_dim": 256, "num_key_value_heads": 4}}}, NONE)


def test_indexers_by_a_period() -> None:
    """As in GLM 5.2: the first three layers have one, and then each fourth."""
    period = {"index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1 << 20}
    said = settings_of({**PUBLISHED["GLM 5"], **period}, NONE)
    flags = [True, True, *[True, False, False, False] * 19]
    assert said.settings["glm-dsa.attention.indexer.types"] == flags
    types = said.config["indexer_types"]
    assert types == ["full" if each else "shared" for each in flags]
    assert settings_of({**PUBLISHED["GLM 5"], **period, "indexer_types": types}, NONE).settings == said.settings
    older = {key: value for key, value in said.settings.items() if not key.endswith("indexer.types")}
    assert config_of(said.architecture, Settings(older, {}))["indexer_types"] == types
    shorter = older | {"glm-dsa.context_length": 202752}
    assert config_of(said.architecture, Settings(shorter, {}))["indexer_types"] == ["full"] * 78


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_scales_of_yarn(scale: float) -> None:
    config = PUBLISHED["Ministral 3 8B"]
    rope = {**config["rope_parameters"], "mscale_all_dim": scale}
    said = settings_of({**config, "rope_parameters": rope}, NONE)
    assert said.settings["mistral3.rope.scaling.yarn_log_multiplier"] == scale
    assert said.config["rope_parameters"]["mscale_all_dim"] == scale


def test_granite_without_its_scales() -> None:
    """They default to 1, including the attention scale."""
    scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    said = settings_of({key: value for key, value in PUBLISHED["Granite 3.3 2B"].items() if key not in scales}, NONE)
    assert [said.settings[f"granite.{KEYS[key]}"] for key in scales] == [1.0] * 4


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
        ("Qwen 3 Next 80B-A3B", {"norm_topk_prob": False}, r"norm_topk_prob = False \(it would be True\)"),
        ("Qwen 3 Next 80B-A3B", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("Qwen 3 Next 80B-A3B", {"layer_types": "x"}, "layer_types 'x'"),
        ("Qwen 3 Next 80B-A3B", {"linear_num_key_heads": 0}, "linear_num_key_heads 0"),
        ("Qwen 2.5 7B", {"use_sliding_window": True}, "sliding_window"),
        ("Mistral 7B 0.3", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("gpt-oss 20b", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0"),
        ("gpt-oss 20b", {"experts_per_token": 8}, "experts_per_token = 8"),
        ("gpt-oss 20b", {"layer_types": ["full_attention"] * 24}, "layer_types"),
        ("gpt-oss 20b", {"attention_bias": False}, r"attention_bias = False \(it would be True\)"),
        ("Mixtral 8x7B", {"num_local_experts": None}, "expert_count"),
        ("Qwen 1.5 MoE", {"norm_topk_prob": True}, r"norm_topk_prob = True \(it would be False\)"),
        ("Phi 3 mini 128k", {"rope_theta": 10**400}, "where a number must stand"),
        ("SmolLM 3 3B", {"no_rope_layers": [1] * 36}, "no_rope_layers"),
        ("SmolLM 3 3B", {"no_rope_layers": None, "no_rope_layer_interval": 5}, "no_rope_layers"),
        ("Granite 3.3 2B", {"logits_scaling": 0.0}, "logit_scale is 0.0"),
        ("Ministral 3 8B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "temperature_scale"),
        ("GLM 4 9B", {"head_dim": None}, "head_dim None"),
        ("GLM 4.5 Air", {"use_qk_norm": True}, r"use_qk_norm = True \(it would be False\)"),
        ("GLM 4.5 Air", {"attention_bias": None}, r"attention_bias = False \(it would be True\)"),
        ("GLM 4.5 Air", {"routed_scaling_factor": 0.0}, "expert_weights_scale is 0.0"),
        ("DeepSeek V2 Lite", {"norm_topk_prob": True}, "expert_weights_norm is True"),
        ("DeepSeek V2 Lite", {"scoring_func": "sigmoid"}, r"scoring_func = 'sigmoid' \(it would be 'softmax'\)"),
        ("DeepSeek V2 Lite", {"topk_method": "group_limited_greedy"}, r"\(it would be 'greedy'\)"),
        ("DeepSeek V2 Lite", {"rope_scaling": LESS}, r"rope_parameters = .*'mscale': 1.0"),
        ("DeepSeek V2 Lite", {"rope_scaling": WITHOUT}, "yarn_log_multiplier must be float, not absent"),
        ("GLM 4.7 Flash", {"mlp_layer_types": [*["sparse"] * 46, "dense"]}, "'sparse' after 'dense' alone"),
        ("Mistral Small 4", {"rope_parameters": None}, "'default'; yarn is read"),
        ("Mistral Small 4", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "rope_parameters = "),
        ("Mistral Small 4", {"qk_nope_head_dim": None}, "qk_nope_head_dim None"),
        ("DeepSeek V3.2", {"q_lora_rank": None}, "q_lora_rank must be int, not absent"),
        ("DeepSeek V3.2", {"index_topk": None}, "top_k must be int, not absent"),
        ("DeepSeek V3.2", {"layer_types": ["full_attention"] * 60}, "layer_types"),
        ("DeepSeek V3.2", {"rope_scaling": LESS}, "0.0707; 0.1 is read, as llama.cpp takes mscale for 1"),
        ("GLM 5", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "'yarn'; none is read"),
        ("GLM 5", {"indexer_types": "full"}, "indexer_types 'full'"),
        ("GLM 5", {"indexer_types": ["full"] * 77}, "types is .*, not true or false for 78 layers"),
        ("GLM 5", {"indexer_types": ["shared"] * 78}, "begins with a layer that uses the choice of one before"),
        ("GLM 5", {"indexer_types": [*["full"] * 77, "none"]}, r"indexer_types = .* \(it would be"),
        ("GLM 5", {"index_topk_pattern": "F" * 78}, "indexer_types None"),
        ("GLM 5", {"index_topk_freq": "x"}, "index_topk_freq 'x'"),
        ("GLM 5", {"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
        ("DeepSeek V3", {"rope_interleave": False}, "rope_interleave = False"),
        ("DeepSeek V3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("DeepSeek V3", {"qk_rope_head_dim": None}, "qk_rope_head_dim None"),
        ("DeepSeek V3", {"kv_lora_rank": 0}, "kv_lora_rank 0"),
        ("DeepSeek V3", {"num_key_value_heads": 64}, r"num_key_value_heads = 64 \(it would be 128\)"),
        ("MiniMax M2", {"attn_type_list": [1] * 61 + [0]}, "attn_type_list"),
        ("Gemma 4 31B", {"enable_moe_block": True}, r"enable_moe_block = True \(it would be False\)"),
        ("Gemma 4 31B", {"final_logit_softcapping": None}, r"no final_logit_softcapping \(it would be 30.0\)"),
        ("Gemma 4 31B", {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ("Gemma 4 31B", {"layer_types": []}, r"layer_types \[\]"),
        ("Gemma 4 31B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ("Gemma 4 E2B", {"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input = 1000"),
        ("Gemma 4 E2B", {"num_kv_shared_layers": 19}, "of which 19 have no keys, is not read"),
        ("Gemma 4 E2B", {"num_kv_shared_layers": "x"}, "num_kv_shared_layers 'x'"),
        ("MiniMax M2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("MiniMax M2", {"head_dim": None}, "head_dim None"),
        ("MiniMax M2", {"rotary_dim": "x"}, "'x' where a number"),
        ("LFM2 1.2B", {"conv_bias": True}, r"conv_bias = True \(it would be False\)"),
        ("LFM2 1.2B", {"block_ff_dim": "x"}, "intermediate_size 'x'"),
        ("LFM2 1.2B", {"block_multiple_of": 0}, "block_multiple_of 0"),
        ("LFM2 1.2B", {"block_use_swiglu": False}, "block_use_swiglu = False"),
        ("LFM2 1.2B", {"full_attn_idxs": 3}, "full_attn_idxs 3"),
        ("LFM2 8B-A1B", {"layer_types": None}, "layer_types None"),
        ("LFM2 8B-A1B", {"layer_types": ["conv"] * 23}, "no number for each of 24 layers"),
        ("LFM2 8B-A1B", {"layer_types": ["sliding_attention", "full_attention"] * 12}, "layer_types"),
        ("LFM2 8B-A1B", {"use_expert_bias": False}, r"use_expert_bias = False \(it would be True\)"),
        ("LFM2 8B-A1B", {"routed_scaling_factor": 2.0}, r"routed_scaling_factor = 2.0 \(it would be 1.0\)"),
        ("Seed OSS 36B", {"attention_out_bias": True}, "attention_out_bias = True"),
        ("Command R7B", {"layer_switch": 3}, "layer_switch = 3"),
        ("Phi 3 mini 128k", {"original_max_position_embeddings": 1}, "original_max_position_embeddings 1"),
        ("Phi 3 mini 128k", {"partial_rotary_factor": 0.71}, "partial_rotary|rope_parameters"),  # 68.16 of 96
        ("Phi 3 mini 128k", {"partial_rotary_factor": 0.7}, "dimension_count is 67; dimensions are turned in pairs"),
    ],
)
def test_what_would_be_another_model(model: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BitportError, match=reason):
        settings_of({**PUBLISHED[model], **changes}, BIASED.get(PUBLISHED[model]["model_type"], NONE))
