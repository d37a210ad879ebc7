"""AutoRound settings, which name the layout of another library that the files use."""

from __future__ import annotations

import pytest
import torch

from bitport.errors import CheckpointError
from bitport.interop import auto_round

from . import test_awq, test_gptq
from .files import assert_numbers, only, read


def config(bits: int = 4, group: int = 32, **more: object) -> dict[str, object]:
    return {"quant_method": "auto-round", "bits": bits, "group_size": group, "sym": False, "data_type": "int", **more}


def reader(said: dict[str, object]) -> auto_round.Reader:
    return auto_round.Reader(said, torch.float16)


@pytest.mark.parametrize(
    ("packing", "less"),
    [("auto_round:auto_gptq", 1), ("auto_round:gptq", 1), (None, 1), ("auto_round", 0), ("auto_round:gptqmodel", 0)],
)
def test_layers_as_gptq_has_them(packing: str | None, less: int) -> None:
    tensors, value = test_gptq.layer(32, 64, 4, 32, less=less)
    assert_numbers(only(reader(config(packing_format=packing)), tensors), value)


@pytest.mark.parametrize(
    ("backend", "bits", "less"),
    [
        ("auto", 4, 1),
        ("autoround:exllamav2", 4, 0),
        ("auto_round:exllamav2", 4, 0),
        ("auto_round:exllamav2", 3, 1),
        ("auto_round:gptq:exllamav2", 4, 1),
        ("auto_gptq:cuda", 2, 1),
        ("auto_round:gptqmodel", 4, 0),
    ],
)
def test_older_files_name_a_backend(backend: str, bits: int, less: int) -> None:
    tensors, value = test_gptq.layer(32, 64, bits, 32, less=less)
    assert_numbers(only(reader(config(bits, backend=backend)), tensors), value)


@pytest.mark.parametrize("key", ["packing_format", "backend"])
@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:awq"])
def test_layers_as_awq_has_them(packing: str, key: str) -> None:
    said: dict[str, object] = {key: packing}
    tensors, value = test_awq.layer(24, 96, 32)
    assert_numbers(only(reader(config(**said, extra_config={"lm_head": {"bits": 16}})), tensors), value)
    tensors, value = test_awq.layer(24, 96, 32, symmetric=True)
    q = only(reader(config(**said) | {"sym": True}), tensors)
    assert str(q.scheme) == "int4-g32-sym"
    assert_numbers(q, value)


@pytest.mark.parametrize("name", ["a.m", "a\\..*"], ids=["name", "pattern"])
def test_layers_with_settings_of_their_own(name: str) -> None:
    four, of_four = test_gptq.layer(32, 64, 4, 32, less=0)
    eight, of_eight = test_gptq.layer(32, 64, 8, 64, less=0)
    tensors = {f"aa.{key}": tensor for key, tensor in four.items()} | {f"a.{key}": each for key, each in eight.items()}
    own = {name: {"bits": 8, "group_size": 64, "data_type": "int", "act_bits": 16}, "lm_head": {"bits": 16}}
    said = config(packing_format="auto_round", extra_config=own)
    found = read(auto_round.Reader(said, torch.float16), tensors)
    assert_numbers(found["aa.m.weight"], of_four)
    assert_numbers(found["a.m.weight"], of_eight)


@pytest.mark.parametrize(
    "change",
    [
        {"packing_format": "auto_round:mlx"},
        {"packing_format": 3},
        {"backend": "qbits"},
        {"backend": 3},
        {"rotation_config": {"block_size": 32}},
        {"spinquant_config": {"r1": True}},
        {"data_type": "mx_int"},
        {"act_bits": 8},
        {"extra_config": []},
        {"extra_config": {"m": 4}},
        {"extra_config": {"m": {"bits": "4"}}},
        {"extra_config": {"m": {"bits": 4, "data_type": "fp"}}},
        {"extra_config": {"m": {"bits": 4, "act_bits": 8}}},
        {"extra_config": {"m(": {"bits": 4}}},
        {"extra_config": {"m{99999999999999999999}": {"bits": 4}}},
        {"extra_config": {"m": {"bits": 8}}, "packing_format": "auto_round:auto_awq"},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, object]) -> None:
    tensors, _ = test_gptq.layer(32, 64, 4, 32)
    with pytest.raises(CheckpointError):
        only(reader({**config(), **change}), tensors)
