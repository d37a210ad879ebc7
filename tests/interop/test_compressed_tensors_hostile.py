"""Damaged and hostile files always end in one of bitport's own errors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop.compressed_tensors import Reader

from .compressed_tensors_files import (
    CHANNEL,
    FP8,
    GROUP128,
    NVFP4,
    TOKEN8,
    Layer,
    config,
    floats,
    ints,
    nvfp4_layer,
    plain,
    single,
    written,
)
from .files import held, read

ACT_ORDER = torch.arange(63, -1, -1, dtype=torch.int32) // 32


def files() -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    layer = Layer(8, 64, 3, (1, 32), False)
    said = config("pack-quantized", layer.said(actorder="group"), version="0.17.0", kv_cache_scheme=FP8)
    yield "packed", said, layer.packed() | {"m.weight_g_idx": ACT_ORDER, "m.k_scale": torch.ones(1)}
    layer = Layer(9, 64, 8, (4, 16), False)
    static = TOKEN8 | {"strategy": "tensor", "dynamic": False}
    tensors = layer.in_bytes() | {"m.input_scale": torch.ones(1), "m.input_zero_point": torch.zeros(1)}
    yield "bytes", config("int-quantized", layer.said(), static), tensors
    fixed = {**nvfp4_layer(3.0)[0], "m.input_global_scale": torch.tensor([7.0])}
    yield "nvfp4", config("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}), fixed
    said, tensors = written({"m.weight": plain("mxfp6", 4, 64)}, [])
    yield "mxfp6", said, tensors


FILES = pytest.mark.parametrize(("said", "tensors"), [each[1:] for each in files()], ids=[each[0] for each in files()])


def attempt(said: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Return whether it can be read; any error that is not bitport's own fails the test."""
    try:
        reader = Reader(said, torch.bfloat16)
        reader.dropped(held(tensors))
        for q in read(reader, tensors).values():
            q.dequantize()
    except BitportError:
        return False
    return True


DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda part: torch.cat([part, part]),
    "shorter": lambda part: part[:-1],
    "empty": lambda part: part[:0],
    "one number": lambda part: part.reshape(-1)[0],
    "flat": lambda part: torch.cat([part.reshape(-1), part.reshape(-1)]),
    "batched": lambda part: part[None],
    "int16": lambda part: part.to(torch.float32).to(torch.int16),
    "float64": lambda part: part.to(torch.float64),
    "complex": lambda part: part.to(torch.float32).to(torch.complex64),
    "bool": lambda part: part.to(torch.float32).to(torch.bool),
}


@FILES
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_damaged_tensors(said: dict[str, Any], tensors: dict[str, Tensor], how: str) -> None:
    assert attempt(said, tensors)
    for name, part in tensors.items():
        same = part.numel() == 1 and how in ("one number", "batched")
        accepted = attempt(said, tensors | {name: DAMAGE[how](part)})
        assert same or accepted == (name in ("m.k_scale", "m.input_zero_point")), name


