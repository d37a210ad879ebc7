"""HQQ files against numbers packed by plain loops from the definition, and multiplied in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import bitport
from bitport.checkpoint import quantize_files
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import convert, hqq
from bitport.interop.sources import Own
from bitport.numerics import Quantized
from bitport.tensor import QTensor

from .files import described, held, only, write

PACKINGS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1.58: "2bit_u8"}
PACKINGS[1] = "1bit_u8"
PER = {"8bit_u8": 1, "4bit_u8": 2, "3bit_32": 10, "2bit_u8": 4, "1bit_u8": 8}
WIDTH = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}, "skip_modules": ["lm_head"]}


def packed(seen: np.ndarray, packing: str) -> np.ndarray:
    """Pack codes [R, C]: an element holds codes of one column that are R/per rows apart, the first in the top bits."""
    per, width = PER[packing], WIDTH[packing]
    rows = -(-len(seen) // per)
    made = np.zeros((rows, seen.shape[1]), dtype=np.int64)
    for row in range(len(seen)):
        for column in range(seen.shape[1]):
            made[row % rows, column] |= int(seen[row, column]) << width * (per - 1 - row // rows)
    return made.astype(np.int32 if packing == "3bit_32" else np.uint8)


def text(value: str) -> Tensor:
    return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)


def layer(
    n: int, k: int, nbits: float, group: int, axis: int = 1, dtype: torch.dtype = torch.float16, whole: bool = False
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer, its weight in float64)."""
    rng = np.random.default_rng(n + k)
    packing = PACKINGS[nbits]
    seen = rng.integers(0, round(2**nbits), (n * k // group, group) if axis == 1 else (group, n * k // group))
    grid = (len(seen), 1) if axis == 1 else (1, seen.shape[1])
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, grid)).to(dtype)
    zero = torch.from_numpy(rng.uniform(-1, 2**nbits, grid)).to(dtype)
    zero = zero.round().clamp(0, 2 ** math.ceil(nbits) - 1) if whole else zero
    value = np.zeros(n * k)
    for at in range(n * k):
        row, column = divmod(at, seen.shape[1])
        its = row if axis == 1 else column
        code, middle, step = int(seen[row, column]), zero.flatten()[its].item(), scale.flatten()[its].item()
        value[at] = (code - middle) * step
    tensors = {
        "W_q": torch.from_numpy(packed(seen, packing)),
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(nbits, dtype=torch.int32 if nbits == int(nbits) else torch.float32),
        "group_size": torch.tensor(group, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor([n, k]),
        "packing": text(packing),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "quant_zero": torch.tensor(0, dtype=torch.uint8),
        "compute_dtype": text("__import__('os').abort()"),
        "unpack_view_dtype": text("torch.uint8"),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        "channel_wise": torch.tensor(1, dtype=torch.uint8),
    }
    return {f"m.{name}": tensor for name, tensor in tensors.items()}, value.reshape(n, k)


def one(tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> QTensor:
    return only(hqq.Reader(dict(CONFIG), dtype), tensors)


def off_by(value: np.ndarray) -> np.ndarray:
    """The difference and the product are rounded to float32, each with a relative error of 2^-24."""
    return 2.0**-23 * (1 + 2**-20) * np.abs(value)


@pytest.mark.parametrize("nbits", PACKINGS)
@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, 32), (8, 64, 64), (40, 24, 8), (16, 32, 64)])
def test_values_are_those_of_the_definition(n: int, k: int, group: int, nbits: float) -> None:
    tensors, value = layer(n, k, nbits, group)
    q = one(tensors)
    assert (q.scheme.weight.dtype, q.scale.dtype) == (f"int{math.ceil(nbits)}", torch.float16)
    assert q.zero is not None
    assert torch.equal(q.zero.flatten(), tensors["m.zero"].flatten())
    assert (np.abs(q.dequantize().double().numpy() - value) <= off_by(value)).all()


