"""The settings of Gemma 4, whose layers differ in more than their window.

Layers with full attention have heads of another size, and of another number if their keys are their values too. The
last layers have no keys and values: they attend to those of the last layer of their type that has, and may have an MLP
of twice the size. Numbers that differ are lists in a file, with one for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError, CheckpointError
from bitport.interop.gguf.keys import KEYS, Settings
from bitport.interop.gguf.special import windows

HEADS, SIZE, PATTERN = "num_key_value_heads", "intermediate_size", "attention.sliding_window_pattern"
NEAR = ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")
"""The size of heads in layers with a window."""
FAR = ("attention.key_length", "attention.value_length", "rope.dimension_count")
EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
UNTURNED = 1e30
"""The divisor of frequencies that are not to turn."""


def special(settings: Settings, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    config["layer_types"] = windows(settings, layers)
    full = [kind == "full_attention" for kind in config["layer_types"]]
    shared = settings.whole(KEYS["num_kv_shared_layers"], 0, layers, least=0)
    if not full[-1] or (shared and full[layers - shared - 2 : layers - shared] != [False, True]):
        raise CheckpointError(
            f"{settings.architecture} with the types {short(config['layer_types'])}, of which {shared} have no keys, "
            f"is not read: the last must be full_attention, and so must be the last with keys, not the one before that"
        )
    near = {settings.whole(key) for key in NEAR}
    if len(near) > 1:
        raise CheckpointError(f"{', '.join(NEAR)} of {settings.architecture} are {sorted(near)}; one size is read")
    config["global_head_dim"], config["head_dim"] = config["head_dim"], near.pop()
    heads, sizes = config[HEADS], config[SIZE]
    config["attention_k_eq_v"], config["use_double_wide_mlp"] = isinstance(heads, list), isinstance(sizes, list)
    if isinstance(heads, list):
        near_heads = (one for one, its in zip(heads, full, strict=True) if not its)
        config |= {HEADS: next(near_heads, heads[0]), "num_global_key_value_heads": heads[-1]}
        _check(settings, HEADS, heads, _heads(config))
    if isinstance(sizes, list):
        config[SIZE] = sizes[0]
        _check(settings, SIZE, sizes, _sizes(config))
    experts = {key: config.pop(key) for key in EXPERTS}
    config["enable_moe_block"] = any(experts.values())
    if config["enable_moe_block"]:
        config |= {key: settings.of(key, ...) for key in experts}
    config["rope_parameters"] = _ropes(settings, config["rope_parameters"])


def _heads(config: Mapping[str, Any]) -> list[int]:
    both = config[HEADS], config["num_global_key_value_heads"]
    return [both[kind == "full_attention"] for kind in config["layer_types"]]


def _sizes(config: Mapping[str, Any]) -> list[int]:
    layers, shared, size = config["num_hidden_layers"], config["num_kv_shared_layers"], config[SIZE]
    return [size] * (layers - shared) + [2 * size] * shared


def _check(settings: Settings, key: str, said: list[int], read: list[int]) -> None:
    if said != read or 0 in said:
        raise CheckpointError(f"{settings.architecture}.{KEYS[key]} is {short(said)}; {short(read)} would be read")


def _ropes(settings: Settings, rope: Mapping[str, Any]) -> dict[str, Any]:
    found = settings.vector("rope_freqs.weight")
    turned = 0 if found is None else int((found == 1).sum())
    if found is None or not torch.equal(found, factors(turned, len(found))):
        raise CheckpointError(f"rope_freqs.weight of {settings.architecture} must be some 1 and then {UNTURNED}")
    if rope["rope_type"] != "default":
        raise CheckpointError(f"{settings.architecture}.rope.scaling.type is {rope['rope_type']!r}; none is read")
    return {
        "full_attention": {**rope, "rope_type": "proportional", "partial_rotary_factor": turned / len(found)},
        "sliding_attention": {"rope_type": "default", "rope_theta": settings.real("rope.freq_base_swa")},
    }


def factors(turned: int, pairs: int) -> Tensor:
    """What the frequencies of a head are divided by."""
    return torch.tensor([1.0] * turned + [UNTURNED] * (pairs - turned))


def settings_of(wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that are no key of config.json, or a list in a file."""
    types, shared = wanted["layer_types"], wanted["num_kv_shared_layers"]
    if type(shared) is not int or not 0 <= shared <= len(types):
        raise ArgumentError(f"config.json has num_kv_shared_layers {short(shared)}, of {len(types)} layers")
    yield from ((key, wanted["global_head_dim"]) for key in FAR)
    yield from ((key, wanted["head_dim"]) for key in NEAR)
    yield PATTERN, [kind == "sliding_attention" for kind in types]
    if wanted["attention_k_eq_v"]:
        yield KEYS[HEADS], _heads(wanted)
    if wanted["use_double_wide_mlp"]:
        yield KEYS[SIZE], _sizes(wanted)
