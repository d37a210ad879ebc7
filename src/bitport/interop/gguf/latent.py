"""Attention whose keys and values are computed from one short vector of each token (``deepseek2``: DeepSeek, Kimi K2;
``mistral4``).

The model's ``kv_b_proj`` makes them for all heads, [heads * (keys + values), rank]. llama.cpp multiplies the queries by
the rows for keys instead, and so attends to the vectors themselves, as to one head of ``rank + turned`` numbers, of
which the last ones are turned by the position. A file has the two parts of the matrix separately, and the first one
transposed:

    attn_k_b    [heads, rank, keys]
    attn_v_b    [heads, values, rank]

A scale of the first one is of numbers that are not neighbours in the model's matrix, so that this is of floats. Files
until April 2025 have the matrix as it is (``attn_kv_b``), and the sizes of the model's heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.gguf.header import shortest
from bitport.interop.gguf.keys import KEYS, Settings, predicting

PARTS = ("attn_k_b", "attn_v_b")
QUERIES = ("attn_q",)
LATENT_QUERIES = ("attn_q_a", "attn_q_a_norm", "attn_q_b")
"""Of models that compute the queries, too, from a short vector."""
HEADS, KEY, VALUE = KEYS["num_key_value_heads"], KEYS["head_dim"], "attention.value_length"
KEY_OF_MODEL, VALUE_OF_MODEL = "attention.key_length_mla", "attention.value_length_mla"
MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""0.1 of mscale_all_dim. Without it llama.cpp scales attention as no model of transformers does."""

TEMPERATURE, STEP = "attention.temperature_scale", "attention.temperature_length"

EPSILON = 1e-6
"""Of the norms of short vectors in the model, whatever the others have."""


def deepseek2(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp does not normalize the weights of the selected experts, nor does the model."""
    _special(settings, config)
    if config["norm_topk_prob"]:
        raise CheckpointError("deepseek2.expert_weights_norm is True, which is read with expert_gating_func 2 alone")
    groups = config["n_group"] > 1
    config |= {"scoring_func": "softmax", "topk_method": "group_limited_greedy" if groups else "greedy"}


def deepseek3(settings: Settings, config: dict[str, Any]) -> None:
    _special(settings, config)
    config["num_nextn_predict_layers"] = 0


def mistral4(settings: Settings, config: dict[str, Any]) -> None:
    """Queries are scaled by the position, in steps of the original context, if the file says so."""
    _special(settings, config)
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise CheckpointError(f"{settings.architecture}.rope.scaling.type is {rope['rope_type']!r}; yarn is read")
    rope["llama_4_scaling_beta"] = settings.real(TEMPERATURE, 0.0)
    original = rope["original_max_position_embeddings"]
    step = settings.whole(STEP, ... if rope["llama_4_scaling_beta"] else original)
    if step != original:
        raise CheckpointError(f"{settings.architecture}.{STEP} is {step}; the original context, {original}, is read")
    config["head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rope["partial_rotary_factor"] = config["qk_rope_head_dim"] / config["head_dim"]


def _special(settings: Settings, config: dict[str, Any]) -> None:
    config["num_hidden_layers"] -= predicting(settings)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    turned = settings.whole("rope.dimension_count")
    keys = settings.whole(KEY_OF_MODEL, None)
    if keys is None:
        keys, values, follows = settings.whole(KEY), settings.whole(VALUE), {HEADS: heads}
    else:
        values, follows = settings.whole(VALUE_OF_MODEL), {KEY: rank + turned, VALUE: rank, HEADS: 1}
    for key, value in follows.items():
        if (said := settings.whole(key, value)) != value:
            raise CheckpointError(f"{settings.architecture}.{key} is {said}; {value} is read, as follows from others")
    if keys <= turned:
        raise CheckpointError(f"{settings.architecture} has {keys} numbers of a key, of which {turned} are turned")
    config |= {"num_key_value_heads": heads, "head_dim": turned, "qk_rope_head_dim": turned}
    config |= {"qk_nope_head_dim": keys - turned, "v_head_dim": values}
    rope = config["rope_parameters"]
    multiplier = settings.real(MULTIPLIER, ... if rope["rope_type"] == "yarn" else None)
    if rope["rope_type"] == "yarn":
        scale = shortest(10 * shortest(multiplier))
        if scale != 1 and settings.architecture != "deepseek2":
            told = f"{settings.architecture}.{MULTIPLIER} is {shortest(multiplier)}; 0.1 is read"
            raise CheckpointError(f"{told}, as llama.cpp takes mscale for 1 whatever mscale_all_dim is")
        rope["mscale"] = rope["mscale_all_dim"] = scale


def settings_of(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is not simply one of KEYS."""
    rank, turned = wanted["kv_lora_rank"], wanted["qk_rope_head_dim"]
    yield HEADS, 1
    yield KEY, rank + turned
    yield VALUE, rank
    yield KEY_OF_MODEL, wanted["qk_nope_head_dim"] + turned
    yield VALUE_OF_MODEL, wanted["v_head_dim"]
    rope = wanted["rope_parameters"]
    if (scale := rope.get("mscale_all_dim")) is not None:
        yield MULTIPLIER, 0.1 * scale
    if rope.get("llama_4_scaling_beta"):
        yield STEP, rope.get("original_max_position_embeddings")


def joined(keys: Tensor, values: Tensor) -> Tensor:
    """The matrix of the model from the two of a file."""
    return torch.cat([keys.mT, values], 1).flatten(0, 1)


def parted(matrix: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`joined`. ``sizes``: how many rows of a head are for keys, and for values."""
    keys, values = matrix.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
    return keys.mT, values
