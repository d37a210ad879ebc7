"""config.json from the settings of a GGUF file; the inverse is :mod:`bitport.interop.gguf.settings`.

Every setting of the architecture must be known: ignoring one could change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from bitport.errors import CheckpointError, shortened
from bitport.interop.gguf.architecture import Architecture
from bitport.interop.gguf.keys import KEYS, MOST_LAYERS, Settings

YARN = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_ext_factor": 1.0}
"""What llama.cpp uses, regardless of the file."""
TOKENS = ("bos", "eos", "padding", "eot", "eom")
"""Tokens whose ids are settings, tokenizer.ggml.<token>_token_id; a text ends with eos, eot or eom."""


def config_of(its: Architecture, settings: Settings) -> dict[str, Any]:
    for key, value in its.fixed.items():
        if (said := settings.get(key, (type(value),), value)) != value:
            raise CheckpointError(f"{settings.architecture}.{key} is {short(said)}; {short(value)} is read")
    hidden = settings.whole(KEYS["hidden_size"])
    heads = settings.whole(KEYS["num_attention_heads"], most=hidden)
    head = settings.whole(KEYS["head_dim"], hidden // heads)
    if not its.latent and settings.whole("attention.value_length", head) != head:
        raise CheckpointError(f"{settings.architecture}.attention.value_length is not key_length, {head}")
    layers = settings.whole(KEYS["num_hidden_layers"], most=MOST_LAYERS)

    def number(key: str, default: Any) -> Any:
        setting = KEYS[key]
        return settings.each(setting, layers, default) if key in its.several else settings.whole(setting, default)

    config: dict[str, Any] = {
        "architectures": [its.classname],
        "model_type": its.model_type,
        "hidden_size": hidden,
        "intermediate_size": number("intermediate_size", ... if its.dense else None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": head,
        "max_position_embeddings": settings.whole(KEYS["max_position_embeddings"]),
        its.epsilon: settings.real(KEYS[its.epsilon]),
        "rope_parameters": _rope(settings),
        **{key: settings.of(key, usual) for key, usual in its.more.items()},
    }
    if config["intermediate_size"] is None:
        del config["intermediate_size"]
    its.special(settings, config)
    turned = settings.whole("rope.dimension_count", head)
    if turned != head and not its.latent and "partial_rotary_factor" not in config["rope_parameters"]:
        raise CheckpointError(f"{settings.architecture}.rope.dimension_count is {turned}; {head}, a head, is read")
    if unknown := list(settings.unknown()):
        raise CheckpointError(f"what these change in the model is not known here: {shortened(unknown)}")
    return config | _tokens(settings.said)


def _rope(settings: Settings) -> dict[str, Any]:
    """The rope_parameters of transformers."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base", 10000.0)}
    factor = settings.real("rope.scaling.factor", None)
    kind = settings.get("rope.scaling.type", (str,), "none" if factor is None else "linear")
    original = settings.whole("rope.scaling.original_context_length", None)
    if kind in ("linear", "yarn"):
        if factor is None or (original is None and kind == "yarn"):
            raise CheckpointError(f"{settings.architecture}.rope.scaling.type is {kind!r}, without all it needs")
        rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = original
            for key, usual in YARN.items():
                if (value := settings.real(f"rope.scaling.{key}", usual)) != usual:
                    raise CheckpointError(f"{settings.architecture}.rope.scaling.{key} is {value}; {usual} is read")
        return rope
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
