"""Files of bitsandbytes against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import bitsandbytes
from bitport.numerics import NF4

from .files import read

NAME = "m.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SHAPES = ((1, 64), (6, 128), (16, 320))


def as_json(**said: object) -> Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def nf4(n: int, k: int, block: int = 64, nested: int | None = None) -> tuple[dict[str, Tensor], np.ndarray]:
    """(tensors of the file, the weight in float64, rounded once to float32). ``nested``: the block of statistics."""
    rng = np.random.default_rng(n + k + block)
    codes = rng.integers(0, 16, n * k)
    data = np.zeros((n * k // 2, 1), dtype=np.uint8)
    for at, code in enumerate(codes):
        data[at // 2, 0] |= int(code) << (0 if at % 2 else 4)
    tensors = {NAME: torch.from_numpy(data), f"{NAME}.quant_map": torch.tensor(NF4)}
    said: dict[str, object] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    count = n * k // block
    absmax = rng.uniform(0.01, 3, count).astype(np.float32)
    if nested:
        statistics = rng.integers(0, 256, count)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.1, 0.5, -(-count // nested)).astype(np.float32)
        offset = float(np.float32(rng.uniform(1, 2)))
        for at, code in enumerate(statistics):
            absmax[at] = np.float32(np.float32(table[code] * outer[at // nested]) + np.float32(offset))
        tensors[f"{NAME}.nested_absmax"] = torch.from_numpy(outer)
        tensors[f"{NAME}.nested_quant_map"] = torch.from_numpy(table)
        said |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
    tensors[f"{NAME}.absmax"] = torch.from_numpy(statistics.astype(np.uint8) if nested else absmax)
    tensors[STATE] = as_json(**said)
    value = [NF4[code] * float(absmax[at // block]) for at, code in enumerate(codes)]
    # The product of two float32 is exact in float64.
    return tensors, np.array(value).astype(np.float32).reshape(n, k)


@pytest.mark.parametrize("nested", [None, 4, 256], ids=["one level", "nested in 4", "nested in 256"])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nf4_values_are_those_of_the_definition(n: int, k: int, block: int, nested: int | None) -> None:
    tensors, value = nf4(n, k, block, nested)
    found = read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
    (q,) = found.values()
    assert list(found) == [NAME]
    assert (tuple(q.shape), q.dtype, q.scale.dtype) == ((n, k), torch.bfloat16, torch.float32)
    assert str(q.scheme) == ("nf4" if block == 64 else "nf4-g32")
    np.testing.assert_array_equal(q.dequantize(torch.float32).numpy(), value)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_codes_may_be_called_numbers_of_another_kind(storage: torch.dtype) -> None:
    tensors, value = nf4(6, 128)
    tensors[NAME] = tensors[NAME].flatten().view(storage).unsqueeze(1)
    (q,) = read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors).values()
    np.testing.assert_array_equal(q.dequantize(torch.float32).numpy(), value)


def int8(n: int, k: int) -> tuple[dict[str, Tensor], np.ndarray]:
    rng = np.random.default_rng(n + k)
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    rows = rng.uniform(0.01, 3, n).astype(np.float32)
    tensors = {
        NAME: torch.from_numpy(codes),
        "m.SCB": torch.from_numpy(rows),
        "m.weight_format": torch.tensor(0, dtype=torch.uint8),
        "m.bias": torch.zeros(n),
    }
    scale = (rows.astype(np.float64) / 127).astype(np.float32)
    return tensors, (codes * scale.astype(np.float64)[:, None]).astype(np.float32)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 33), (16, 128)])
def test_int8_values_are_those_of_the_definition(n: int, k: int) -> None:
    tensors, value = int8(n, k)
    reader = bitsandbytes.Reader({"quant_method": "bitsandbytes", "load_in_8bit": True}, torch.float16)
    (q,) = (found := read(reader, tensors)).values()
    assert list(found) == [NAME]
    assert (str(q.scheme), q.dtype) == ("int8", torch.float16)
    assert reader.notes == [bitsandbytes.ROUNDED_INPUTS]
    np.testing.assert_array_equal(q.dequantize(torch.float32).numpy(), value)


def test_both_formats_in_one_file() -> None:
    four, eight = nf4(6, 128), int8(5, 33)
    tensors = {f"a.{name}": tensor for name, tensor in four[0].items()}
    tensors |= {f"b.{name}": tensor for name, tensor in eight[0].items()}
    found = read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
    for name, value in (("a.m.weight", four[1]), ("b.m.weight", eight[1])):
        np.testing.assert_array_equal(found[name].dequantize(torch.float32).numpy(), value)


SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [6, 128]}
NESTED = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 1.5}


def states() -> list[Tensor]:
    """Of a nested weight, each with something wrong."""
    changes: list[dict[str, object]] = [
        {"quant_type": "fp4"},
        {"quant_type": 4},
        {"blocksize": 63},
        {"blocksize": 0},
        {"blocksize": 64.0},
        {"blocksize": True},
        {"blocksize": 10**30},
        {"shape": None},
        {"shape": [768]},
        {"shape": [1, 6, 128]},
        {"shape": [6.0, 128]},
        {"shape": [-6, -128]},
        {"shape": [0, 128]},
        {"shape": [10**30, 64]},
        {"nested_blocksize": 0},
        {"nested_blocksize": 2},
        {"nested_blocksize": 10**12},
        {"nested_blocksize": "4"},
        {"nested_dtype": "float16"},
        {"nested_offset": "1"},
        {"nested_offset": 10**400},
        {"nested_offset": None},
    ]
    texts = [json.dumps({**SAID, **NESTED, **change}).encode() for change in changes]
    texts += [b"", b"{", b"[]", b"\xff\xfe\x00", b"3", b"[" * 9999, b"1" * 9999, b" " * (1 << 17)]
    tensors = [torch.tensor(list(text), dtype=torch.uint8) for text in texts]
    return [*tensors, as_json(**SAID), tensors[0].float(), tensors[0].unsqueeze(0), torch.tensor(1, dtype=torch.uint8)]


@pytest.mark.parametrize(
    "state", states(), ids=lambda state: bytes(state.flatten().byte().tolist())[:200].decode("latin1")
)
def test_a_damaged_state_is_an_error(state: Tensor) -> None:
    tensors, _ = nf4(6, 128, nested=4)
    tensors[STATE] = state
    with pytest.raises(BitportError, match=r"m\.weight"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


DAMAGED: list[tuple[str, Tensor | None]] = [
    (NAME, torch.zeros(383, 1, dtype=torch.uint8)),
    (NAME, torch.zeros(384, 1, dtype=torch.int16)),
    (NAME, torch.tensor(0, dtype=torch.uint8)),
    (NAME, torch.zeros(0, dtype=torch.uint8)),
    (NAME, None),
    (f"{NAME}.absmax", torch.zeros(12)),
    (f"{NAME}.absmax", torch.zeros(11, dtype=torch.uint8)),
    (f"{NAME}.absmax", torch.zeros(6, 2, dtype=torch.uint8)),
    (f"{NAME}.absmax", None),
    (f"{NAME}.quant_map", torch.zeros(16)),
    (f"{NAME}.quant_map", torch.tensor(NF4).half()),
    (f"{NAME}.quant_map", torch.tensor(NF4)[:15]),
    (f"{NAME}.quant_map", None),
    (f"{NAME}.nested_absmax", torch.zeros(2)),
    (f"{NAME}.nested_absmax", torch.zeros(3, dtype=torch.float64)),
    (f"{NAME}.nested_absmax", None),
    (f"{NAME}.nested_quant_map", torch.zeros(255)),
    (f"{NAME}.nested_quant_map", torch.zeros(256, dtype=torch.int32)),
    (f"{NAME}.nested_quant_map", None),
    (STATE, None),
]


@pytest.mark.parametrize(("name", "tensor"), DAMAGED)
def test_damaged_nf4_is_an_error(name: str, tensor: Tensor | None) -> None:
    tensors, _ = nf4(6, 128, nested=4)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\.weight"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


def test_statistics_on_one_level_alone() -> None:
    tensors, _ = nf4(6, 128)
    tensors[f"{NAME}.absmax"] = torch.zeros(12, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"m\.weight\.absmax must be"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (NAME, torch.zeros(5, 33, dtype=torch.uint8)),
        (NAME, torch.zeros(165, dtype=torch.int8)),
        (NAME, torch.zeros(0, 33, dtype=torch.int8)),
        (NAME, None),
        ("m.SCB", torch.zeros(4)),
        ("m.SCB", torch.zeros(5, dtype=torch.int32)),
        ("m.SCB", torch.tensor(1.0)),
        ("m.SCB", None),
        ("m.weight_format", torch.tensor(2, dtype=torch.uint8)),
        ("m.weight_format", torch.tensor([0, 0], dtype=torch.uint8)),
        ("m.weight_format", torch.tensor(0.0)),
    ],
)
def test_damaged_int8_is_an_error(name: str, tensor: Tensor | None) -> None:
    tensors, _ = int8(5, 33)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\."):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


def test_weights_that_are_in_both_formats() -> None:
    tensors = nf4(6, 128)[0] | {"m.SCB": torch.zeros(6)}
    with pytest.raises(CheckpointError, match="both"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


def test_fp4_is_refused_by_its_name() -> None:
    tensors = {f"{NAME}.quant_state.bitsandbytes__fp4": as_json(quant_type="fp4")}
    with pytest.raises(CheckpointError, match="fp4 of bitsandbytes, a table other than that of e2m1"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


def test_blocks_across_rows_are_refused() -> None:
    tensors, _ = nf4(6, 128)
    tensors[STATE] = as_json(**{**SAID, "shape": [8, 96]})
    with pytest.raises(CheckpointError, match="blocks of 64 cross the rows of 8x96"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
