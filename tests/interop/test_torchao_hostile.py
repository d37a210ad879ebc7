"""torchao files that are inconsistent, or that bitport does not support."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import torchao

from .files import read, words
from .torchao_files import File, dtype, file, float8_inputs, int8_inputs, integers, plain, reader, tiles


def test_other_classes_are_named() -> None:
    tensors, said = plain()[0]
    with pytest.raises(CheckpointError, match=r"m\.weight is a Int4PreshuffledTensor of torchao; Int4Tensor"):
        read(reader({**said, "_type": "Int4PreshuffledTensor"}), tensors)


def changed() -> list[tuple[File, str, Any]]:
    four, eight = plain()[0], integers("Int8Tensor", 8, (1, 64), False)[0]
    intx = integers("IntxUnpackedToInt8Tensor", 4, (1, 32), True, target_dtype=dtype("int4"))[0]
    mx = file("MXTensor", {"qdata": torch.zeros(2, 32).to(torch.float8_e4m3fn), "scale": torch.zeros(2, 1)})
    return [
        *((four, "shape", value) for value in (None, [], [8], [8, 64, 1], [8, -64], [8, 2**40], "8x64", [8, 66])),
        *((four, "block_size", value) for value in (None, [32], [2, 32], [1, 0], [1, 10**30], [1, 65], "g32")),
        (tiles()[0], "shape", [2**31 - 1, 2**31 - 1]),
        (four, "activation_dtype", dtype("int8")),
        (four, "activation_dtype", {"a": 1}),
        (four, "rotated", True),
        *((eight, "block_size", value) for value in ([8], [1, 65], [0, 64], [1, True], {"a": 1}, [[1], [64]])),
        (eight, "act_quant_kwargs", int8_inputs("PerGroup")),
        (eight, "act_quant_kwargs", int8_inputs("PerTensor", "ASYMMETRIC")),
        (eight, "act_quant_kwargs", int8_inputs(mapping="ROUND")),
        (eight, "act_quant_kwargs", int8_inputs(mapping=[])),
        (eight, "act_quant_kwargs", int8_inputs(granularity=3)),
        (eight, "act_quant_kwargs", float8_inputs(hp_value_ub=1.0)),
        (eight, "act_quant_kwargs", float8_inputs(float8_dtype=dtype("float8_e5m2"))),
        (eight, "act_quant_kwargs", {"_type": "Other", "_data": {}}),
        (eight, "act_quant_kwargs", 7),
        (eight, "act_quant_kwargs", {"_type": ["a"], "_data": {}}),
        *((intx, "target_dtype", value) for value in (None, dtype("int9"), dtype("int3"), ["int4"])),
        (intx, "activation_quantization", "int4_per_token"),
        (mx, "elem_dtype", "fp6_e2m3"),
        (mx, "elem_dtype", []),
        (mx, "block_size", 16),
    ]


@pytest.mark.parametrize(("made", "key", "value"), changed())
def test_attributes_that_are_not_understood_are_errors(made: File, key: str, value: Any) -> None:
    tensors, said = made
    with pytest.raises(CheckpointError, match=r"m\."):
        read(reader({**said, "_data": {**said["_data"], key: value}}), tensors)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "7",
        "null",
        '{"_type": "Int4Tensor"}',
        '{"_type": "Int4Tensor", "_data": {}}',
        '{"_type": "Int4Tensor", "_data": 3, "_tensor_data_names": []}',
        '{"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": ["qdata", 3]}',
        '{"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": []}',
        '{"_type": ["Int4Tensor"], "_data": {}, "_tensor_data_names": []}',
        '{"_type": "Tensor"}',
        '{"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale", "zero_point", "codebook"]}',
        '{"_type": "Int4Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale", "zero_point", "act_pre_scale"]}',
    ],
)
def test_headers_that_make_no_sense_are_errors(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"m\._?weight"):
        read(reader(text), plain()[0][0])


def test_no_header_at_all() -> None:
    with pytest.raises(CheckpointError, match="newer torchao"):
        torchao.Reader({}, torch.float32).weights({})


def damaged() -> list[tuple[File, str, Tensor | None]]:
    four, eight, of_tiles = plain()[0], integers("Int8Tensor", 8, (1, 32), True)[0], tiles()[0]
    in_words = file(
        "Int4PlainInt32Tensor",
        {"qdata": words(np.zeros((8, 64), int), 4), "scale": torch.ones(2, 8), "zero_point": torch.zeros(2, 8)},
        block_size=[1, 32],
        shape=[8, 64],
    )
    fp4 = file("NVFP4Tensor", {"qdata": np.zeros((2, 16), np.uint8), "scale": torch.ones(2, 2)}, block_size=16)
    more = {"is_swizzled_scales": True}
    tiled = fp4[0], {**fp4[1], "_data": {**fp4[1]["_data"], **more}}
    return [
        (four, "qdata", torch.zeros(8, 31, dtype=torch.int8)),
        (four, "qdata", torch.zeros(8, 32, dtype=torch.int32)),
        (four, "qdata", torch.zeros(2, 8, 32, dtype=torch.int8)),
        (four, "qdata", None),
        (four, "scale", torch.zeros(8, 2)),
        (four, "scale", torch.zeros(2, 8, dtype=torch.int8)),
        (four, "zero_point", torch.zeros(2)),
        (four, "zero_point", None),
        (eight, "qdata", torch.zeros(0, 64, dtype=torch.int8)),
        (eight, "qdata", torch.zeros(64, dtype=torch.int8)),
        (eight, "qdata", torch.zeros(8, 64, dtype=torch.uint8)),
        (eight, "scale", torch.zeros(8, 3)),
        (eight, "scale", torch.zeros(8, 2, dtype=torch.float64)),
        (eight, "zero_point", torch.full((8, 2), 0.5)),
        (eight, "zero_point", torch.full((8, 2), torch.nan)),
        (eight, "zero_point", torch.full((8, 2), -300.0)),
        (of_tiles, "qdata", torch.zeros(2, 8, 64, 4, dtype=torch.int32)),
        (of_tiles, "scale_and_zero", torch.zeros(16, 12, 2, dtype=torch.bfloat16)),
        (in_words, "zero_point", torch.zeros(2, 8)),
        (fp4, "scale", torch.ones(2, 2)),
        (fp4, "scale", torch.ones(2, 3).to(torch.float8_e4m3fn)),
        (fp4, "qdata", torch.zeros(2, 16, dtype=torch.int8)),
        (tiled, "scale", torch.ones(32, 8).to(torch.float8_e4m3fn)),
        (tiled, "scale", torch.ones(32, 16)),
    ]


@pytest.mark.parametrize(("made", "role", "tensor"), damaged())
def test_damaged_tensors_are_errors(made: File, role: str, tensor: Tensor | None) -> None:
    tensors = {name: part for name, part in made[0].items() if name != f"m._weight_{role}"}
    if tensor is not None:
        tensors[f"m._weight_{role}"] = tensor
    with pytest.raises(BitportError):
        read(reader(made[1]), tensors)
