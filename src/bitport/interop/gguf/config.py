"""config.json of a model from the settings of a GGUF file, which llama.cpp names ``<architecture>.<setting>``; the way
back is :mod:`bitport.interop.gguf.settings`.

Every setting of the architecture must be understood: one that is passed over would change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.manifest import shortened
from bitport.errors import CheckpointError

MOST_LAYERS = 4096
HARMLESS = ("vocab_size", "rope.scaling.finetuned")
"""The first is said by the shape of the embedding."""
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Of config.json -> the setting that says the same."""
TOKENS = ("bos", "eos", "padding", "eot", "eom")
"""Tokens whose number is a setting, tokenizer.ggml.<token>_token_id; a text ends with eos, eot and eom."""
PERMUTED = "Meta AI original pth"
"""What old files say of the rows of attn_q and attn_k, which lie so in new ones too."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama from 3.1 on; files hold the factors that came out, not these."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention is scaled by hidden size / heads where that of others is by the size of a
head; llama.cpp tells them by this number too."""


class Settings:
    """Those of one architecture; ``vectors``: small float tensors that belong to the configuration."""

    def __init__(self, said: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> None:
        self.architecture = said.get("general.architecture")
        self.said, self.vectors, self.known = said, dict(vectors), set(HARMLESS)

    def get(self, key: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        self.known.add(key)
        value = self.said.get(f"{self.architecture}.{key}", default)
        if value is ... or (value is not default and type(value) not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(
                f"{self.architecture}.{key} must be {wanted}, not {'absent' if value is ... else short(value)}"
            )
        return value

    def whole(self, key: str, default: Any = ..., most: int = 1 << 24) -> Any:
        value = self.get(key, (int,), default)
        if value is not default and not 0 < value <= most:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be 1 to {most}")
        return value

    def real(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, (float,), default)
        if value is not default and not 1e-30 < value < 1e30:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be a number above 0")
        return value

    def vector(self, name: str) -> Tensor | None:
        return self.vectors.pop(name, None)

    def unknown(self) -> Iterator[str]:
        """What was not asked for."""
        prefix = f"{self.architecture}."
        for key, value in self.said.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self.known:
                yield f"{key} = {short(value)}"
        yield from self.vectors


def config_of(
    classname: str, model_type: str, special: Callable[[Settings, dict[str, Any]], None], settings: Settings
) -> dict[str, Any]:
    hidden = settings.whole(KEYS["hidden_size"])
    heads = settings.whole(KEYS["num_attention_heads"], most=hidden)
    head = settings.whole(KEYS["head_dim"], hidden // heads)
    if settings.whole("attention.value_length", head) != head:
        raise CheckpointError(f"{settings.architecture}.attention.value_length is not key_length, {head}")
    config: dict[str, Any] = {
        "architectures": [classname],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": settings.whole(KEYS["intermediate_size"]),
        "num_hidden_layers": settings.whole(KEYS["num_hidden_layers"], most=MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.whole(KEYS["num_key_value_heads"], heads),
        "head_dim": head,
        "max_position_embeddings": settings.whole(KEYS["max_position_embeddings"]),
        "rms_norm_eps": settings.real(KEYS["rms_norm_eps"]),
        "rope_parameters": _rope(settings),
    }
    special(settings, config)
    turned = settings.whole("rope.dimension_count", head)
    if turned != head and "partial_rotary_factor" not in config["rope_parameters"]:
        raise CheckpointError(f"{settings.architecture}.rope.dimension_count is {turned}; {head}, a head, is read")
    if unknown := list(settings.unknown()):
        raise CheckpointError(f"what these change in the model is not known here: {shortened(unknown)}")
    return config | _tokens(settings.said)


def _rope(settings: Settings) -> dict[str, Any]:
    """Rotary embeddings, in the words of transformers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base", 10000.0)}
    factor = settings.real("rope.scaling.factor", None)
    kind = settings.get("rope.scaling.type", (str,), "none" if factor is None else "linear")
    original = settings.whole("rope.scaling.original_context_length", None)
    if kind in ("linear", "yarn"):
        if factor is None or (original is None and kind == "yarn"):
            raise CheckpointError(f"{settings.architecture}.rope.scaling.type is {kind!r}, without all it needs")
        rope |= {"rope_type": kind, "factor": factor}
        return rope | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
    if kind != "none" and not (kind == "longrope" and factor is None):
        raise CheckpointError(
            f"{settings.architecture}.rope.scaling.type is {short(kind)}; none, linear, yarn are read"
        )
    return rope


def _tokens(said: Mapping[str, Any]) -> dict[str, Any]:
    ids = {}
    for key in TOKENS:
        value = said.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {short(value)}, and must be a whole number")
        ids[key] = value
    ends = [*dict.fromkeys(ids[end] for end in ("eos", "eot", "eom") if ids[end] is not None)]
    eos = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}


def nothing_more(settings: Settings, config: dict[str, Any]) -> None:
    pass


def llama(settings: Settings, config: dict[str, Any]) -> None:
    layout = settings.get("tensor_data_layout", (str,), PERMUTED)
    if layout != PERMUTED:
        raise CheckpointError(f"llama.tensor_data_layout is {short(layout)}; {PERMUTED!r} is read")
    rope = config["rope_parameters"]
    if (factors := settings.vector("rope_freqs.weight")) is not None:
        if rope["rope_type"] != "default":
            raise CheckpointError(f"the file has rope_freqs.weight and llama.rope.scaling.type, {rope['rope_type']!r}")
        rope |= _llama3(factors, rope["rope_theta"], config["head_dim"])


def _llama3(factors: Tensor, theta: float, head: int) -> dict[str, Any]:
    """The setting of transformers from which ``factors`` come, [head / 2]."""
    if len(factors) != head // 2:
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} numbers, not one for two of the {head} of a head")
    factor = float(factors.max())
    if not torch.allclose(llama3_factors(factor, theta, head), factors.double(), rtol=1e-4, atol=0):
        raise CheckpointError(f"rope_freqs.weight is not what Llama 3.1 and its successors have, with {LLAMA3}")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_factors(factor: float, theta: float, head: int) -> Tensor:
    """By what each frequency is divided, float64 [head / 2]: 1 for short waves, ``factor`` for long ones, between them
    it is reached smoothly."""
    wave = 2 * math.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = ((LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def phi3(settings: Settings, config: dict[str, Any]) -> None:
    rope, head = config["rope_parameters"], config["head_dim"]
    rope["partial_rotary_factor"] = settings.whole("rope.dimension_count", head) / head
    config["sliding_window"] = settings.get(KEYS["sliding_window"], (int,), 0) or None
    original = settings.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    attention = settings.real("rope.scaling.attn_factor", None)
    far, near = (settings.vector(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if far is None or near is None:
        if rope["rope_type"] != "default" or far is not near or attention is not None:
            raise CheckpointError("phi3 has rope_factors_long and rope_factors_short, or neither and no scaling")
        return
    rope |= {"rope_type": "longrope", "long_factor": far.tolist(), "short_factor": near.tolist()}
    rope |= {"original_max_position_embeddings": original}
    rope |= {} if attention is None else {"attention_factor": attention}


def qwen3moe(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp divides the weights of the chosen experts by their sum, whatever a file says."""
    config |= {
        **{key: settings.whole(KEYS[key]) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        "norm_topk_prob": True,
    }


def gemma2(settings: Settings, config: dict[str, Any]) -> None:
    _gemma(settings, config, every=2)
    config["attn_logit_softcapping"] = settings.real(KEYS["attn_logit_softcapping"], 50.0)
    config["final_logit_softcapping"] = settings.real(KEYS["final_logit_softcapping"], 30.0)


def gemma3(settings: Settings, config: dict[str, Any]) -> None:
    _gemma(settings, config, every=6)
    near = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": near}
    config["final_logit_softcapping"] = settings.real(KEYS["final_logit_softcapping"], None)


def _gemma(settings: Settings, config: dict[str, Any], every: int) -> None:
    """``every``: how many layers make one that sees everything, where the file does not say."""
    layers = config["num_hidden_layers"]
    largest = layers == LARGEST[str(settings.architecture)]
    usual = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    config["query_pre_attn_scalar"] = round(settings.real("attention.scale", usual**-0.5) ** -2)
    config["sliding_window"] = settings.whole(KEYS["sliding_window"])
    pattern = settings.get("attention.sliding_window_pattern", (int, list), every)
    if isinstance(pattern, int):
        config["layer_types"] = layer_types(layers, max(pattern, 1))
        return
    if len(pattern) != layers:
        raise CheckpointError(f"{settings.architecture}.attention.sliding_window_pattern is not of {layers} layers")
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]


def layer_types(layers: int, every: int) -> list[str]:
    """``every``: how many layers make one that sees everything."""
    return ["sliding_attention" if (at + 1) % every else "full_attention" for at in range(layers)]