@FILES
def test_missing_tensors(said: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        rest = {other: part for other, part in tensors.items() if other != name}
        assert attempt(said, rest) == (name in ("m.k_scale", "m.input_zero_point")), name


@pytest.mark.parametrize("shape", [[8], [8, -64], [-8, 64], [8, 0], [8, 65], [9, 64], [8, 2**62], [8, 64, 1]])
def test_hostile_shapes(shape: list[int]) -> None:
    layer = Layer(8, 64, 4, (1, 32), True)
    with pytest.raises(CheckpointError):
        single(config("pack-quantized", layer.said()), layer.packed() | {"m.weight_shape": torch.tensor(shape)})


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan"), 1e-45])
def test_hostile_global_scales(divisor: float) -> None:
    tensors = nvfp4_layer(1.0)[0] | {"m.weight_global_scale": torch.tensor([divisor])}
    with pytest.raises(CheckpointError, match="weight_global_scale"):
        single(config("nvfp4-pack-quantized", NVFP4), tensors)


def test_integers_that_their_bits_do_not_hold() -> None:
    layer = Layer(4, 32, 4, (1, 0), True)
    tensors = layer.in_bytes()
    tensors["m.weight"][0, 0] = 8
    with pytest.raises(CheckpointError, match=r"m\.weight must be integers of 4 bits"):
        single(config("int-quantized", layer.said()), tensors)


def test_weights_that_were_not_compressed() -> None:
    layer = Layer(4, 32, 8, (1, 0), True)
    with pytest.raises(CheckpointError, match=r"m\.weight must be torch\.int8 \[any, any\], not torch\.float32"):
        single(config("int-quantized", layer.said()), layer.in_bytes() | {"m.weight": torch.ones(4, 32)})


JUNK: tuple[Any, ...] = (
    None,
    0,
    1,
    -1,
    3,
    True,
    1.5,
    "x",
    "re:(",
    [],
    [1],
    ["re:("],
    {},
    {"a": 1},
    10**40,
    "9" * 40,
    [[]],
)


def paths(said: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(said, dict):
        for key, inner in said.items():
            yield (*at, key)
            yield from paths(inner, (*at, key))


@FILES
def test_hostile_settings(said: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for path, junk in itertools.product(paths(said), JUNK):
        changed = copy.deepcopy(said)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = junk
        attempt(changed, tensors)
        inner["unknown"] = junk
        attempt(changed, tensors)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not understood"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config is not understood"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"format": "dense"}, "has the format 'dense'"),
        ({"format": "float-quantized"}, "read from pack-quantized"),
        ({"format": None}, "mixed-precision"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be a group with all its settings"),
        ({"ignore": [1]}, "ignore must be a list of strings"),
        ({"ignore": ["re:("]}, "no regular expression"),
        ({"ignore": ["re:a{99999999999}"]}, "no regular expression"),
    ],
)
def test_settings_that_are_not_followed(change: dict[str, Any], said: str) -> None:
    Reader(config("pack-quantized", ints(4, **GROUP128)), torch.bfloat16)
    with pytest.raises(CheckpointError, match=said):
        Reader(config("pack-quantized", ints(4, **GROUP128)) | change, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"output_activations": TOKEN8}, "output_activations"),
        ({"weights": None, "input_activations": TOKEN8}, "input_activations without weights"),
        (
            {"input_activations": TOKEN8 | {"symmetric": False, "strategy": "tensor", "dynamic": False}},
            "inputs of group_0",
        ),
        ({"input_activations": TOKEN8 | {"num_bits": 4}}, "inputs of group_0"),
        ({"input_activations": TOKEN8 | {"dynamic": False}}, "dynamic=False"),
        ({"input_activations": TOKEN8 | {"strategy": "channel"}}, "strategy='channel'"),
        ({"input_activations": NVFP4 | {"dynamic": True}}, "dynamic=True"),
        ({"input_activations": FP8 | {"strategy": "group", "group_size": 64, "dynamic": True}}, "group_size=64"),
        ({"weights": ints(9, **CHANNEL)}, "of 9 bits"),
        ({"weights": floats(5, **CHANNEL)}, "of 5 bits"),
        ({"weights": ints(4, strategy="group")}, "strategy='group' with group_size=None"),
        ({"weights": ints(4, strategy="attn_head")}, "attn_head"),
        ({"weights": ints(4, strategy="block", block_structure=[128])}, "block_structure"),
        ({"weights": ints(4, **GROUP128, dynamic_range=2)}, "dynamic_range is not understood"),
        ({"weights": {**ints(4, **GROUP128), "dynamic": True}}, "dynamic=false"),
        ({"weights": floats(8, symmetric_=True)}, "symmetric_ is not understood"),
        ({"weights": {**floats(8), "symmetric": False}}, "zero point"),
        ({"what": 1}, "what is not understood"),
    ],
)
def test_groups_that_are_not_followed(change: dict[str, Any], said: str) -> None:
    changed = config("pack-quantized", ints(4, **GROUP128))
    changed["config_groups"]["group_0"] |= change
    with pytest.raises(CheckpointError, match=said):
        Reader(changed, torch.bfloat16)