@pytest.mark.parametrize("nbits", PACKINGS)
def test_groups_along_the_other_axis(nbits: float) -> None:
    tensors, value = layer(16, 24, nbits, 16, axis=0)
    q = one(tensors)
    assert q.scheme.weight.block == (16, 1)
    assert (np.abs(q.dequantize().double().numpy() - value) <= off_by(value)).all()


@pytest.mark.parametrize(
    ("group", "axis", "name"),
    [(32, 1, "int4-g32-fzero"), (64, 1, "int4-channel-fzero"), (128, 1, "custom"), (16, 0, "int4-b16x1-fzero")],
)
def test_schemes_have_names(group: int, axis: int, name: str) -> None:
    assert one(layer(16, 64, 4, group, axis)[0]).scheme.name == name


@pytest.mark.parametrize("nbits", PACKINGS)
def test_whole_zero_points_are_integers(nbits: float) -> None:
    tensors, value = layer(16, 64, nbits, 32, whole=True)
    q = one(tensors)
    assert q.zero is not None
    assert q.zero.dtype == torch.uint8
    np.testing.assert_array_equal(q.dequantize().double().numpy(), value.astype(np.float32))


@pytest.mark.parametrize("zero", [-1.0, 16.0, 0.5, torch.nan, torch.inf])
def test_other_zero_points_stay_as_they_are(zero: float) -> None:
    tensors, _ = layer(16, 64, 4, 32, whole=True)
    tensors["m.zero"][3, 0] = zero
    q = one(tensors)
    assert q.scheme.name == "int4-g32-fzero"
    assert q.zero is not None
    torch.testing.assert_close(q.zero.flatten(), tensors["m.zero"].flatten(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("nbits", [8, 4, 3])
def test_bytes_that_are_called_floats(nbits: int, dtype: torch.dtype) -> None:
    tensors, value = layer(16, 64, nbits, 32, dtype=dtype)
    tensors["m.W_q"] = tensors["m.W_q"].view(dtype)
    with pytest.raises(CheckpointError, match=r"m\.W_q"):
        one(tensors)
    tensors["m.view_as_float"] = torch.tensor(1, dtype=torch.uint8)
    assert (np.abs(one(tensors).dequantize().double().numpy() - value) <= off_by(value)).all()


def test_products_are_those_of_the_values() -> None:
    for group, axis in ((64, 1), (32, 0)):
        tensors, value = layer(32, 128, 4, group, axis)
        x = torch.randn(5, 128, dtype=torch.float64)
        exact = x @ torch.from_numpy(value).T
        got = torch.nn.functional.linear(x.float(), one(tensors).to_device_layout()).double()
        assert float((got - exact).norm() / exact.norm()) < 128 * 2**-24


@pytest.mark.parametrize(
    ("group", "axis", "why"), [(8, 0, "lie apart"), (48, 0, "lie apart"), (96, 1, "parts of several rows")]
)
def test_groups_that_are_no_blocks_are_refused(group: int, axis: int, why: str) -> None:
    tensors, _ = layer(24, 64, 4, group, axis)
    with pytest.raises(CheckpointError, match=rf"m\.W_q.*axis={axis} and group_size={group}.*{why}"):
        one(tensors)


@pytest.mark.parametrize("role", ["scale_q", "zero_q", "zero_scale"])
def test_nested_statistics_are_refused(role: str) -> None:
    tensors, _ = layer(16, 64, 4, 32)
    tensors[f"m.{role}"] = torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"m\.{role}: .* quantized too"):
        one(tensors)


def test_settings_that_are_not_understood_are_errors() -> None:
    with pytest.raises(CheckpointError, match="rotation"):
        hqq.Reader({**CONFIG, "rotation": True}, torch.float16)


@pytest.mark.parametrize(
    ("role", "tensor"),
    [
        ("W_q", torch.zeros(16, 32)),
        ("W_q", torch.zeros(8, 32, dtype=torch.uint8)),
        ("W_q", torch.zeros(512, dtype=torch.uint8)),
        ("W_q", torch.zeros(16, 32, dtype=torch.int32)),
        ("W_q", torch.zeros((), dtype=torch.uint8)),
        ("scale", torch.zeros(32)),
        ("scale", torch.zeros(1, 32)),
        ("scale", torch.zeros(32, 1, dtype=torch.float64)),
        ("zero", torch.zeros(32, 1)),
        ("zero", torch.zeros(31, 1, dtype=torch.float16)),
        ("nbits", torch.tensor(7, dtype=torch.int32)),
        ("nbits", torch.tensor(8, dtype=torch.int32)),
        ("nbits", torch.tensor(torch.nan)),
        ("nbits", torch.zeros(2, dtype=torch.int32)),
        ("group_size", torch.tensor(0, dtype=torch.int32)),
        ("group_size", torch.tensor(-32, dtype=torch.int32)),
        ("group_size", torch.tensor(33, dtype=torch.int32)),
        ("group_size", torch.tensor(32.0)),
        ("group_size", torch.zeros(0, dtype=torch.int32)),
        ("axis", torch.tensor(2, dtype=torch.int32)),
        ("axis", torch.tensor(0, dtype=torch.int32)),
        ("shape", torch.tensor([16, 0])),
        ("shape", torch.tensor([-16, -64])),
        ("shape", torch.tensor([16, 65])),
        ("shape", torch.tensor([2**62, 2**62])),
        ("shape", torch.tensor([16, 64, 1])),
        ("shape", torch.tensor([16.0, 64.0])),
        ("packing", text("4bit_u9")),
        ("packing", text("8bit_u8")),
        ("packing", text("3bit_32")),
        ("packing", torch.zeros(2**20, dtype=torch.uint8)),
        ("packing", torch.full((7,), 255, dtype=torch.uint8)),
        ("packing", torch.tensor(1.0)),
        ("view_as_float", torch.tensor(1, dtype=torch.uint8)),
        ("quant_scale", torch.tensor(1, dtype=torch.uint8)),
        ("quant_zero", torch.tensor(1, dtype=torch.uint8)),
        ("quant_zero", torch.zeros(2, dtype=torch.uint8)),
        *((role, None) for role in ("W_q", "scale", "zero", "nbits", "group_size", "axis", "shape", "packing")),
        ("weight", torch.zeros(16, 64)),
    ],
)
def test_damaged_tensors_are_errors(role: str, tensor: Tensor | None) -> None:
    tensors, _ = layer(16, 64, 4, 32)
    tensors.pop(f"m.{role}", None)
    if tensor is not None:
        tensors[f"m.{role}"] = tensor
    with pytest.raises(BitportError, match=r"m\."):
        one(tensors)


def test_codes_of_more_bits_are_errors() -> None:
    tensors, _ = layer(16, 64, 5, 32)
    tensors["m.W_q"][7, 7] = 32
    with pytest.raises(CheckpointError, match=r"m\.W_q holds the code 32"):
        one(tensors)


def test_rows_that_do_not_fill_bytes_are_errors() -> None:
    """R = 3 rows of 4 bits: the library cannot read them either."""
    tensors, _ = layer(4, 24, 4, 32)
    with pytest.raises(CheckpointError, match=r"m\.W_q"):
        one(tensors)


@pytest.mark.parametrize("said", [CONFIG, None], ids=["config.json", "by names"])
def test_a_directory(said: dict[str, object] | None, tmp_path: Path) -> None:
    """The library itself writes no quantization_config: then the format is recognized by the names of the tensors."""
    tensors, value = layer(16, 64, 4, 32)
    rest = {"norm.weight": torch.ones(64), "m.bias": torch.ones(16)}
    source = tmp_path / "hqq"
    source.mkdir()
    save_file({f"model.{name}": tensor for name, tensor in (tensors | rest).items()}, source / "model.safetensors")
    config = {"model_type": "llama", "dtype": "float16"} | ({"quantization_config": said} if said else {})
    (source / "config.json").write_text(json.dumps(config))
    done = convert(source, tmp_path / "out", progress=False)
    assert (done.read, done.weights, done.others) == ("hqq", {"model.m.weight": "int4-g32-fzero"}, 2)
    found = dict(Own(tmp_path / "out").items())
    assert sorted(found) == ["model.m.bias", "model.m.weight", "model.norm.weight"]
    q = found["model.m.weight"]
    assert isinstance(q, QTensor)
    assert (np.abs(q.dequantize(torch.float32).double().numpy() - value) <= off_by(value)).all()
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_files(source, tmp_path / "twice", "int4-g32", progress=False)


def test_what_belongs_to_no_layer_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"m\.nbits"):
        hqq.Reader(dict(CONFIG), torch.float16).weights(held({"m.nbits": torch.tensor(4)}))


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, object]]:
    writer = hqq.Writer()
    return write(writer, q), writer.config(["lm_head"])


