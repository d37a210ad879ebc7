"""The settings of a GGUF file from the config.json of a model: the inverse of :mod:`bitport.interop.gguf.config`, which
also validates them. What it reads from the settings must equal the original config; keys that it does not produce must
be harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError, shortened
from bitport.interop.gguf import gemma4, indexed, latent
from bitport.interop.gguf.architecture import Architecture
from bitport.interop.gguf.architectures import ARCHITECTURES
from bitport.interop.gguf.config import TOKENS, config_of
from bitport.interop.gguf.header import shortest
from bitport.interop.gguf.keys import EPSILONS, KEYS, MOST, REAL, Settings
from bitport.interop.gguf.normal import normal
from bitport.interop.gguf.special import EVERY, INNER, RECURRENT, SECTIONS, llama3_factors
from bitport.interop.gguf.usual import real

ALIKE = {"mistral": "llama", "kimi_k2": "deepseek3"}
"""Model types that compute the same as another one."""
SOME = {key for its in ARCHITECTURES.values() for key in its.more}
"""The entries of KEYS that not all architectures have."""
ALSO = {name: {"expert_feed_forward_length": "intermediate_size"} for name in ("gpt-oss", "minimax-m2")}
"""Additional settings that repeat a key of config.json."""
ENDS = ("eos", "eot", "eom")
HARMLESS = (
    *("architectures", "model_type", "_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map"),
    *("use_cache", "cache_implementation", "initializer_range", "pretraining_tp", "return_dict", "output_attentions"),
    *("output_hidden_states", "problem_type", "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("attention_dropout", "embd_pdrop", "resid_pdrop", "output_router_logits", "router_aux_loss_coef"),
    *("router_jitter_noise", "residual_dropout", "embedding_dropout", "no_rope_layer_interval"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size", "tie_word_embeddings"),
    *("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"),
    *("initial_context_length", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    *("full_attention_interval", "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    *("num_nextn_predict_layers", "num_mtp_layers", "full_attn_idxs", "tie_embedding"),
    *("qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"),
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
    *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
)
"""Keys without effect, or handled elsewhere: tokens, vocabulary, attention windows (layer_types)."""
ONLY: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False, "vision"),
    "rope_interleaved": (False,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "topk_method": ("noaux_tc",),
    "is_llama_config": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "attn_output_gate": (True,),
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "swiglu_limit": (7.0,),
    "swiglu_alpha": (1.702,),
    "rotary_pct": (1.0,),
    "layer_switch": (4,),
    "order_of_interleaved_layers": ("local_attn_first",),
    "position_embedding_type": ("rope_gptj",),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
    "block_use_swiglu": (True,),
    "use_pos_enc": (True,),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "use_parallel_embedding": (False, True),
}
"""The values that llama.cpp assumes."""


class Said(NamedTuple):
    architecture: Architecture
    settings: dict[str, Any]
    vectors: dict[str, Tensor]
    """Tensors that are part of the configuration."""
    config: dict[str, Any]
    """The config as read back from the settings."""
    tied: bool
    """Whether the original config ties the head to the embedding."""


def settings_of(config: Mapping[str, Any], first: Collection[str]) -> Said:
    """The settings for ``config``; ArgumentError if a file cannot represent it. ``first``: the parameters of the
    first layer."""
    name = _architecture(config.get("model_type"))
    its = ARCHITECTURES[name]
    wanted, name = normal(name, config), its.file or name
    said: dict[str, Any] = {"general.architecture": name, "general.type": "model", "general.quantization_version": 2}
    vectors: dict[str, Tensor] = {}

    def say(key: str, value: Any) -> None:
        if isinstance(value, int) and not 0 <= value <= MOST:
            raise ArgumentError(f"config.json says that {key} is {short(value)}; it must be from 0 to {MOST}")
        said[f"{name}.{key}"] = shortest(value) if isinstance(value, float) else value

    for key, setting in KEYS.items():
        has = key == its.epsilon if key in EPSILONS else key in its.more or key not in SOME
        if has and wanted.get(key) is not None:
            say(setting, real(wanted[key]) if key in REAL else wanted[key])
    for setting, key in ALSO.get(name, {}).items():
        say(setting, wanted.get(key))
    say("attention.value_length", wanted.get("head_dim"))
    say("vocab_size", wanted.get("vocab_size"))
    both = wanted["rope_parameters"]
    rope = both.get("full_attention", both)
    if rope is not both:
        say("rope.freq_base_swa", real(both["sliding_attention"].get("rope_theta")))
    for key, value in _rope(wanted, rope, vectors):
        say(key, value)
    for key, value in (*its.fixed.items(), *(OWN[name](wanted) if name in OWN else ())):
        say(key, value)
    for token, number in _tokens(config):
        said[f"tokenizer.ggml.{token}_token_id"] = number
    read = config_of(its, Settings(said, vectors))
    _compare(its, wanted, read, its.declares(first))
    return Said(its, said, vectors, read, bool(wanted["tie_word_embeddings"]))


def _architecture(model_type: Any) -> str:
    known = {its.model_type: name for name, its in ARCHITECTURES.items()} | ALIKE
    if not isinstance(model_type, str) or model_type not in known:
        raise ArgumentError(f"a model of the type {short(model_type)} is not written as GGUF; {', '.join(known)} are")
    return known[model_type]


def _rope(wanted: Mapping[str, Any], rope: Mapping[str, Any], vectors: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    kind, head = rope["rope_type"], wanted["head_dim"]
    yield "rope.freq_base", real(rope["rope_theta"])
    yield "rope.dimension_count", round(head * real(rope.get("partial_rotary_factor", 1.0)))
    if kind in ("linear", "yarn"):
        yield "rope.scaling.type", kind
        yield "rope.scaling.factor", real(rope.get("factor"))
    if kind == "llama3":
        factor, theta = real(rope.get("factor")), real(rope["rope_theta"])
        vectors["rope_freqs.weight"] = llama3_factors(factor, theta, head).float()
    if kind == "proportional":
        pairs = wanted["global_head_dim"] // 2
        turned = round(pairs * real(rope["partial_rotary_factor"]))
        vectors["rope_freqs.weight"] = gemma4.factors(turned, pairs)
    if kind == "longrope":
        for end, key in (("long", "long_factor"), ("short", "short_factor")):
            vectors[f"rope_factors_{end}.weight"] = torch.tensor(rope[key], dtype=torch.float32)
        yield "rope.scaling.attn_factor", rope["attention_factor"]
    if rope.get("llama_4_scaling_beta"):
        yield "attention.temperature_scale", real(rope["llama_4_scaling_beta"])
    if "mscale_all_dim" in rope:
        yield "rope.scaling.yarn_log_multiplier", real(rope["mscale_all_dim"])
    if kind == "yarn":
        yield "rope.scaling.original_context_length", rope.get("original_max_position_embeddings")
    elif "original_max_position_embeddings" in wanted:
        yield "rope.scaling.original_context_length", wanted["original_max_position_embeddings"]


def _hybrid(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    types, sections = wanted["layer_types"], wanted["rope_parameters"].get("mrope_section", [])
    if not isinstance(types, list) or not isinstance(sections, list):
        raise ArgumentError(f"config.json has the layer_types {short(types)} and the mrope_section {short(sections)}")
    yield INNER, wanted["linear_num_value_heads"] * wanted["linear_value_head_dim"]
    yield EVERY, types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    yield RECURRENT, [kind == "linear_attention" for kind in types]
    if sections:
        yield SECTIONS, [*sections, 0]


def _convolving(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    types, heads = wanted.get("layer_types"), wanted["num_key_value_heads"]
    if not isinstance(types, list):
        raise ArgumentError(f"config.json has the layer_types {short(types)}, and must have a list")
    yield KEYS["num_key_value_heads"], [heads if kind == "full_attention" else 0 for kind in types]


OWN: dict[str, Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]] = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _hybrid),
    **dict.fromkeys(("lfm2", "lfm2moe"), _convolving),
    "gemma4": gemma4.settings_of,
    **dict.fromkeys(("deepseek2", "deepseek32", "mistral4"), latent.settings_of),
    "glm-dsa": indexed.settings_of,
}
"""What only some architectures say."""


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


def _compare(
    its: Architecture, wanted: Mapping[str, Any], read: Mapping[str, Any], declared: Mapping[str, bool]
) -> None:
    only: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), **ONLY}
    if its.gelu:
        tanh = ("gelu_pytorch_tanh", "gelu")  # the latter in old files, where it means the former
        only |= {"hidden_act": tanh, "hidden_activation": tanh[:1]}
    if "layer_types" not in read:
        only["layer_types"] = (["full_attention"] * wanted["num_hidden_layers"],)
        only["attn_type_list"] = ([1] * wanted["num_hidden_layers"],)
    wrong, found = [], {**read, **declared}
    only = {key: values for key, values in only.items() if key not in found}
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
