"""Attention to the tokens that an indexer chooses (``deepseek32``: DeepSeek V3.2; ``glm-dsa``: GLM 5).

It scores the tokens before by heads of its own, and a token attends to the best ones alone. In ``glm-dsa`` a layer may
use the choice of a layer before, and then has no indexer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from bitport.errors import ArgumentError, CheckpointError
from bitport.interop.gguf import latent
from bitport.interop.gguf.keys import Settings

NAMES = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
BIASED = ("indexer.k_norm",)
SIZES = ("index_n_heads", "index_head_dim", "index_topk")
FULL, SHARED = "full", "shared"
TYPES = "attention.indexer.types"
"""Whether each layer has an indexer."""
LONG = 1 << 20
"""The context from which files without TYPES are of GLM 5.2; before, all layers have an indexer."""


def glm_dsa(settings: Settings, config: dict[str, Any]) -> None:
    latent.deepseek3(settings, config)
    if (kind := config["rope_parameters"]["rope_type"]) != "default":
        raise CheckpointError(f"glm-dsa.rope.scaling.type is {kind!r}; none is read, as llama.cpp scales otherwise")
    layers = config["num_hidden_layers"]
    own = settings.flags(TYPES, layers)
    if own is None:
        own = [config["max_position_embeddings"] < LONG or each == FULL for each in types_of(layers, 4, 3)]
    if not own[0]:
        raise CheckpointError(f"glm-dsa.{TYPES} begins with a layer that uses the choice of one before")
    config["indexer_types"] = [FULL if each else SHARED for each in own]


def types_of(layers: int, every: int, first: int) -> list[str]:
    """The ``first`` layers have an indexer, and of those after, each ``every``-th."""
    return [SHARED if max(at - first + 1, 0) % every else FULL for at in range(layers)]


def settings_of(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from latent.settings_of(wanted)
    types = wanted.get("indexer_types")
    if not isinstance(types, list):
        raise ArgumentError(f"config.json has the indexer_types {short(types)}, and must have a list")
    yield TYPES, [kind == FULL for kind in types]
