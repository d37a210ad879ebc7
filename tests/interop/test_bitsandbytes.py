"""bitsandbytes files against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import bitsandbytes
from bitport.numerics import NF4, Quantized, sqnr
from bitport.ops.samples import product_budget
from bitport.tensor import QTensor

from .files import assert_as_read, assert_numbers, described, only, read, write

NAME = "m.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SHAPES = ((1, 64), (6, 128), (16, 320))
TWELFTHS = (0, 0.0625, 8, 12, 4, 6, 2, 3)
FP4 = [float(np.float32(sign * entry) / np.float32(12)) + 0.0 for sign in (1, -1) for entry in TWELFTHS]
TABLES = {"nf4": list(NF4), "fp4": FP4}
"""The values of the codes in a file."""


def as_json(**said: object) -> Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def nf4(
    n: int, k: int, block: int = 64, nested: int | None = None, kind: str = "nf4"
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of the file, the weight in float64 rounded once to float32). ``nested``: the block size of
    the statistics."""
    rng = np.random.default_rng(n + k + block)
    codes = rng.integers(0, 16, n * k)
    data = np.zeros((n * k // 2, 1), dtype=np.uint8)
    for at, code in enumerate(codes):
        data[at // 2, 0] |= int(code) << (0 if at % 2 else 4)
    tensors = {NAME: torch.from_numpy(data), f"{NAME}.quant_map": torch.tensor(TABLES[kind])}
    said: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
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
    tensors[STATE.removesuffix("nf4") + kind] = as_json(**said)
    value = [TABLES[kind][code] * float(absmax[at // block]) for at, code in enumerate(codes)]
    # The product of two float32 numbers is exact in float64.
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
    assert_numbers(q, value)


@pytest.mark.parametrize("nested", [None, 4], ids=["one level", "nested in 4"])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (6, 320)])
def test_fp4_values_are_those_of_the_definition(n: int, k: int, nested: int | None) -> None:
    tensors, value = nf4(n, k, 64, nested, "fp4")
    q = only(bitsandbytes.Reader({**CONFIG, "bnb_4bit_quant_type": "fp4"}, torch.bfloat16), tensors)
    assert q.scheme.weight.dtype == "bnb_fp4"
    assert_numbers(q, value)
    x = torch.randn(3, k, dtype=torch.bfloat16)
    exact = x.double() @ torch.from_numpy(value).double().T
    assert sqnr(exact, torch.nn.functional.linear(x, q)) >= product_budget(torch.bfloat16, k, exact.numel())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_codes_may_be_called_numbers_of_another_kind(storage: torch.dtype) -> None:
    tensors, value = nf4(6, 128)
    tensors[NAME] = tensors[NAME].flatten().view(storage).unsqueeze(1)
    q = only(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
    assert_numbers(q, value)


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
    assert reader.notes == [bitsandbytes.ROUNDED_INPUTS, bitsandbytes.ROUNDED_ROWS]
    assert_numbers(q, value)


@pytest.mark.parametrize(("threshold", "scheme"), [(0.0, "int8-dyn"), (0, "int8-dyn"), (6.0, "int8"), (None, "int8")])
def test_without_outliers_all_inputs_are_rounded(threshold: float | None, scheme: str) -> None:
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": threshold}
    reader = bitsandbytes.Reader(said, torch.float16)
    q = only(reader, int8(5, 33)[0])
    assert str(q.scheme) == scheme
    assert (bitsandbytes.ROUNDED_INPUTS in reader.notes) == (scheme == "int8")


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, object], list[str]]:
    writer = bitsandbytes.Writer()
    return write(writer, q, NAME), writer.config(["lm_head"]), writer.notes


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_4_bits_that_are_written_are_what_was_read(n: int, k: int, block: int, kind: str) -> None:
    """Including both zeros of fp4."""
    tensors, _ = nf4(n, k, block, kind=kind)
    config = {**CONFIG, "bnb_4bit_quant_type": kind}
    q = only(bitsandbytes.Reader(config, torch.bfloat16), tensors)
    again, said, notes = written(q)
    name = STATE.removesuffix("nf4") + kind
    state, its = (json.loads(bytes(each.pop(name).tolist())) for each in (again, tensors))
    assert_as_read(again, tensors)
    assert (state, notes) == (its, [])
    assert said == {**config, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"]}


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 33), (4096, 2)])
def test_int8_that_is_written_is_what_was_read(n: int, k: int, threshold: float) -> None:
    """Except for the last bit of an SCB whose neighbour gives the same quotient by 127 in float32."""
    tensors, value = int8(n, k)
    del tensors["m.bias"]
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": threshold}
    q = only(bitsandbytes.Reader(said, torch.float16), tensors)
    again, config, notes = written(q)
    statistics, its = again.pop("m.SCB"), tensors.pop("m.SCB")
    assert_as_read(again, tensors)
    assert torch.equal(statistics / 127, its / 127)
    assert notes == ([bitsandbytes.INPUTS] if threshold else [])
    assert config == {**said, "bnb_4bit_compute_dtype": "float16", "llm_int8_skip_modules": ["lm_head"]}
    back = only(bitsandbytes.Reader(config, torch.float16), {**again, "m.SCB": statistics})
    assert_numbers(back, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["nf4", "nf4-g128", "nf4-channel", "int8", "int8-dyn"])
def test_our_own_weights_survive(scheme: str, dtype: torch.dtype) -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    tensors, said, notes = written(q)
    back = only(bitsandbytes.Reader(said, dtype), tensors)
    assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert torch.equal(back.qdata, q.qdata)
    assert (back.dtype, bitsandbytes.NO_SCB in notes) == (dtype, False)


def test_scales_that_are_no_127th_are_told() -> None:
    """For scales between 128/127 and 2 times a power of two, every 128th float32 number is no float32 divided by 127:
    products with 127 are 127 ulp apart there, and float32 numbers 128. The nearest one is off by half an ulp, 2^-24,
    and its quotient by as much."""
    generator = torch.Generator().manual_seed(0)
    plain = bitport.quantize_tensor(torch.randn(4096, 32, generator=generator), "int8-dyn").to_layout("plain")
    q = plain.replace(Quantized(plain.qdata, torch.rand(4096, 1, generator=generator) + 1))
    tensors, said, notes = written(q)
    back = only(bitsandbytes.Reader(said, torch.float32), tensors)
    off = (back.scale.double() / q.scale.double() - 1).abs()
    assert notes == [bitsandbytes.NO_SCB]
    assert float(off.max()) <= 2**-23
    assert 0 < int((off > 0).sum()) < 3 * 4096 // 128


def test_a_scale_that_is_too_large_is_refused() -> None:
    q = bitport.quantize_tensor(torch.randn(4, 32), "int8-dyn").to_layout("plain")
    large = q.replace(Quantized(q.qdata, q.scale * 1e38))
    with pytest.raises(ArgumentError, match="127 times of it is no float32"):
        written(large)


@pytest.mark.parametrize(
    "scheme", ["int4", "fp8-row", "int8-g32", "int8-asym", "int8-static", "nf4-b32x32", "nf4-tensor"]
)
def test_schemes_that_it_cannot_hold_are_refused(scheme: str) -> None:
    reason = bitsandbytes.Writer().refuses(described(scheme))
    assert "bitsandbytes holds nf4 and bnb_fp4 in blocks of a row, int8" in str(reason)


def test_other_refusals() -> None:
    writer = bitsandbytes.Writer()
    assert writer.refuses(described("nf4")) is None
    assert writer.refuses(described("nf4-g32", (64, 96))) is None
    for bad, reason in (
        (described("nf4", (64, 96)), "not 64 of 96"),
        (described("nf4-g16", (64, 96)), "not 16 of 96"),
        (described("nf4-channel", (64, 96)), "not 96 of 96"),
        (described("int8"), "nf4 or int8 with a threshold"),
    ):
        assert reason in str(writer.refuses(bad))
    eight = bitsandbytes.Writer()
    assert eight.refuses(described("int8", (64, 100))) is None
    mixed = described("int8-dyn", (64, 100))
    assert "int8 with a threshold of 6 or int8 with a threshold of 0" in str(eight.refuses(mixed))


def test_both_formats_in_one_file() -> None:
    four, eight = nf4(6, 128), int8(5, 33)
    tensors = {f"a.{name}": tensor for name, tensor in four[0].items()}
    tensors |= {f"b.{name}": tensor for name, tensor in eight[0].items()}
    found = read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
    for name, value in (("a.m.weight", four[1]), ("b.m.weight", eight[1])):
        assert_numbers(found[name], value)


SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [6, 128]}
NESTED = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 1.5}


def states() -> list[Tensor]:
    """States of a nested weight, each with one error."""
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


def test_another_type_is_refused_by_its_name() -> None:
    tensors = {f"{NAME}.quant_state.bitsandbytes__af4": as_json(quant_type="af4")}
    with pytest.raises(CheckpointError, match="af4 of bitsandbytes is not read; nf4 and fp4 are"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)


def test_blocks_across_rows_are_refused() -> None:
    tensors, _ = nf4(6, 128)
    tensors[STATE] = as_json(**{**SAID, "shape": [8, 96]})
    with pytest.raises(CheckpointError, match="blocks of 64 cross the rows of 8x96"):
        read(bitsandbytes.Reader(CONFIG, torch.bfloat16), tensors)
