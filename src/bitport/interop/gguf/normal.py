"""Normalization of a config.json to the form that :mod:`bitport.interop.gguf.config` produces: older files, and other
versions of transformers, use other keys for the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch

from bitport.errors import ArgumentError
from bitport.interop.gguf.architectures import ARCHITECTURES
from bitport.interop.gguf.header import shortest
from bitport.interop.gguf.special import PERIODS
from bitport.interop.gguf.usual import USUAL, Usual, check, default, real

OF_ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True},
    "default": {"partial_rotary_factor": 1.0},
}
"""Default rotary settings by type, which can be omitted."""


def normal(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` in the form that is read from a file."""
    its, usual, wanted = ARCHITECTURES[name], USUAL.get(name, Usual()), dict(config)
    for key, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if key in its.more and other in wanted:
            wanted[key] = wanted.pop(other)
    for key, value in {"tie_word_embeddings": False, **usual.values}.items():
        default(wanted, key, value)
    check(wanted, "hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size")
    if its.latent:
        check(wanted, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        wanted["head_dim"] = wanted["qk_rope_head_dim"] + (wanted["qk_nope_head_dim"] if name == "mistral4" else 0)
    if usual.head_dim:
        default(wanted, "head_dim", wanted["hidden_size"] // wanted["num_attention_heads"])
    if usual.kv_heads:
        default(wanted, "num_key_value_heads", wanted["num_attention_heads"])
    check(wanted, "head_dim", "num_key_value_heads")
    if usual.period:
        key, each, made = usual.period
        if wanted.get(each) is None:
            default(wanted, key, PERIODS[name])
            check(wanted, key)
            wanted[each] = made(wanted["num_hidden_layers"], wanted[key])
    usual.otherwise(wanted)
    wanted["rope_parameters"] = _ropes(usual, wanted)
    near = wanted.get("sliding_window")
    if "sliding_window" not in its.more and (
        wanted.get("use_sliding_window") is False or (type(near) is int and near >= wanted["max_position_embeddings"])
    ):
        wanted.pop("sliding_window", None)
    return wanted


def _ropes(usual: Usual, wanted: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings in the current form of config.json."""
    said: Any = wanted.get("rope_parameters")
    scaling, theta = wanted.pop("rope_scaling", None), wanted.pop("rope_theta", None)
    local, partial = wanted.pop("rope_local_base_freq", None), wanted.pop("partial_rotary_factor", None)
    if said is None:
        said = {"rope_theta": usual.theta if theta is None else theta, **(scaling if isinstance(scaling, dict) else {})}
        if usual.two_ropes:
            said = {"full_attention": said, "sliding_attention": {"rope_theta": 10000.0 if local is None else local}}
    if not isinstance(said, dict):
        raise ArgumentError(f"config.json has rope_parameters {short(said)}")
    if usual.two_ropes:
        if not all(isinstance(said.get(kind), dict) for kind in ("full_attention", "sliding_attention")):
            raise ArgumentError("config.json has no rope_parameters of full_attention and sliding_attention")
        return {kind: _one_rope(usual, said[kind], wanted, None) for kind in ("full_attention", "sliding_attention")}
    return _one_rope(usual, said, wanted, partial)


def _one_rope(usual: Usual, said: Mapping[str, Any], wanted: Mapping[str, Any], partial: Any) -> dict[str, Any]:
    kind = said.get("rope_type", said.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    rope = {key: value for key, value in said.items() if key != "type" and value is not None}
    rope = {"rope_theta": None, **usual.rope, **rope, "rope_type": kind}
    absent = OF_ROPES.get(kind if isinstance(kind, str) else "", {})
    if usual.turned is not None:
        default(rope, "partial_rotary_factor", usual.turned if partial is None else partial)
        absent = {key: value for key, value in absent.items() if key != "partial_rotary_factor"}
    if rope.get("max_position_embeddings") == wanted["max_position_embeddings"]:
        del rope["max_position_embeddings"]
    if kind == "proportional":
        rope.setdefault("partial_rotary_factor", 1.0)
    if kind == "longrope":
        rope = _longrope(rope, wanted)
    if kind == "default" and type(rope["rope_theta"]) is float:
        rope["rope_theta"] = shortest(real(rope["rope_theta"]))  # models compute powers of it in float32
    return {key: value for key, value in rope.items() if key not in absent or absent[key] != value}


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