SETTINGS = {"axis", "group_size", "nbits", "channel_wise", "optimize", "round_zero", "view_as_float"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1])
@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, 32), (8, 64, 64), (40, 24, 8)])
def test_what_is_written_is_what_was_read(
    n: int, k: int, group: int, nbits: int, whole: bool, dtype: torch.dtype
) -> None:
    tensors, _ = layer(n, k, nbits, group, dtype=dtype, whole=whole)
    tensors["m.compute_dtype"], tensors["m.unpack_view_dtype"] = text(str(dtype)), text("torch.uint8")
    if nbits == 3:
        tensors["m.unpack_view_dtype"] = text("torch.int32")
    again, config = written(one(tensors, dtype))
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert again[name].is_contiguous()
        assert torch.equal(again[name], tensor), name
    assert set(again) - set(tensors) == {"m.optimize", "m.round_zero", "m.offload_meta", "m.stores_quant_config"}
    params = {"nbits": nbits, "group_size": group if group < k else None, "axis": 1, "view_as_float": False}
    said = config.pop("quant_config")
    assert isinstance(said, dict)
    assert {key: said["weight_quant_params"][key] for key in params} == params
    assert set(said["weight_quant_params"]) == SETTINGS
    assert config == {"quant_method": "hqq", "skip_modules": ["lm_head"]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "scheme",
    ["int4-g64", "int4-g64-sym", "int4-g64-fzero", "int7-g32", "int3-channel", "int2-g32", "int8", "int8-asym"],
)
def test_our_own_weights_survive(scheme: str, dtype: torch.dtype) -> None:
    value = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    back = one(written(q)[0], dtype)
    assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert (back.dtype, back.scale.dtype) == (dtype, dtype)


def test_what_it_cannot_hold_is_refused() -> None:
    writer = hqq.Writer()
    assert writer.refuses(described("int4")) is None
    for bad, reason in (
        (described("int4-int8"), "inputs as they are"),
        (described("nf4"), "integers of 1 to 8 bits"),
        (described("int4-b32x32"), "in groups along rows"),
        (described("int4-tensor"), "in groups along rows"),
        (described("int4-sym"), "one scheme"),
        (described("int4", (64, 192)), "not 64x192 of int4"),
        (described("int4", (63, 128)), "a multiple of 2, not 63x128 of int4"),
    ):
        assert reason in str(writer.refuses(bad)), reason


def test_numbers_that_the_dtype_of_the_model_does_not_hold() -> None:
    q = bitport.quantize_tensor(torch.randn(8, 64).bfloat16(), "int4-g32-fzero").to_layout("plain")
    assert q.zero is not None
    with pytest.raises(ArgumentError, match=r"a zero of HQQ: .* is no bfloat16; --scales bfloat16"):
        written(q.replace(Quantized(q.qdata, q.scale.float(), q.zero.float() + 0.001)))
