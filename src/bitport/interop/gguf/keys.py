"""The settings of a GGUF file, which llama.cpp names ``<architecture>.<setting>``, and the keys of config.json that
they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from torch import Tensor

from bitport.errors import CheckpointError

MOST, MOST_LAYERS = 1 << 24, 4096
"""Upper limits of whole numbers, and of numbers of layers."""
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
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
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
REAL = (
    *(*EPSILONS, "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    *("logit_scale", "routed_scaling_factor", "attn_logit_softcapping", "final_logit_softcapping"),
)
"""The entries of KEYS that are real numbers. Most others are whole."""
OF_LAYERS = ("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers")
"""Those that are numbers of layers."""


class Settings:
    """The settings of one architecture; ``vectors``: small float tensors that are part of the configuration."""

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

    def whole(self, key: str, default: Any = ..., most: int = MOST, least: int = 1) -> Any:
        value = self.get(key, (int,), default)
        if value is not default and not least <= value <= most:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be {least} to {most}")
        return value

    def each(self, key: str, layers: int, default: Any = ...) -> Any:
        """A number, or a list with one for each of ``layers``, some of which may be 0."""
        value = self.get(key, (int, list), default)
        if not isinstance(value, list):
            return self.whole(key, default)
        if len(value) != layers or not all(type(one) is int and 0 <= one <= MOST for one in value):
            raise CheckpointError(f"{self.architecture}.{key} is {short(value)}, no number for each of {layers} layers")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Whether something holds for each of ``layers``, if the file says it."""
        value: list[bool] | None = self.get(key, (list,), None)
        if value is not None and (len(value) != layers or not all(type(one) is bool for one in value)):
            raise CheckpointError(f"{self.architecture}.{key} is {short(value)}, not true or false for {layers} layers")
        return value

    def real(self, key: str, default: Any = ...) -> Any:
        value = self.get(key, (float,), default)
        if value is not default and not 1e-30 < value < 1e30:
            raise CheckpointError(f"{self.architecture}.{key} is {value}, and must be a number above 0")
        return value

    def of(self, key: str, usual: Any) -> Any:
        """The value of one of KEYS. ``usual``: where it is absent; ``...`` if it must not be."""
        if key in REAL:
            return self.real(KEYS[key], usual)
        if isinstance(usual, bool):
            return self.get(KEYS[key], (bool,), usual)
        most = MOST_LAYERS if key in OF_LAYERS else MOST
        return self.whole(KEYS[key], usual, most, least=0 if usual == 0 else 1)

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
