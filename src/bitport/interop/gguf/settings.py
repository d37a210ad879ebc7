"""The settings of a GGUF file from the config.json of a model: the inverse of :mod:`bitport.interop.gguf.config`, which
is also the judge. What it reads from the settings must be the config that they were made of; a key of this that it does
not know has to be harmless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.checkpoint.manifest import shortened
from bitport.errors import ArgumentError
from bitport.interop.gguf.config import KEYS, TOKENS, Settings, layer_types, llama3_factors
from bitport.interop.gguf.header import shortest
from bitport.interop.gguf.names import ARCHITECTURES, Architecture

ALIKE = {"mistral": "llama"}
"""Model types that compute what another one does."""
SOME = {key for its in ARCHITECTURES.values() for key in its.more}
"""Those of KEYS that not all architectures have."""
OWN_HEADS = ("qwen3", "gemma", "gemma2", "gemma3")
"""Architectures whose heads are not the hidden size cut into pieces: config.json must say head_dim."""
MOST = 1 << 24
REAL = ("rms_norm_eps", "attn_logit_softcapping", "final_logit_softcapping")
ENDS = ("eos", "eot", "eom")
HARMLESS = (
    *("architectures", "model_type", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map"),
    *("use_cache", "cache_implementation", "initializer_range", "pretraining_tp", "return_dict", "output_attentions"),
    *("output_hidden_states", "problem_type", "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "output_router_logits", "router_aux_loss_coef"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "tie_word_embeddings"),
    *("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
)
"""Change no number, or are looked at elsewhere: tokens, vocabulary, what layers see (layer_types)."""
ONLY: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False,),
    "rope_interleaved": (False,),
    "is_llama_config": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""What llama.cpp takes for granted."""
USUAL: dict[str, dict[str, Any]] = {
    "yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True},
    "default": {"partial_rotary_factor": 1.0},
}
"""Of rotary embeddings, by their type: what says nothing new."""


class Said(NamedTuple):
    architecture: Architecture
    settings: dict[str, Any]
    vectors: dict[str, Tensor]
    """Tensors that say how the model is configured."""
    config: dict[str, Any]
    """As it is read from the settings."""


def settings_of(config: Mapping[str, Any], biased: Mapping[str, bool]) -> Said:
    """``biased``: attention_bias and mlp_bias, as the model has it; ArgumentError for a config that a file cannot
    hold."""
    name = _architecture(config.get("model_type"))
    its = ARCHITECTURES[name]
    wanted = _normal(name, config)
    said: dict[str, Any] = {"general.architecture": name, "general.type": "model", "general.quantization_version": 2}
    vectors: dict[str, Tensor] = {}

    def say(key: str, value: Any) -> None:
        if isinstance(value, int) and not 0 <= value <= MOST:
            raise ArgumentError(f"config.json says that {key} is {short(value)}; it must be from 0 to {MOST}")
        said[f"{name}.{key}"] = shortest(value) if isinstance(value, float) else value

    for key, setting in KEYS.items():
        if wanted.get(key) is not None and (key in its.more or key not in SOME):
            say(setting, _real(wanted[key]) if key in REAL else wanted[key])
    say("attention.value_length", wanted.get("head_dim"))
    say("vocab_size", wanted.get("vocab_size"))
    both = wanted["rope_parameters"]
    rope = both.get("full_attention", both)
    if rope is not both:
        say("rope.freq_base_swa", _real(both["sliding_attention"].get("rope_theta")))
    for key, value in _rope(wanted, rope, vectors):
        say(key, value)
    for token, number in _tokens(config):
        said[f"tokenizer.ggml.{token}_token_id"] = number
    read = its.config(Settings(said, vectors))
    _compare(its, wanted, read, biased)
    return Said(its, said, vectors, read)


def _architecture(model_type: Any) -> str:
    known = {its.model_type: name for name, its in ARCHITECTURES.items()} | ALIKE
    if not isinstance(model_type, str) or model_type not in known:
        raise ArgumentError(f"a model of the type {short(model_type)} is not written as GGUF; {', '.join(known)} are")
    return known[model_type]


