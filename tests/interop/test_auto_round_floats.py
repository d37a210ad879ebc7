"""AutoRound's own files of float layers, against numbers of ml_dtypes in float64."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import auto_round
from bitport.tensor import QTensor

from .files import E2M1, assert_numbers, held, read

N, K = 12, 64
Layer = tuple[dict[str, Tensor], np.ndarray]
ROUNDED = {"act_sym": True, "act_dynamic": True}
MX4 = {"bits": 4, "group_size": 32, "data_type": "mx_fp", "act_bits": 4, "act_data_type": "mx_fp", **ROUNDED}
MX8 = {**MX4, "bits": 8, "act_bits": 8}
NV4 = {**MX4, "group_size": 16, "data_type": "nv_fp", "act_data_type": "nv_fp4_with_static_gs"}
FP8 = {"bits": 8, "data_type": "fp", "act_bits": 8, "act_data_type": "fp", "fmt": "e4m3"}
STATIC = {**FP8, "group_size": -1, "activation_scheme": "static", "packing_format": "auto_round:fp8_static"}
BLOCKS = {
    **{**FP8, "group_size": [128, 128], "activation_scheme": "dynamic", "packing_format": "auto_round:fp8"},
    "weight_block_size": [128, 128],
}


def fours(seed: int) -> tuple[Tensor, np.ndarray]:
    codes = np.random.default_rng(seed).integers(0, 16, (N, K)).astype(np.uint8)
    return torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4), E2M1[codes]


def eights(seed: int) -> tuple[Tensor, np.ndarray]:
    codes = np.random.default_rng(seed).integers(0, 127, (N, K)).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def mx(bits: int, seed: int = 0) -> Layer:
    data, value = (fours if bits == 4 else eights)(seed)
    exponents = np.random.default_rng(seed + 1).integers(110, 120, (N, K // 32)).astype(np.uint8)
    scale = np.ldexp(1.0, exponents.astype(np.int64) - 127).repeat(32, 1)
    return {
        "weight_packed" if bits == 4 else "weight": data,
        "weight_scale": torch.from_numpy(exponents),
    }, value * scale


def nv(seed: int = 0) -> Layer:
    data, value = fours(seed)
    scales = np.random.default_rng(seed + 1).integers(0x38, 0x7F, (N, K // 16)).astype(np.uint8)
    factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, 1)
    tensors = {"weight_packed": data, "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn)}
    ends = {"weight_global_scale": torch.tensor([1024.0]), "input_global_scale": torch.tensor([4.0])}
    return tensors | ends, value * factor / 1024


def rows(seed: int = 0) -> Layer:
    data, value = eights(seed)
    scale = torch.from_numpy(np.random.default_rng(seed + 1).uniform(0.01, 0.02, N).astype(np.float32)).bfloat16()
    return {"weight": data, "weight_scale": scale, "input_scale": torch.ones(1).bfloat16()}, value * scale.double()[
        :, None
    ].numpy()


def blocks(seed: int = 0) -> Layer:
    data, value = eights(seed)
    return {"weight": data, "weight_scale_inv": torch.full((1, 1), 0.25).bfloat16()}, value / 4


def all_of(said: dict[str, Any], **layers: Layer) -> dict[str, QTensor]:
    tensors = {f"{module}.{role}": each for module, (stored, _) in layers.items() for role, each in stored.items()}
    made = auto_round.Reader({"quant_method": "auto-round", "sym": True, **said}, torch.bfloat16)
    return read(made, {**tensors, "norm.weight": torch.ones(K)})


def only(said: dict[str, Any], layer: Layer) -> QTensor:
    q = all_of(said, m=layer)["m.weight"]
    assert_numbers(q, layer[1])
    return q


@pytest.mark.parametrize(
    ("said", "layer", "scheme"),
    [
        (MX4, mx(4), "mxfp4"),
        ({**MX4, "act_data_type": "mx_fp_rceil"}, mx(4), "mxfp4"),
        ({**MX4, "act_bits": 16}, mx(4), "mxfp4-wo"),
        (MX8, mx(8), "mxfp8"),
        (NV4, nv(), "nvfp4-static"),
        ({**STATIC, "act_dynamic": False}, rows(), "fp8-channel-static"),
        (BLOCKS, blocks(), "fp8-block"),
        ({**BLOCKS, "weight_block_size": None, "act_dynamic": True}, blocks(), "fp8-block"),
        ({**FP8, "group_size": 0, "act_bits": 16, "activation_scheme": "dynamic"}, rows(), "fp8-wo"),
    ],
)
def test_values_are_those_of_the_definition(said: dict[str, Any], layer: Layer, scheme: str) -> None:
    if scheme == "fp8-wo":
        layer[0].pop("input_scale", None)
    assert str(only(said, layer).scheme) == scheme


def test_layers_with_other_bits() -> None:
    own = {"a.m": {"bits": 8, "act_bits": 8}, r".*\.q": NV4, "b.m": {"act_bits": 16}, "lm_head": {"bits": 16}}
    layers = {"a.m": mx(8, 1), "aa.m": mx(4, 2), "x.q": nv(3), "b.m": mx(4, 4)}
    found = all_of({**MX4, "extra_config": own}, **layers)
    assert {name: str(q.scheme) for name, q in found.items()} == {
        **{"a.m.weight": "mxfp8", "aa.m.weight": "mxfp4"},
        **{"x.q.weight": "nvfp4-static", "b.m.weight": "mxfp4-wo"},
    }
    for name, (_, value) in layers.items():
        found_value = found[f"{name}.weight"].dequantize(torch.float32).numpy()
        np.testing.assert_array_equal(found_value, value.astype(np.float32))


def test_notes_and_scales_of_the_cache() -> None:
    made = auto_round.Reader({**NV4, "quant_method": "auto-round"}, torch.bfloat16)
    assert made.notes == ["the global scales of nvfp4 are kept as their reciprocals, rounded to float32"]
    made = auto_round.Reader({**STATIC, "quant_method": "auto-round"}, torch.bfloat16)
    assert [*made.dropped(held({"l.self_attn.k_scale": torch.ones(1)}))] == ["l.self_attn.k_scale"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({**MX4, "bits": 6, "act_bits": 6}, "'mx_fp' of 6 bits"),
        ({**MX4, "data_type": "nvfp4_v2"}, "data_type 'nvfp4_v2', and rounded inputs: int without"),
        ({**MX4, "data_type": "mx_int", "act_bits": 16}, "data_type 'mx_int': int without"),
        ({**MX4, "group_size": 16}, "groups of 16; those of 32"),
        ({**MX4, "act_bits": 8}, "inputs in 'mx_fp' of 8"),
        ({**MX4, "act_data_type": "int"}, "inputs in 'int' of 4"),
        ({**MX4, "act_dynamic": False}, "with act_dynamic"),
        ({**NV4, "act_data_type": "nv_fp4"}, "inputs in 'nv_fp4' of 4"),
        ({**MX4, "extra_config": {"m": {"data_type": "int"}}}, "extra_config '^m$': data_type 'int' of 4 bits"),
        ({**MX4, "extra_config": {"m": {"rotated": 1}}}, "rotated is not understood"),
        ({**MX4, "extra_config": {"m(": {"bits": 8, "act_bits": 8}}}, "is no regular expression"),
        ({**MX4, "rotation_config": {"block_size": 32}}, "inputs of layers are rotated"),
        ({**FP8, "bits": 4}, "data_type 'fp' of 4 bits"),
        ({**FP8, "extra_config": {"m": {"bits": 8, "group_size": 32}}}, "float8 with other settings for ^m$"),
        ({**FP8, "activation_scheme": "other"}, "activation_scheme 'other'"),
        ({**FP8, "act_bits": 4}, "inputs in 'fp' of 4; fp of 8 are read"),
        ({**FP8, "act_data_type": "int"}, "inputs in 'int' of 8"),
        ({**STATIC, "act_dynamic": True}, "with act_dynamic False"),
        ({**BLOCKS, "act_dynamic": False}, "with act_dynamic True"),
        ({**BLOCKS, "group_size": [64, 64]}, "weight_block_size [128, 128], group_size [64, 64]: these mean the same"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(said: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        auto_round.Reader({"quant_method": "auto-round", **said}, torch.bfloat16)
