"""Normalization of a config.json to the form that :mod:`bitport.interop.gguf.config` produces: older files, and other
versions of transformers, use other keys for the same."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import Any

import torch

from bitport.errors import ArgumentError
from bitport.interop.gguf import indexed
from bitport.interop.gguf.architectures import ARCHITECTURES
from bitport.interop.gguf.header import shortest
from bitport.interop.gguf.keys import MOST
from bitport.interop.gguf.special import LINEAR, PERIODS, layer_types, with_rope

MULTIMODAL = ("qwen35", "qwen35moe")
HYBRID = ("qwen3next", *MULTIMODAL)
OWN_HEADS = (
    *("qwen3", "gpt-oss", "gemma", "gemma2", "gemma3", "gemma4", "mistral3", "glm4", "seed_oss", "ernie4_5"),
    *("minimax-m2", *HYBRID),
)
"""Architectures for which head_dim does not default to hidden size / heads: config.json must have it."""
INDEXED = ("deepseek32", "glm-dsa")
DENSE_FIRST = ("glm4moelite", *INDEXED)
"""Architectures whose config.json may list which layers have experts."""
FEWER = (
    *("mixtral", "qwen2moe", "gpt-oss", "smollm3", "mistral3", "glm4", "seed_oss", "ernie4_5", "starcoder2"),
    *("glm4moe", "minimax-m2", "lfm2", "lfm2moe", *HYBRID),
)
"""Architectures whose num_key_value_heads does not default to the number of heads."""
PERIODIC: dict[str, tuple[str, str, Callable[[int, int], list[Any]]]] = {
    **dict.fromkeys(
        ("gpt-oss", "gemma2", "gemma3", "gemma4", "cohere2"), ("sliding_window_pattern", "layer_types", layer_types)
    ),
    **dict.fromkeys(
        HYBRID, ("full_attention_interval", "layer_types", functools.partial(layer_types, others="linear_attention"))
    ),
    "smollm3": ("no_rope_layer_interval", "no_rope_layers", with_rope),
}
"""Key of the period of layers (PERIODS) -> key of the list that config.json may have instead, and what makes it."""
THETA = {
    "gpt-oss": 150000.0,
    "mixtral": 1e6,
    "gemma3": 1e6,
    "smollm3": 2e6,
    "ernie4_5": 5e5,
    "lfm2": 1e6,
    "lfm2moe": 1e6,
    "minimax-m2": 5e6,
}
"""The default rope_theta, if it is not 10000."""
TIED = ("gemma", "gemma2", "gemma3", "gemma4", "smollm3", "ernie4_5", "starcoder2", "cohere2", "lfm2", "lfm2moe")
"""Architectures whose head is the embedding, unless config.json says otherwise."""
TURNED = {"phi3": 1.0, "glm4": 0.5, "glm4moe": 0.5, "minimax-m2": 1.0, **dict.fromkeys(HYBRID, 0.25)}
"""Architectures with partial rotary embeddings -> the default fraction."""
POSITIONS = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
"""The default rotary settings of MULTIMODAL, for positions of three parts."""
OF_DEEPSEEK3: dict[str, Any] = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1}
OF_DEEPSEEK3 |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "granite": dict.fromkeys(ARCHITECTURES["granite"].more, 1.0),
    "glm4moe": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"routed_scaling_factor": 1.0, "norm_topk_prob": True, "attention_bias": False, "use_qk_norm": False},
    "deepseek2": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2}
    | {"routed_scaling_factor": 1.0, "norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek3": OF_DEEPSEEK3,
    "mistral4": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
    | {"routed_scaling_factor": 1.0, "norm_topk_prob": True},
    "deepseek32": OF_DEEPSEEK3,
    "glm-dsa": {**OF_DEEPSEEK3, "n_group": 1, "topk_group": 1},
    "glm4moelite": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    | {"routed_scaling_factor": 1.8, "norm_topk_prob": True},
    "lfm2": {"conv_bias": False, "conv_L_cache": 3, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
    "gemma4": {"attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256}
    | {"use_double_wide_mlp": False, "enable_moe_block": False, "vocab_size_per_layer_input": 262144}
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "lfm2moe": {"conv_bias": False, "conv_L_cache": 3, "num_dense_layers": 2}
    | {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
}
USUAL: dict[str, dict[str, Any]] = {
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True},
    "default": {"partial_rotary_factor": 1.0},
}
"""Default rotary settings by type, which can be omitted."""


def normal(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` in the form that is read from a file."""
    wanted = dict(config)
    for key, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if key in ARCHITECTURES[name].more and other in wanted:
            wanted[key] = wanted.pop(other)
    if name == "gpt-oss" and wanted.get("experts_per_token") == wanted.get("num_experts_per_tok"):
        wanted.pop("experts_per_token", None)
    for key, value in DEFAULTS.get(name, {}).items():
        _default(wanted, key, value)
    _default(wanted, "tie_word_embeddings", name in TIED)
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        _check(wanted, key)
    if name in DENSE_FIRST:
        _dense(wanted)
    if name in INDEXED:
        _indexed(name, wanted)
    if ARCHITECTURES[name].latent:
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            _check(wanted, key)
        wanted["head_dim"] = wanted["qk_rope_head_dim"] + (wanted["qk_nope_head_dim"] if name == "mistral4" else 0)
    if wanted.get("head_dim") is None and name not in OWN_HEADS:
        wanted["head_dim"] = wanted["hidden_size"] // wanted["num_attention_heads"]
    _check(wanted, "head_dim")
    if name not in FEWER:
        _default(wanted, "num_key_value_heads", wanted["num_attention_heads"])
    _check(wanted, "num_key_value_heads")
    if name == "minimax-m2" and (turned := wanted.pop("rotary_dim", None)) is not None:
        _default(wanted, "partial_rotary_factor", real(turned) / wanted["head_dim"])
    wanted["rope_parameters"] = _ropes(name, wanted)
    if name == "phi3" and wanted.get("original_max_position_embeddings") is None:
        wanted["original_max_position_embeddings"] = wanted["max_position_embeddings"]
    if name in PERIODIC:
        key, each, made = PERIODIC[name]
        if wanted.get(each) is None:
            _default(wanted, key, PERIODS[name])
            _check(wanted, key)
            wanted[each] = made(wanted["num_hidden_layers"], wanted[key])
    if name == "lfm2":
        _lfm2(wanted)
    if name == "gemma4":
        _gemma4(wanted)
    if name in HYBRID:
        for key in (*LINEAR, "linear_value_head_dim"):
            _check(wanted, key)
    near = wanted.get("sliding_window")
    if "sliding_window" not in ARCHITECTURES[name].more and (
        wanted.get("use_sliding_window") is False or (type(near) is int and near >= wanted["max_position_embeddings"])
    ):
        wanted.pop("sliding_window", None)
    return wanted


