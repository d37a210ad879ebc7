"""Tensors that a file or a checkpoint may have and that no model computes with: they are left out, with a note."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from bitport.errors import shortened
from bitport.interop.gguf.names import ONE_BLOCK, keyless, parted

OF_KEYS = {"attn_k": "self_attn.k_proj", "attn_k_norm": "self_attn.k_norm", "attn_v": "self_attn.v_proj"}
BESIDE = "mtp."
"""What begins the names of layers that predict tokens after the next, in models that do not number them on (Qwen)."""
PREDICTING = "layers that predict tokens after the next"
KEYLESS = "keys and values of layers that use those of a layer before"


def in_file(names: Collection[str], config: Mapping[str, Any], blocks: int) -> dict[str, list[str]]:
    """Reason -> those of ``names``. ``blocks``: how many the file says that it has."""
    found = [(name, *parted(name)) for name in names]
    return _by_reason(found, config, blocks, tuple(f"{leaf}." for leaf in OF_KEYS))


def in_model(names: Collection[str], config: Mapping[str, Any], more: Any) -> dict[str, list[str]]:
    """The same of a model. ``more``: how many layers predict tokens after the next, in its config.json."""
    blocks = config["num_hidden_layers"] + (more if type(more) is int else 0)
    found = [(name, int(its[1]), its[2]) for name in names if (its := ONE_BLOCK.fullmatch(name))]
    left = _by_reason(found, config, blocks, tuple(f"{path}." for path in OF_KEYS.values()))
    left[PREDICTING] += [name for name in names if name.startswith(BESIDE)]
    return left


def notes(found: Mapping[str, list[str]]) -> Iterator[str]:
    return (f"left out: {reason}: {shortened(names, 2)}" for reason, names in found.items() if names)


def _by_reason(
    found: Sequence[tuple[str, int | None, str]], config: Mapping[str, Any], blocks: int, of_keys: tuple[str, ...]
) -> dict[str, list[str]]:
    after, without = range(config["num_hidden_layers"], blocks), keyless(config)
    return {
        PREDICTING: [name for name, block, _ in found if block in after],
        KEYLESS: [name for name, block, rest in found if block in without and rest.startswith(of_keys)],
    }
