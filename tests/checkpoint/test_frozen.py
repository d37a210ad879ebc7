"""Files that earlier versions wrote: they are read to the same numbers for ever, and written again alike."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.checkpoint import manifest, parse
from bitport.schemes import Plan, Recipe, Scheme, recipe, scheme
from bitport.tensor import QTensor, qtensor

from .frozen import decoder
from .frozen.models import MODELS
from .frozen.recipes import PLAN, RECIPE, SCHEME
from .models import raw

FROZEN = Path(__file__).parent / "frozen"
VERSIONS = sorted(path.name for path in FROZEN.glob("version_*"))
CHECKPOINTS = [(version, name) for version in VERSIONS for name in MODELS if (FROZEN / version / name).is_dir()]
STATES = [(version, name) for version in VERSIONS for name in MODELS if (FROZEN / version / f"{name}.pt").is_file()]
NOW = FROZEN / f"version_{manifest.VERSION}"


def loaded(directory: Path) -> nn.Module:
    return bp.load(lambda: MODELS[directory.name](False), directory, verify=True, progress=False)


def named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_is(directory: Path, tensors: Mapping[str, Tensor], *, derived: bool) -> None:
    """Compare with what the decoder reads. ``derived``: whether the buffers that no state_dict has are there too."""
    quantized = 0
    for name, entry, its_scheme, data in decoder.parts(directory):
        if entry.get("buffer") == "derived" and not derived:
            continue
        tensor = tensors[name].detach()
        assert str(tensor.dtype) == f"torch.{entry['dtype']}", name
        assert list(tensor.shape) == entry["shape"], name
        if not its_scheme:
            assert raw(tensor) == data[""], name
            continue
        assert isinstance(tensor, QTensor), name
        assert {**tensor.scheme.to_dict(), "version": its_scheme["version"]} == its_scheme, name
        right = decoder.value(entry, its_scheme, data)
        np.testing.assert_array_equal(tensor.dequantize(torch.float32).numpy(), right, err_msg=name, strict=True)
        quantized += 1
    assert quantized >= 10


def test_the_files_are_there() -> None:
    assert NOW.name in VERSIONS, "a new version of the manifest: python -m tests.checkpoint.frozen.make"
    assert {name for _, name in CHECKPOINTS} == set(MODELS)
    assert STATES


@pytest.mark.parametrize(("version", "name"), CHECKPOINTS)
def test_a_checkpoint_is_read_to_the_same_numbers(version: str, name: str) -> None:
    model = loaded(FROZEN / version / name)
    assert_is(FROZEN / version / name, named(model), derived=True)
    if name == "places":
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(("version", "name"), STATES)
def test_a_state_dict_is_read_to_the_same_numbers(version: str, name: str) -> None:
    state = torch.load(FROZEN / version / f"{name}.pt", weights_only=True)
    model = MODELS[name](False)
    model.load_state_dict(state, assign=True)
    assert_is(FROZEN / version / name, named(model), derived=False)


def described(directory: Path) -> tuple[Any, list[list[bytes]]]:
    """The manifest, its keys in order, without what differs from save to save, and the data."""
    content = json.loads((directory / "bitport.json").read_text())
    names = {name: f"shard {at}" for at, name in enumerate(content["shards"])}
    kept = {key: None if key in ("bitport", "crc32") else value for key, value in content.items()}
    kept["shards"] = list(content["shards"].values())
    kept["tensors"] = [(name, {**e, "shard": names[e["shard"]]}) for name, e in content["tensors"].items()]
    return list(kept.items()), [list(data.values()) for *_, data in decoder.parts(directory)]


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_written_as_before(name: str, tmp_path: Path) -> None:
    bp.save(loaded(NOW / name), tmp_path / name, progress=False)
    assert described(tmp_path / name) == described(NOW / name)


@pytest.mark.parametrize("name", [name for version, name in STATES if version == NOW.name])
def test_a_state_dict_is_written_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files hold the arguments of a function of bitport, by its name."""
    now = io.BytesIO()
    torch.save(torch.load(NOW / f"{name}.pt", weights_only=True), now)
    now.seek(0)
    monkeypatch.setattr(qtensor, "rebuild", lambda *given: given)
    before, after = (torch.load(file, weights_only=False) for file in (NOW / f"{name}.pt", now))
    assert list(before) == list(after)
    several = [key for key, held in before.items() if isinstance(held, tuple)]
    assert len(several) >= 10
    for key in several:
        (tensors, *told), (tensors_now, *told_now) = before[key], after[key]
        assert told == told_now, key
        assert {part: (t.dtype, t.shape, raw(t)) for part, t in tensors.items()} == {
            part: (t.dtype, t.shape, raw(t)) for part, t in tensors_now.items()
        }, key


KINDS = {"scheme": (Scheme, SCHEME), "recipe": (Recipe, RECIPE), "plan": (Plan, PLAN)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", KINDS)
def test_json_means_the_same(name: str, version: str) -> None:
    kind, right = KINDS[name]
    assert kind.from_json((FROZEN / version / f"{name}.json").read_text()) == right


@pytest.mark.parametrize("name", KINDS)
def test_json_is_written_as_before(name: str) -> None:
    assert KINDS[name][1].to_json() == (NOW / f"{name}.json").read_text().strip()


@pytest.mark.parametrize("name", MODELS)
def test_a_bitport_with_a_later_version_reads_this_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers refused every version but the one that they wrote."""
    for module in (parse, scheme, recipe):
        monkeypatch.setattr(module, "VERSION", manifest.VERSION + 1)
    assert_is(NOW / name, named(loaded(NOW / name)), derived=True)
    assert Scheme.from_json((NOW / "scheme.json").read_text()) == SCHEME
    assert Recipe.from_json((NOW / "recipe.json").read_text()) == RECIPE
