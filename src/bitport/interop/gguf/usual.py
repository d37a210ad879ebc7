"""What config.json may leave out, or say in another way than :mod:`bitport.interop.gguf.config` produces it, by
architecture."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import Any

from bitport.errors import ArgumentError
from bitport.interop.gguf import indexed
from bitport.interop.gguf.architectures import ARCHITECTURES
from bitport.interop.gguf.keys import MOST
from bitport.interop.gguf.special import LINEAR, layer_types, with_rope

Config = dict[str, Any]


def nothing_else(wanted: Config) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Usual:
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keys that may be left out -> what they are then."""
    head_dim: bool = True
    """Whether head_dim may be left out, and is hidden size / heads then."""
    kv_heads: bool = True
    """Whether num_key_value_heads may be left out, and is the number of heads then."""
    theta: float = 10000.0
    turned: float | None = None
    """The part of a head that the rotary embedding turns, where that is a setting."""
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Rotary settings that may be left out."""
    two_ropes: bool = False
    """Whether layers with full and with sliding attention have rotary settings of their own."""
    period: tuple[str, str, Callable[[int, int], list[Any]]] | None = None
    """Key of the period of layers (special.PERIODS), key of the list that config.json may have instead, and what makes
    it."""
    otherwise: Callable[[Config], None] = nothing_else
    """Changes a config.json, which has all of the above, where it says something in another way."""


def default(wanted: Config, key: str, value: Any) -> None:
    wanted[key] = value if wanted.get(key) is None else wanted[key]


def check(wanted: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if type(wanted.get(key)) is not int or not 0 < wanted[key] <= MOST:
            raise ArgumentError(f"config.json has {key} {short(wanted.get(key))}; it must be a number from 1 to {MOST}")


def real(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ArgumentError(f"config.json has {short(value)} where a number must stand")
    return float(value)


def _gpt_oss(wanted: Config) -> None:
    if wanted.get("experts_per_token") == wanted.get("num_experts_per_tok"):
        wanted.pop("experts_per_token", None)


def _minimax_m2(wanted: Config) -> None:
    if (turned := wanted.pop("rotary_dim", None)) is not None:
        default(wanted, "partial_rotary_factor", real(turned) / wanted["head_dim"])


def _mistral4(wanted: Config) -> None:
    default(wanted, "partial_rotary_factor", wanted["qk_rope_head_dim"] / wanted["head_dim"])


def _phi3(wanted: Config) -> None:
    default(wanted, "original_max_position_embeddings", wanted["max_position_embeddings"])


def _hybrid(wanted: Config) -> None:
    check(wanted, *LINEAR, "linear_value_head_dim")


def _lfm2(wanted: Config) -> None:
    """intermediate_size may be that of an MLP without a gate, from which that of one with a gate follows."""
    wanted["intermediate_size"] = wanted.pop("block_ff_dim", wanted.get("intermediate_size"))
    factor = wanted.pop("block_ffn_dim_multiplier", 1.0)
    check(wanted, "intermediate_size", "block_multiple_of")
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


def _dense(wanted: Config) -> None:
    """``mlp_layer_types`` may tell which layers have no experts, instead of how many."""
    kinds = wanted.pop("mlp_layer_types", None)
    if kinds is None:
        default(wanted, "first_k_dense_replace", 1)
        return
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (wanted["num_hidden_layers"] - dense):
        raise ArgumentError(f"config.json has mlp_layer_types {short(kinds)}; a file has 'sparse' after 'dense' alone")
    wanted["first_k_dense_replace"] = dense


def _deepseek32(wanted: Config) -> None:
    """All layers are of one type."""
    _dense(wanted)
    if wanted.get("layer_types") == ["indexed_attention"] * wanted["num_hidden_layers"]:
        del wanted["layer_types"]


def _glm_dsa(wanted: Config) -> None:
    """Which layers have an indexer may follow from a period."""
    _deepseek32(wanted)
    every, first = wanted.pop("index_topk_freq", 1), wanted.pop("index_skip_topk_offset", 2)
    if wanted.get("indexer_types") is not None:
        wanted.pop("index_topk_pattern", None)
    elif type(every) is not int or type(first) is not int:
        raise ArgumentError(
            f"config.json has index_topk_freq {short(every)} and index_skip_topk_offset {short(first)}; both must "
            f"be whole numbers"
        )
    elif wanted.get("index_topk_pattern") is None:
        wanted["indexer_types"] = indexed.types_of(wanted["num_hidden_layers"], max(every, 1), first)


def _gemma4(wanted: Config) -> None:
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
    default(wanted, "global_head_dim", 512)
    check(wanted, "global_head_dim")
    if wanted["attention_k_eq_v"]:
        default(wanted, "num_global_key_value_heads", wanted["num_key_value_heads"])
    else:
        wanted.pop("num_global_key_value_heads", None)
    if not wanted["num_kv_shared_layers"]:
        wanted["use_double_wide_mlp"] = False
    if not wanted["hidden_size_per_layer_input"] or wanted["vocab_size_per_layer_input"] == wanted["vocab_size"]:
        del wanted["vocab_size_per_layer_input"]
    if not wanted["enable_moe_block"]:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"):
            wanted.pop(key, None)


TIED = {"tie_word_embeddings": True}
WINDOWS = ("sliding_window_pattern", "layer_types", layer_types)
INTERVAL = ("full_attention_interval", "layer_types", functools.partial(layer_types, others="linear_attention"))
POSITIONS = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
"""Of positions with three parts."""
SPARSE: Config = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
DEEPSEEK3: Config = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1}
DEEPSEEK3 |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
LFM2 = {**TIED, "conv_bias": False, "conv_L_cache": 3}
GEMMA4 = {**TIED, "attention_k_eq_v": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256} | {
    **{"use_double_wide_mlp": False, "enable_moe_block": False, "vocab_size_per_layer_input": 262144},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


USUAL: dict[str, Usual] = {
    "mixtral": Usual(kv_heads=False, theta=1e6),
    "qwen2moe": Usual(kv_heads=False),
    "qwen3": Usual(head_dim=False),
    "qwen3next": Usual(head_dim=False, kv_heads=False, turned=0.25, period=INTERVAL, otherwise=_hybrid),
    "gpt-oss": Usual(head_dim=False, kv_heads=False, theta=150000.0, period=WINDOWS, otherwise=_gpt_oss),
    "minimax-m2": Usual(head_dim=False, kv_heads=False, theta=5e6, turned=1.0, otherwise=_minimax_m2),
    "phi3": Usual(turned=1.0, otherwise=_phi3),
    "gemma": Usual(TIED, head_dim=False),
    "gemma2": Usual(TIED, head_dim=False, period=WINDOWS),
    "gemma3": Usual(TIED, head_dim=False, theta=1e6, two_ropes=True, period=WINDOWS),
    "gemma4": Usual(GEMMA4, head_dim=False, two_ropes=True, period=WINDOWS, otherwise=_gemma4),
    "smollm3": Usual(TIED, kv_heads=False, theta=2e6, period=("no_rope_layer_interval", "no_rope_layers", with_rope)),
    "granite": Usual(dict.fromkeys(ARCHITECTURES["granite"].more, 1.0)),
    "mistral3": Usual(head_dim=False, kv_heads=False),
    "mistral4": Usual(SPARSE | {"first_k_dense_replace": 0, "n_shared_experts": 1}, turned=1.0, otherwise=_mistral4),
    "glm4": Usual(head_dim=False, kv_heads=False, turned=0.5),
    "glm4moe": Usual(
        SPARSE | {"first_k_dense_replace": 1, "n_shared_experts": 1, "attention_bias": False, "use_qk_norm": False},
        kv_heads=False,
        turned=0.5,
    ),
    "glm4moelite": Usual(SPARSE | {"n_shared_experts": 1, "routed_scaling_factor": 1.8}, otherwise=_dense),
    "deepseek2": Usual(
        SPARSE
        | {"first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"topk_method": "greedy", "scoring_func": "softmax"}
    ),
    "deepseek3": Usual(DEEPSEEK3),
    "deepseek32": Usual(DEEPSEEK3, otherwise=_deepseek32),
    "glm-dsa": Usual(DEEPSEEK3 | {"n_group": 1, "topk_group": 1}, otherwise=_glm_dsa),
    "lfm2": Usual(
        LFM2 | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
        kv_heads=False,
        theta=1e6,
        otherwise=_lfm2,
    ),
    "lfm2moe": Usual(
        LFM2 | {"num_dense_layers": 2, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        kv_heads=False,
        theta=1e6,
    ),
    "seed_oss": Usual(head_dim=False, kv_heads=False),
    "ernie4_5": Usual(TIED, head_dim=False, kv_heads=False, theta=5e5),
    "starcoder2": Usual(TIED, kv_heads=False),
    "cohere2": Usual(TIED, period=WINDOWS),
}
MULTIMODAL = dataclasses.replace(USUAL["qwen3next"], rope=POSITIONS)
USUAL |= {"qwen35": MULTIMODAL, "qwen35moe": MULTIMODAL}
