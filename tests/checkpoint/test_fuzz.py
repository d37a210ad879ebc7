"""Random damage with a fixed seed: the result is a CheckpointError, or an equal model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import bitport as bp
from bitport.checkpoint import read_manifest
from bitport.checkpoint.manifest import NAME, checksum
from bitport.errors import BitportError, CheckpointError

from .models import assert_same

ROUNDS = 400


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 64), nn.Linear(64, 4), nn.Linear(4, 2))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = build()
    bp.quantize_(model, {"0": "int8", "1": "nvfp4", "*": "skip"})
    bp.save(model, tmp_path)
    return model, tmp_path


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Flip a bit, replace a byte, remove, duplicate or move a range, or cut off the end."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        if not changed:
            break
        at, length = chance.randrange(len(changed)), chance.randrange(1, 9)
        kind = chance.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.choice(b'0123456789{}[]",:-.eE \x00\xff')
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            other = chance.randrange(len(changed))
            changed[at : at + length] = changed[other : other + length]
        else:
            del changed[max(at, 1) :]
    return bytes(changed)


def outcome(model: nn.Module, directory: Path) -> str:
    try:
        loaded = bp.load(build(), directory)
    except CheckpointError as error:
        return str(error)
    assert_same(model, loaded)
    return ""


@pytest.mark.parametrize("target", ["manifest", "header"])
def test_bytes(target: str, saved: tuple[nn.Module, Path]) -> None:
    model, directory = saved
    (shard,) = directory.glob("*.safetensors")
    path = directory / NAME if target == "manifest" else shard
    data = path.read_bytes()
    end = len(data) if target == "manifest" else 8 + int.from_bytes(data[:8], "little")
    chance, refused = random.Random(0), 0
    for _ in range(ROUNDS):
        path.write_bytes(damaged(data[:end], chance) + data[end:])
        refused += bool(outcome(model, directory))
    assert refused > 0.9 * ROUNDS


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 64, 2**31, 2**48, 2**63, 2**64, 10**100, 0.5, -0.0, 1e308),
    *("", "0", "int4", "float32", "bfloat16", "float8_e4m3fn", "complex64", "../x", "qdata", "0.weight", "\ud800"),
    *([], [0], [1, 2], [[]], [None], {}, {"": {}}, {"a": "b"}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, below in inner for place in places(below, (*path, key)))]


def changed(content: Any, chance: random.Random) -> Any:
    """Replace, remove or rename one value anywhere in the manifest."""
    copy = json.loads(json.dumps(content))
    *path, last = chance.choice([place for place in places(copy) if place])
    inside = copy
    for key in path:
        inside = inside[key]
    if chance.random() < 0.2 and isinstance(inside, dict):
        inside[chance.choice(("a", "0.weight", "1.weight", "zero", "scale2", "buffer"))] = inside.pop(last)
    elif chance.random() < 0.2:
        del inside[last]
    else:
        inside[last] = chance.choice(VALUES)
    return copy


def test_values(saved: tuple[nn.Module, Path]) -> None:
    """Wrong values with a valid checksum. What is accepted may differ (another dtype to dequantize to, another way to
    round the input), but the result is a model that computes, or refuses with one of bitport's own errors."""
    _, directory = saved
    content = json.loads((directory / NAME).read_text())
    content.pop("crc32")
    chance, accepted = random.Random(1), 0
    for _ in range(2 * ROUNDS):
        lie = changed(content, chance)
        (directory / NAME).write_text(json.dumps({**lie, "crc32": checksum(lie)}))
        try:
            read_manifest(directory)
            loaded = bp.load(build(), directory)
        except CheckpointError:
            continue
        accepted += 1
        for layer in (loaded[0], loaded[1]):
            try:
                layer.weight.dequantize()
            except BitportError:
                continue
    assert accepted < 0.3 * 2 * ROUNDS