def _normal(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` in the words that are read from a file, of which older ones and transformers' own have others."""
    wanted = dict(config)
    if "num_local_experts" in wanted and "num_experts" in ARCHITECTURES[name].more:
        wanted["num_experts"] = wanted.pop("num_local_experts")
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size"):
        _check(wanted, key)
    if wanted.get("head_dim") is None and name not in OWN_HEADS:
        wanted["head_dim"] = wanted["hidden_size"] // wanted["num_attention_heads"]
    _check(wanted, "head_dim")
    if wanted.get("num_key_value_heads") is None:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]
    wanted["rope_parameters"] = _ropes(name, wanted)
    if name == "phi3" and wanted.get("original_max_position_embeddings") is None:
        wanted["original_max_position_embeddings"] = wanted["max_position_embeddings"]
    if name in ("gemma2", "gemma3") and wanted.get("layer_types") is None:
        wanted = {"sliding_window_pattern": 2 if name == "gemma2" else 6, **wanted}
        _check(wanted, "sliding_window_pattern")
        wanted["layer_types"] = layer_types(wanted["num_hidden_layers"], wanted["sliding_window_pattern"])
    near = wanted.get("sliding_window")
    if "sliding_window" not in ARCHITECTURES[name].more and (
        wanted.get("use_sliding_window") is False or (type(near) is int and near >= wanted["max_position_embeddings"])
    ):
        wanted.pop("sliding_window", None)
    return wanted


def _check(wanted: Mapping[str, Any], key: str) -> None:
    if type(wanted.get(key)) is not int or not 0 < wanted[key] <= MOST:
        raise ArgumentError(f"config.json has {key} {short(wanted.get(key))}; it must be a number from 1 to {MOST}")


def _ropes(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings as config.json has them today."""
    said: Any = wanted.get("rope_parameters")
    scaling, theta = wanted.pop("rope_scaling", None), wanted.pop("rope_theta", None)
    local, partial = wanted.pop("rope_local_base_freq", None), wanted.pop("partial_rotary_factor", None)
    if said is None:
        usual = 1e6 if name == "gemma3" else 10000.0
        said = {"rope_theta": usual if theta is None else theta, **(scaling if isinstance(scaling, dict) else {})}
        if name == "gemma3":
            said = {"full_attention": said, "sliding_attention": {"rope_theta": 10000.0 if local is None else local}}
    if not isinstance(said, dict):
        raise ArgumentError(f"config.json has rope_parameters {short(said)}")
    if name == "gemma3":
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
    if name == "phi3":
        rope["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0 if partial is None else partial)
        usual = {}
    if kind == "longrope":
        rope = _longrope(rope, wanted)
    return {key: value for key, value in rope.items() if key not in usual or usual[key] != value}


def _longrope(rope: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """With the factor of attention that transformers computes where config.json does not say it: llama.cpp does not."""
    most = wanted["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings", wanted.get("original_max_position_embeddings", most))
    if type(original) is not int or original < 2:
        raise ArgumentError(f"config.json has original_max_position_embeddings {short(original)}, of longrope")
    longer = _real(rope.pop("factor", most / original))
    attention = rope.get("attention_factor", math.sqrt(1 + math.log(max(longer, 1)) / math.log(original)))
    for key in ("short_factor", "long_factor"):
        if not isinstance(rope.get(key), list) or not all(type(each) in (int, float) for each in rope[key]):
            raise ArgumentError(f"config.json has no list of numbers {key}, which longrope needs")
        rope[key] = torch.tensor(rope[key], dtype=torch.float32).tolist()
    return rope | {"original_max_position_embeddings": original, "attention_factor": shortest(_real(attention))}


def _rope(wanted: Mapping[str, Any], rope: Mapping[str, Any], vectors: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    kind, head = rope["rope_type"], wanted["head_dim"]
    yield "rope.freq_base", _real(rope["rope_theta"])
    yield "rope.dimension_count", round(head * _real(rope.get("partial_rotary_factor", 1.0)))
    if kind in ("linear", "yarn"):
        yield "rope.scaling.type", kind
        yield "rope.scaling.factor", _real(rope.get("factor"))
    if kind == "llama3":
        factor, theta = _real(rope.get("factor")), _real(rope["rope_theta"])
        vectors["rope_freqs.weight"] = llama3_factors(factor, theta, head).float()
    if kind == "longrope":
        for end, key in (("long", "long_factor"), ("short", "short_factor")):
            vectors[f"rope_factors_{end}.weight"] = torch.tensor(rope[key], dtype=torch.float32)
        yield "rope.scaling.attn_factor", rope["attention_factor"]
    if kind == "yarn":
        yield "rope.scaling.original_context_length", rope.get("original_max_position_embeddings")
    elif "original_max_position_embeddings" in wanted:
        yield "rope.scaling.original_context_length", wanted["original_max_position_embeddings"]


def _real(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ArgumentError(f"config.json has {short(value)} where a number must stand")
    return float(value)


def _tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    said = config.get("eos_token_id")
    ends = said if isinstance(said, list) else [said]
    numbers = dict(zip(ENDS, ends, strict=False))
    numbers |= {"bos": config.get("bos_token_id"), "padding": config.get("pad_token_id")}
    for token in TOKENS:
        number = numbers.get(token, -1)
        if number is not None and (type(number) is not int or number >= config["vocab_size"]):
            raise ArgumentError(f"config.json has {short(number)} as a token, of {config['vocab_size']}")
        if number is not None and number >= 0:
            yield token, number


def _compare(its: Architecture, wanted: Mapping[str, Any], read: Mapping[str, Any], biased: Mapping[str, bool]) -> None:
    only: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), **ONLY}
    if its.norms_less_one:
        tanh = ("gelu_pytorch_tanh", "gelu")  # the latter in old files, and means the former
        only |= {"hidden_act": tanh, "hidden_activation": tanh[:1]}
    if "layer_types" not in read:
        only["layer_types"] = (["full_attention"] * wanted["num_hidden_layers"],)
    wrong, found = [], {**read, **biased}
    for key, value in wanted.items():
        if value is None or key in HARMLESS or (key in found and found[key] == value) or value in only.get(key, ()):
            continue
        wrong.append(f"{key} = {short(value)}" + (f" (it would be {short(found[key])})" if key in found else ""))
    wrong += [
        f"no {key} (it would be {short(value)})"
        for key, value in read.items()
        if key not in HARMLESS and value not in (None, False) and wanted.get(key) is None
    ]
    if wrong:
        raise ArgumentError(f"config.json has what a GGUF file of {its.model_type} cannot say: {shortened(wrong)}")
