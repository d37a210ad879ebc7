"""Interpretation of the quantization_config of compressed-tensors for each module."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bitport.errors import CheckpointError
from bitport.interop.compressed_tensors import Reader
from bitport.schemes import preset

from .compressed_tensors_files import (
    CHANNEL,
    FP8,
    GROUP128,
    MX32,
    MXFP4,
    NVFP4,
    TOKEN8,
    Layer,
    config,
    floats,
    ints,
    nvfp4_layer,
    single,
)
from .files import assert_numbers, held, read

SAID: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    ("pack-quantized", ints(4, **GROUP128), None, "int4-sym"),
    ("pack-quantized", ints(4, False, **GROUP128), None, "int4"),
    ("pack-quantized", ints(4, group_size=32), None, "int4-g32-sym"),
    ("pack-quantized", ints(8, **CHANNEL), None, "int8"),
    ("pack-quantized", ints(8, group_size=-1), None, "int8"),
    ("pack-quantized", ints(3, False, **CHANNEL), None, "int3-channel"),
    ("int-quantized", ints(8, **CHANNEL), TOKEN8, "int8-dyn"),
    ("int-quantized", ints(4, **GROUP128), TOKEN8, "int4-int8"),
    ("pack-quantized", ints(4, **GROUP128), TOKEN8, "int4-int8"),
    ("pack-quantized", ints(4, **GROUP128), FP8 | {"strategy": "token", "dynamic": True}, "int4-fp8"),
    ("int-quantized", ints(8, **CHANNEL), TOKEN8 | {"strategy": "tensor", "dynamic": False}, "int8-static"),
    ("float-quantized", floats(8, strategy="tensor"), FP8 | {"strategy": "tensor", "dynamic": True}, "fp8"),
    ("float-quantized", floats(8), FP8 | {"dynamic": True}, "fp8"),
    ("float-quantized", floats(8, **CHANNEL), FP8 | {"strategy": "token", "dynamic": True}, "fp8-row"),
    (
        "float-quantized",
        floats(8, strategy="block", block_structure=[128, 128]),
        FP8 | GROUP128 | {"dynamic": True},
        "fp8-block",
    ),
    ("float-quantized", floats(8, strategy="block", block_structure="128x128"), None, "fp8-block-wo"),
    ("naive-quantized", floats(8, **CHANNEL), None, "fp8-wo"),
    ("mxfp4-pack-quantized", MXFP4, None, "mxfp4-wo"),
    ("mxfp4-pack-quantized", MXFP4, MX32 | {"type": "float", "num_bits": 4}, "mxfp4"),
    ("mxfp6-pack-quantized", MXFP4 | {"num_bits": 6}, MX32 | {"type": "float", "num_bits": 8}, "mxfp6"),
    ("mxfp8-quantized", MXFP4 | {"num_bits": 8}, MX32 | {"type": "float", "num_bits": 8}, "mxfp8"),
    ("nvfp4-pack-quantized", NVFP4, None, "nvfp4-wo"),
    ("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}, "nvfp4-static"),
]


@pytest.mark.parametrize(
    ("stored", "weights", "inputs", "name"), SAID, ids=lambda said: said if isinstance(said, str) else ""
)
def test_groups_are_presets_where_there_is_one(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None, name: str
) -> None:
    scheme = Reader(config(stored, weights, inputs), torch.bfloat16).groups.of("m").scheme
    assert scheme.name == name
    assert scheme == preset(name)


def test_groups_without_a_name() -> None:
    inputs = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": "minmax"}
    static = Reader(config("float-quantized", floats(8), inputs), torch.bfloat16).groups.of("m").scheme
    assert static == dataclasses.replace(preset("fp8"), static=True)
    asymmetric = Reader(config("int-quantized", ints(8, **CHANNEL), TOKEN8 | {"symmetric": False}), torch.bfloat16)
    assert asymmetric.groups.of("m").scheme == dataclasses.replace(preset("int8"), act="int8-asym")


def test_a_static_scale_of_inputs() -> None:
    layer = Layer(4, 32, 8, (1, 0), True)
    inputs = TOKEN8 | {"strategy": "tensor", "dynamic": False}
    tensors = layer.in_bytes() | {"m.input_scale": torch.tensor([0.25], dtype=torch.bfloat16)}
    q = single(
        config("int-quantized", layer.said(), inputs),
        tensors | {"m.input_zero_point": torch.zeros(1, dtype=torch.int8)},
    )
    assert q.scheme.static
    assert q.act_scale is not None
    assert q.act_scale.dtype == torch.float32
    assert q.act_scale.item() == 0.25
    with pytest.raises(CheckpointError, match="input_zero_point must be 0"):
        single(
            config("int-quantized", layer.said(), inputs),
            tensors | {"m.input_zero_point": torch.ones(1, dtype=torch.int8)},
        )
    with pytest.raises(CheckpointError, match=r"lacks m\.input_scale"):
        single(config("int-quantized", layer.said(), inputs), layer.in_bytes())


def test_zero_points_of_a_symmetric_weight_may_only_be_zero() -> None:
    layer = Layer(4, 32, 8, (1, 0), True)
    zeros = torch.zeros(4, 1, dtype=torch.int8)
    q = single(config("int-quantized", layer.said()), layer.in_bytes() | {"m.weight_zero_point": zeros})
    assert_numbers(q, layer.value)
    with pytest.raises(CheckpointError, match="symmetric"):
        single(config("int-quantized", layer.said()), layer.in_bytes() | {"m.weight_zero_point": zeros + 1})


def test_whom_a_group_is_for() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": ints(bits, **CHANNEL)}

    said = config("pack-quantized", {})
    said["config_groups"] = {
        "a": group(2, "Linear"),
        "b": group(3, r"re:.*q_proj$", "layers.1.up"),
        "c": group(4, r"re:.*1\.q_proj", "layers.1.q_proj"),
        "d": group(5, "Embedding"),
        "e": group(6, "layers.1.q_proj"),
        "f": {"targets": ["re:.*plain"], "weights": None, "input_activations": None},
    }
    said["ignore"] = ["lm_head", "re:.*gate$"]
    groups = Reader(said, torch.bfloat16).groups
    bits = {
        "layers.0.down": 2,
        "layers.0.q_proj": 3,
        "layers.1.up": 3,
        "layers.2.layers.1.q_proj": 4,  # the first by name of two patterns
        "layers.1.q_proj": 6,  # the last of two groups with the same target
        "model.embed_tokens": 5,
    }
    assert {module: groups.of(module).scheme.weight.number.bits for module in bits} == bits
    for module in ("lm_head", "layers.0.mlp.gate"):
        with pytest.raises(
            CheckpointError, match=f"{module} has quantized tensors, and quantization_config ignores it"
        ):
            groups.of(module)
    with pytest.raises(CheckpointError, match="no group"):
        groups.of("layers.0.plain")


def test_groups_of_several_formats() -> None:
    layer = Layer(4, 32, 8, (1, 0), True)
    said = config("mixed-precision", {}, ignore=None)
    said["config_groups"] = {
        "a": {"targets": ["m"], "weights": layer.said(), "format": "pack-quantized"},
        "b": {"targets": ["Linear"], "weights": layer.said(), "format": "int-quantized"},
    }
    other = {name.replace("m.", "n.", 1): tensor for name, tensor in layer.in_bytes().items()}
    found = read(Reader(said, torch.bfloat16), {**layer.packed(), "norm.weight": torch.ones(3), **other})
    assert list(found) == ["m.weight", "n.weight"]
    for q in found.values():
        assert_numbers(q, layer.value)


def test_what_is_left_out_is_said() -> None:
    tensors, _ = nvfp4_layer(2.0)
    cache = ["a.self_attn.k_scale", "a.self_attn.v_scale", "a.self_attn.q_scale", "a.k_proj.output_scale"]
    tensors |= {name: torch.ones(1) for name in (*cache, "m.input_global_scale")}
    said = config("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"})
    reader = Reader(said | {"kv_cache_scheme": FP8}, torch.bfloat16)
    assert set(reader.dropped(held(tensors))) == set(cache)
    assert len(reader.notes) == 2
    assert read(reader, tensors).keys() == {"m.weight"}
    assert Reader(said, torch.bfloat16).dropped(held(tensors)) == {}