def _lfm2(wanted: dict[str, Any]) -> None:
    """intermediate_size may be that of an MLP without a gate, from which that of one with a gate follows."""
    wanted["intermediate_size"] = wanted.pop("block_ff_dim", wanted.get("intermediate_size"))
    factor = wanted.pop("block_ffn_dim_multiplier", 1.0)
    for key in ("intermediate_size", "block_multiple_of"):
        _check(wanted, key)
    multiple = wanted.pop("block_multiple_of")
    if wanted["block_auto_adjust_ff_dim"]:
        size = 2 * wanted["intermediate_size"] // 3
        wanted["intermediate_size"] = size if factor is None else -(-int(real(factor) * size) // multiple) * multiple
        wanted["block_auto_adjust_ff_dim"] = False
    if wanted.get("layer_types") is None:
        every, full = range(wanted["num_hidden_layers"]), wanted.get("full_attn_idxs")
        if not isinstance(full, list | None):
            raise ArgumentError(f"config.json has full_attn_idxs {short(full)}, and must have a list")
        wanted["layer_types"] = ["full_attention" if full is None or at in full else "conv" for at in every]


def _dense(wanted: dict[str, Any]) -> None:
    """``mlp_layer_types`` may tell which layers have no experts, instead of how many."""
    kinds = wanted.pop("mlp_layer_types", None)
    if kinds is None:
        _default(wanted, "first_k_dense_replace", 1)
        return
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (wanted["num_hidden_layers"] - dense):
        raise ArgumentError(f"config.json has mlp_layer_types {short(kinds)}; a file has 'sparse' after 'dense' alone")
    wanted["first_k_dense_replace"] = dense


def _indexed(name: str, wanted: dict[str, Any]) -> None:
    """Which layers have an indexer may follow from a period, and all are of one type."""
    layers = wanted["num_hidden_layers"]
    if wanted.get("layer_types") == ["indexed_attention"] * layers:
        del wanted["layer_types"]
    if name == "glm-dsa":
        every, first = wanted.pop("index_topk_freq", 1), wanted.pop("index_skip_topk_offset", 2)
        if wanted.get("indexer_types") is not None:
            wanted.pop("index_topk_pattern", None)
        elif type(every) is not int or type(first) is not int:
            raise ArgumentError(
                f"config.json has index_topk_freq {short(every)} and index_skip_topk_offset {short(first)}; both must "
                f"be whole numbers"
            )
        elif wanted.get("index_topk_pattern") is None:
            wanted["indexer_types"] = indexed.types_of(layers, max(every, 1), first)


def _gemma4(wanted: dict[str, Any]) -> None:
    """The heads of layers with full attention are those of ``per_layer_config`` in newer files."""
    types = wanted["layer_types"]
    if not isinstance(types, list) or not types:
        raise ArgumentError(f"config.json has layer_types {short(types)}, and must have a list")
    wanted["layer_types"] = types = [*types[:-1], "full_attention"]
    each = wanted.get("per_layer_config")
    full = [str(at) for at, kind in enumerate(types) if kind == "full_attention"]
    if isinstance(each, dict) and sorted(each) == sorted(full) and all(its == each[full[0]] for its in each.values()):
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        if isinstance(each[full[0]], dict) and each[full[0]].keys() <= names.keys():
            del wanted["per_layer_config"]
            wanted |= {names[key]: value for key, value in each[full[0]].items()}
    _default(wanted, "global_head_dim", 512)
    _check(wanted, "global_head_dim")
    if wanted["attention_k_eq_v"]:
        _default(wanted, "num_global_key_value_heads", wanted["num_key_value_heads"])
    else:
        wanted.pop("num_global_key_value_heads", None)
    if not wanted["num_kv_shared_layers"]:
        wanted["use_double_wide_mlp"] = False
    if not wanted["hidden_size_per_layer_input"] or wanted["vocab_size_per_layer_input"] == wanted["vocab_size"]:
        del wanted["vocab_size_per_layer_input"]
    if not wanted["enable_moe_block"]:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"):
            wanted.pop(key, None)


def _default(wanted: dict[str, Any], key: str, value: Any) -> None:
    wanted[key] = value if wanted.get(key) is None else wanted[key]


def _check(wanted: Mapping[str, Any], key: str) -> None:
    if type(wanted.get(key)) is not int or not 0 < wanted[key] <= MOST:
        raise ArgumentError(f"config.json has {key} {short(wanted.get(key))}; it must be a number from 1 to {MOST}")


def _ropes(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings in the current form of config.json."""
    said: Any = wanted.get("rope_parameters")
    scaling, theta = wanted.pop("rope_scaling", None), wanted.pop("rope_theta", None)
    local, partial = wanted.pop("rope_local_base_freq", None), wanted.pop("partial_rotary_factor", None)
    if said is None:
        usual = THETA.get(name, 10000.0)
        said = {"rope_theta": usual if theta is None else theta, **(scaling if isinstance(scaling, dict) else {})}
        if name == "gemma3":
            said = {"full_attention": said, "sliding_attention": {"rope_theta": 10000.0 if local is None else local}}
    if not isinstance(said, dict):
        raise ArgumentError(f"config.json has rope_parameters {short(said)}")
    if name in ("gemma3", "gemma4"):
        if not all(isinstance(said.get(kind), dict) for kind in ("full_attention", "sliding_attention")):
            raise ArgumentError("config.json has no rope_parameters of full_attention and sliding_attention")
        return {kind: _one_rope(name, said[kind], wanted, None) for kind in ("full_attention", "sliding_attention")}
    return _one_rope(name, said, wanted, partial)


def _one_rope(name: str, said: Mapping[str, Any], wanted: Mapping[str, Any], partial: Any) -> dict[str, Any]:
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    rope = {key: value for key, value in said.items() if key != "type" and value is not None}
    rope = {"rope_theta": None, **rope, "rope_type": kind}
    usual = USUAL.get(kind if isinstance(kind, str) else "", {})
    if name in TURNED:
        rope["partial_rotary_factor"] = rope.get("partial_rotary_factor", TURNED[name] if partial is None else partial)
        usual = {key: value for key, value in usual.items() if key != "partial_rotary_factor"}
    if name in MULTIMODAL:
        rope = {**POSITIONS, **rope}
    if name == "mistral4":
        rope.setdefault("partial_rotary_factor", wanted["qk_rope_head_dim"] / wanted["head_dim"])
    if name in ("mistral3", "mistral4") and rope.get("max_position_embeddings") == wanted["max_position_embeddings"]:
        del rope["max_position_embeddings"]
    if kind == "proportional":
        rope.setdefault("partial_rotary_factor", 1.0)
    if kind == "longrope":
        rope = _longrope(rope, wanted)
    if kind == "default" and type(rope["rope_theta"]) is float:
        rope["rope_theta"] = shortest(real(rope["rope_theta"]))  # models compute powers of it in float32
    return {key: value for key, value in rope.items() if key not in usual or usual[key] != value}


def _longrope(rope: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Add the attention factor that transformers computes if config.json has none: llama.cpp does not."""
    most = wanted["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings", wanted.get("original_max_position_embeddings", most))
    if type(original) is not int or original < 2:
        raise ArgumentError(f"config.json has original_max_position_embeddings {short(original)}, of longrope")
    longer = real(rope.pop("factor", most / original))
    attention = rope.get("attention_factor", math.sqrt(1 + math.log(max(longer, 1)) / math.log(original)))
    for key in ("short_factor", "long_factor"):
        if not isinstance(rope.get(key), list) or not all(type(each) in (int, float) for each in rope[key]):
            raise ArgumentError(f"config.json has no list of numbers {key}, which longrope needs")
        rope[key] = torch.tensor(rope[key], dtype=torch.float32).tolist()
    return rope | {"original_max_position_embeddings": original, "attention_factor": shortest(real(attention))}


def real(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ArgumentError(f"config.json has {short(value)} where a number must stand")
    return float(value)
