"""config.json from the settings of a GGUF file, which llama.cpp names ``<architecture>.<setting>``; the inverse is
:mod:`bitport.interop.gguf.settings`.

Every setting of the architecture must be known: ignoring one could change what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from reprlib import repr as short
from typing import Any

from torch import Tensor

from bitport.errors import CheckpointError, shortened

MOST_LAYERS = 4096
HARMLESS = ("vocab_size", "rope.scaling.finetuned")
"""Settings to ignore; vocab_size follows from the shape of the embedding."""
EXPERTS, DENSE = "expert_count", "leading_dense_block_count"
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": "expert_used_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": DENSE,
    "num_dense_layers": DENSE,
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "conv_L_cache": "shortconv.l_cache",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
"""Key of config.json -> the equivalent setting."""
EPSILONS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps")
"""The entries of KEYS of which an architecture has exactly one."""
YARN = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_ext_factor": 1.0}
"""What llama.cpp uses, regardless of the file."""
TOKENS = ("bos", "eos", "padding", "eot", "eom")
"""Tokens whose ids are settings, tokenizer.ggml.<token>_token_id; a text ends with eos, eot or eom."""


class Settings:
    """The settings of one architecture; ``vectors``: small float tensors that are part of the configuration."""

    def __init__(self, said: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> None:
        self.architecture = said.get("general.architecture")
        self.said, self.vectors, self.known = said, dict(vectors), set(HARMLESS)

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.said

    def get(self, key: str, kinds: tuple[type, ...], default: Any = ...) -> Any:
        self.known.add(key)
        value = self.said.get(f"{self.architecture}.{key}", default)
        if value is ... or (value is not default and type(value) not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(
                f"{self.architecture}.{key} must be {wanted}, not {'absent' if value is ... else short(value)}"
            )
        return value

    def whole(self, key: str, default: Any = ..., most: int = 1 << 24, least: int = 1) -> Any:
        value = self.get(key, (int,), default)
        if value is not default and not least <= value <= most:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be {least} to {most}")
        return value

    def each(self, key: str, layers: int, default: Any = ...) -> Any:
        """A number, or a list with one for each of ``layers``, some of which may be 0."""
        value = self.get(key, (int, list), default)
        if not isinstance(value, list):
            return self.whole(key, default)
        if len(value) != layers or not all(type(one) is int and 0 <= one <= 1 << 24 for one in value):
            raise CheckpointError(f"{self.architecture}.{key} is {short(value)}, no number for each of {layers} layers")
        return value

    def real(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, (float,), default)
        if value is not default and not 1e-30 < value < 1e30:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be a number above 0")
        return value

    def vector(self, name: str) -> Tensor | None:
        return self.vectors.pop(name, None)

    def unknown(self) -> Iterator[str]:
        """The settings and vectors that were not requested."""
        prefix = f"{self.architecture}."
        for key, value in self.said.items():
            if key.startswith(prefix) and key.removeprefix(prefix) not in self.known:
                yield f"{key} = {short(value)}"
        yield from self.vectors


def stated(config: Mapping[str, Any], setting: str) -> int:
    """The number that ``config`` has for one of KEYS; 0 if it has none."""
    return next((config[key] for key, each in KEYS.items() if each == setting and key in config), 0)


def predicting(settings: Settings) -> int:
    """How many of the layers, the last ones, predict tokens after the next: models of transformers have none."""
    count: int = settings.get("nextn_predict_layers", (int,), 0)
    if not 0 <= count < settings.whole(KEYS["num_hidden_layers"], most=MOST_LAYERS):
        raise CheckpointError(f"{settings.architecture}.nextn_predict_layers is {count}, which leaves no layer")
    return count


def config_of(
    classname: str,
    model_type: str,
    epsilon: str,
    special: Callable[[Settings, dict[str, Any]], None],
    settings: Settings,
    *,
    dense: bool,
    several: Collection[str],
) -> dict[str, Any]:
    """``several``: keys for which a file may have one number for each layer, which ``special`` makes one of."""
    hidden = settings.whole(KEYS["hidden_size"])
    heads = settings.whole(KEYS["num_attention_heads"], most=hidden)
    head = settings.whole(KEYS["head_dim"], hidden // heads)
    if settings.whole("attention.value_length", head) != head:
        raise CheckpointError(f"{settings.architecture}.attention.value_length is not key_length, {head}")
    layers = settings.whole(KEYS["num_hidden_layers"], most=MOST_LAYERS)

    def number(key: str, default: Any) -> Any:
        setting = KEYS[key]
        return settings.each(setting, layers, default) if key in several else settings.whole(setting, default)

    config: dict[str, Any] = {
        "architectures": [classname],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": number("intermediate_size", ... if dense else None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("num_key_value_heads", heads),
        "head_dim": head,
        "max_position_embeddings": settings.whole(KEYS["max_position_embeddings"]),
        epsilon: settings.real(KEYS[epsilon]),
        "rope_parameters": _rope(settings),
    }
    if config["intermediate_size"] is None:
        del config["intermediate_size"]
    special(settings, config)
    turned = settings.whole("rope.dimension_count", head)
    if turned != head and "partial_rotary_factor" not in config["rope_parameters"]:
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
