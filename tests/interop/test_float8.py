"""float8 files against numbers decoded one at a time and multiplied in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import bitport
from bitport.errors import BitportError, CheckpointError
from bitport.interop import float8, modelopt
from bitport.interop.formats import READERS
from bitport.interop.sources import description

from .files import E2M1, assert_as_read, assert_numbers, held, only, read, write
from .test_modelopt import four

NAME = "m.weight"
INVERSE, SCALE = f"{NAME}_scale_inv", f"{NAME}_scale"


def decoded(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


VALUES = np.array([decoded(code) for code in range(256)])


def layer(
    n: int, k: int, rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer in blocks of rows x columns, its weight in float64 rounded once to float32)."""
    rng = np.random.default_rng(n + k + rows + seed)
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    grid = (-(-n // rows), -(-k // columns))
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponents = rng.integers(110, 130, grid).astype(np.uint8)
        scale, stored = 2.0 ** (exponents.astype(np.float64) - 127), torch.from_numpy(exponents).view(dtype)
    else:
        stored = torch.from_numpy(rng.uniform(0.001, 0.1, grid)).to(dtype)
        scale = stored.double().numpy()
    value = np.zeros((n, k))
    for row, column in np.ndindex(n, k):
        value[row, column] = VALUES[codes[row, column]] * scale[row // rows, column // columns]
    return {NAME: torch.from_numpy(codes).view(torch.float8_e4m3fn), INVERSE: stored}, value.astype(np.float32)


def config(rows: int, columns: int, **more: object) -> dict[str, object]:
    block = [rows, columns]
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block, **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (128, 256), (130, 300), (64, 129)])
def test_values_are_those_of_the_definition(n: int, k: int, dtype: torch.dtype) -> None:
    tensors, value = layer(n, k, 128, 128, dtype)
    reader = float8.Reader(config(128, 128), torch.bfloat16)
    (q,) = (found := read(reader, tensors)).values()
    assert list(found) == [NAME]
    assert (tuple(q.shape), q.dtype, q.scale.dtype) == ((n, k), torch.bfloat16, torch.float32)
    assert (str(q.scheme), reader.notes) == ("fp8-block", [])
    assert_numbers(q, value)


@pytest.mark.parametrize(
    ("rows", "columns", "name", "notes"),
    [(1, 128, "fp8-block-g128", 0), (64, 64, "fp8-b64x64-wo", 1), (1, 32, "fp8-g32-wo", 1)],
)
def test_other_blocks(rows: int, columns: int, name: str, notes: int) -> None:
    tensors, value = layer(96, 160, rows, columns)
    reader = float8.Reader(config(rows, columns), torch.bfloat16)
    q = only(reader, tensors)
    assert (str(q.scheme), len(reader.notes)) == (name, notes)
    assert_numbers(q, value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(
    ("said", "name", "notes"),
    [
        ({"quant_method": "mxfp8"}, "mxfp8", 0),
        ({**config(1, 32), "quant_method": "mxfp8", "scale_fmt": "ue8m0"}, "mxfp8", 0),
        (config(1, 32, scale_fmt="ue8m0"), "mxfp8", 0),
        (config(1, 32), "mxfp8-wo", 1),
        (config(1, 32, scale_fmt="ue8m0", activation_scheme=None), "mxfp8-wo", 0),
    ],
    ids=str,
)
def test_blocks_of_mxfp8(said: dict[str, object], name: str, notes: int, dtype: torch.dtype) -> None:
    tensors, value = layer(48, 96, 1, 32, dtype)
    reader = READERS[str(said["quant_method"])](dict(said), torch.bfloat16)
    q = only(reader, tensors)
    assert (str(q.scheme), len(reader.notes), q.scale.dtype) == (name, notes, torch.float8_e8m0fnu)
    assert_numbers(q, value)
    with pytest.raises(CheckpointError, match=r"mxfp8 with weight_block_size \[128, 128\]: \[1, 32\] is read"):
        READERS["mxfp8"]({**config(128, 128), "quant_method": "mxfp8"}, torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("end", [INVERSE, SCALE])
def test_one_scale_for_all(end: str, shape: tuple[int, ...]) -> None:
    tensors, value = layer(48, 80, 48, 80)
    tensors[end] = tensors.pop(INVERSE).reshape(shape)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    reader = float8.Reader(said, torch.bfloat16)
    q = only(reader, tensors)
    assert (str(q.scheme), q.scheme.act, len(reader.notes)) == ("fp8-row-tensor", "fp8", 1)
    assert_numbers(q, value)


@pytest.mark.parametrize("rows", [1, 48])
def test_scales_that_divide(rows: int) -> None:
    """As GPTQModel writes them: the reciprocal and the product are each rounded to float32."""
    tensors, value = layer(48, 80, rows, 80)
    stored = (1 / tensors[INVERSE].double()).float()
    exact = np.nan_to_num(value.astype(np.float64) * (1 / stored.double() / tensors[INVERSE].double()).numpy())
    said = {"bits": 8, "quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
    reader = float8.Reader(said, torch.bfloat16)
    q = only(reader, {**tensors, INVERSE: stored.flatten() if rows == 1 else stored.reshape(())})
    assert (q.scheme.act, reader.notes) == ("", [float8.DIVISORS])
    got = np.nan_to_num(q.dequantize(torch.float32).numpy())
    assert bool((np.abs(got - exact) <= 3 * 2**-24 * np.abs(exact)).all())
    with pytest.raises(CheckpointError, match="weight_scale_semantics 'direct': inverse are read"):
        float8.Reader({**said, "weight_scale_semantics": "direct"}, torch.bfloat16)


def test_inputs_as_they_are() -> None:
    """As specified by Quark. If nothing is said about inputs, they are rounded."""
    tensors, value = layer(48, 80, 48, 80)
    tensors[SCALE] = tensors.pop(INVERSE).reshape(())
    for said, name in (({"activation_scheme": None}, "fp8-wo-tensor"), ({}, "fp8-row-tensor")):
        reader = float8.Reader({"quant_method": "fp8", "ignored_layers": ["lm_head"], **said}, torch.bfloat16)
        q = only(reader, tensors)
        assert (str(q.scheme), bool(reader.notes)) == (name, not said)
        assert_numbers(q, value)


@pytest.mark.parametrize("shape", [(48,), (48, 1)], ids=str)
def test_one_scale_for_a_row(shape: tuple[int, ...]) -> None:
    tensors, value = layer(48, 80, 1, 80)
    tensors[SCALE] = tensors.pop(INVERSE).reshape(shape)
    q = only(float8.Reader({"quant_method": "fp8"}, torch.bfloat16), tensors)
    assert str(q.scheme) == "fp8-row"
    assert_numbers(q, value)


@pytest.mark.parametrize(
    ("said", "scale", "given"),
    [
        ({"weight_block_size": None}, SCALE, "m.input_scale"),
        ({"weight_block_size": None}, INVERSE, "m.activation_scale"),
        ({"weight_block_size": [128, 128]}, INVERSE, "m.activation_scale"),
    ],
)
def test_a_static_scale_of_the_input(said: dict[str, object], scale: str, given: str) -> None:
    tensors, value = layer(48, 80, 48, 80)
    tensors[scale] = tensors.pop(INVERSE)
    tensors[given] = torch.tensor(0.0625, dtype=torch.bfloat16)
    reader = float8.Reader({"quant_method": "fp8", "activation_scheme": "static", **said}, torch.bfloat16)
    q = only(reader, tensors)
    assert (q.scheme.act, q.scheme.static, reader.notes) == ("fp8-tensor", True, [])
    assert q.act_scale is not None
    assert (q.act_scale.dtype, float(q.act_scale)) == (torch.float32, 0.0625)
    assert_numbers(q, value)


def test_the_static_scale_divides_the_input() -> None:
    tensors, _ = layer(16, 80, 16, 80)
    codes = torch.randint(0, 120, (16, 80), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    tensors |= {NAME: codes.view(torch.float8_e4m3fn), "m.input_scale": torch.tensor([0.25])}
    reader = float8.Reader({"quant_method": "fp8", "activation_scheme": "static"}, torch.float32)
    q = only(reader, tensors)
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    rounded = (x / 0.25).to(torch.float8_e4m3fn).double() * 0.25
    exact = rounded @ q.dequantize(torch.float32).double().T
    got = torch.nn.functional.linear(x, q).double()
    # A sum of 80 products in float32.
    assert float((got - exact).norm() / exact.norm()) < 80 * 2**-24


def test_the_names_of_deepseek_v4() -> None:
    tensors, value = layer(130, 300, 128, 128, torch.float8_e8m0fnu)
    tensors["m.scale"] = tensors.pop(INVERSE)
    q = only(float8.Reader(config(128, 128, scale_fmt="ue8m0"), torch.bfloat16), tensors)
    assert str(q.scheme) == "fp8-block"
    assert_numbers(q, value)


def fp4() -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer, its weight, exact in float32)."""
    rng = np.random.default_rng(0)
    codes, exponents = rng.integers(0, 16, (48, 96)), rng.integers(110, 130, (48, 3)).astype(np.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    tensors = {NAME: torch.from_numpy(packed), "m.scale": torch.from_numpy(exponents).view(torch.float8_e8m0fnu)}
    return tensors, E2M1[codes] * np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, 1)


def test_experts_in_fp4() -> None:
    tensors, value = fp4()
    q = only(float8.Reader(config(128, 128), torch.bfloat16), tensors)
    assert (q.scheme.weight, q.scheme.act) == (bitport.preset("mxfp4").weight, "fp8-128")
    assert_numbers(q, value)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ torch.from_numpy(value).T
    got = torch.nn.functional.linear(x, q.to_device_layout()).double()
    assert float((got - exact).norm() / exact.norm()) < 2**-4  # inputs have 3 mantissa bits


def test_experts_in_a_format_of_modelopt() -> None:
    """Both kinds of tensors use the same names."""
    algorithm = {"quant_algo": "NVFP4", "group_size": 16}
    said = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "quantized_layers": {"l.experts": algorithm}}
    (ours, value), (theirs, four_bits) = layer(130, 300, 128, 128), four()
    tensors = {**ours, **{f"l.experts.7.{name}": tensor for name, tensor in theirs.items()}}
    reader = float8.Reader(config(128, 128, **said), torch.bfloat16)
    found = read(reader, tensors)
    assert {name: str(q.scheme) for name, q in found.items()} == {
        NAME: "fp8-block",
        "l.experts.7.m.weight": "nvfp4-static",
    }
    assert_numbers(found[NAME], value)
    assert_numbers(found["l.experts.7.m.weight"], four_bits)
    assert reader.notes == []
    alone = {"l.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    other = float8.Reader(config(128, 128, **{**said, "quantized_layers": alone}), torch.bfloat16)
    read(other, tensors)
    assert other.notes == [modelopt.UNUSED]
    del tensors["l.experts.7.m.weight_scale"]
    with pytest.raises(CheckpointError, match=r"l\.experts\.7\.m"):
        read(reader, tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (NAME, torch.zeros(48, 16, dtype=torch.int8)),
        (NAME, torch.zeros(48, 48, dtype=torch.uint8)),
        (NAME, None),
        ("m.scale", torch.zeros(48, 2).to(torch.float8_e8m0fnu)),
        ("m.scale", torch.zeros(48, 3)),
        ("m.scale", None),
    ],
)
def test_damaged_fp4_is_an_error(name: str, tensor: Tensor | None) -> None:
    tensors, _ = fp4()
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\."):
        read(float8.Reader(config(128, 128), torch.bfloat16), tensors)


@pytest.mark.parametrize("name", ["l.experts.gate_up_proj", "l.experts.down_proj.weight"])
def test_stacked_experts(name: str) -> None:
    made, values = zip(*(layer(130, 96, 128, 128, seed=seed) for seed in range(3)), strict=True)
    tensors = {
        name: torch.stack([each[NAME].view(torch.uint8) for each in made]).view(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.stack([each[INVERSE] for each in made]),
    }
    q = only(float8.Reader(config(128, 128), torch.bfloat16), tensors)
    assert tuple(q.shape) == (3, 130, 96)
    assert_numbers(q, np.stack(values))


def test_scales_of_a_cache_are_left_out_and_no_others() -> None:
    tensors, _ = layer(16, 80, 128, 128)
    cache = [f"model.layers.0.self_attn.{end}" for end in ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale")]
    reader = float8.Reader(config(128, 128), torch.bfloat16)
    tensors |= {"model.layers.0.attn.q_scale": torch.ones(32), "logit_scale": torch.tensor(1.0)}
    every = held(tensors | dict.fromkeys(cache, torch.tensor(1.0)))
    assert [weight.name for weight in reader.weights(every)] == [NAME]
    assert list(reader.dropped(every)) == cache


def test_powers_of_two_that_inputs_do_not_have_are_told() -> None:
    reader = float8.Reader(config(128, 128, scale_fmt="ue8m0"), torch.bfloat16)
    assert "ue8m0" in reader.notes[0]


@pytest.mark.parametrize(("n", "k"), [(128, 256), (130, 300)])
def test_what_is_written_is_what_was_read(n: int, k: int) -> None:
    tensors, _ = layer(n, k, 128, 128)
    q = only(float8.Reader(config(128, 128), torch.bfloat16), tensors)
    writer = float8.Writer()
    assert_as_read(write(writer, q, NAME), tensors)
    assert writer.config(["lm_head"]) == {**config(128, 128), "modules_to_not_convert": ["lm_head"]}


def test_our_own_weights_survive() -> None:
    value = torch.randn(200, 384, generator=torch.Generator().manual_seed(0))
    q = bitport.quantize_tensor(value, "fp8-block").to_layout("plain")
    writer = float8.Writer()
    back = only(float8.Reader(writer.config([]), torch.float32), writer.write(NAME, q))
    assert torch.equal(back, q)


@pytest.mark.parametrize("scheme", ["nf4", "int4", "fp8", "fp8-row", "fp8-block-wo", "fp8-block-b64x64", "mxfp8"])
def test_schemes_that_it_cannot_hold_are_refused(scheme: str) -> None:
    q = bitport.quantize_tensor(torch.randn(64, 128), scheme).to_layout("plain")
    assert "written in the scheme fp8-block alone" in str(float8.Writer().refuses(description(NAME, q)))


@pytest.mark.parametrize(
    "change",
    [
        {"fmt": "e5m2"},
        {"scale_fmt": "ue5m3"},
        {"expert_dtype": "int4"},
        {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"},
        {"activation_scheme": "none"},
        {"activation_scheme": 3},
        {"weight_block_size": 128},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]},
        {"weight_block_size": [128, "128"]},
        {"weight_block_size": [128, True]},
        {"weight_block_size": [128, 10**30]},
        {"weight_block_size": [64, 128]},
        {"weight_block_size": None},
        {"activation_scheme": "static"},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, object]) -> None:
    tensors, _ = layer(256, 256, 128, 128)
    with pytest.raises(CheckpointError):
        read(float8.Reader({**config(128, 128), **change}, torch.bfloat16), tensors)


E4M3 = torch.float8_e4m3fn
DAMAGED: list[tuple[str, Tensor | None]] = [
    (NAME, torch.zeros(256, 128).to(torch.float8_e5m2)),
    (NAME, torch.zeros(256, 128).to(torch.float8_e4m3fnuz)),
    (NAME, torch.zeros(256, 128, dtype=torch.int8)),
    (NAME, torch.zeros(256, 128)),
    (NAME, torch.zeros(256).to(E4M3)),
    (NAME, torch.tensor(1.0).to(E4M3)),
    (NAME, torch.zeros(1, 1, 256, 128).to(E4M3)),
    (NAME, torch.zeros(0, 128).to(E4M3)),
    (NAME, torch.zeros(2, 256, 128).to(E4M3)),
    (NAME, None),
    (INVERSE, torch.zeros(2)),
    (INVERSE, torch.zeros(1, 2)),
    (INVERSE, torch.tensor(1.0)),
    (INVERSE, torch.zeros(2, 1, dtype=torch.int32)),
    (INVERSE, torch.zeros(2, 1, dtype=torch.float64)),
    (INVERSE, None),
    (SCALE, torch.zeros(2, 1)),
    ("m.input_scale", torch.tensor(1.0)),
    ("other.weight_scale_inv", torch.zeros(2, 1)),
    ("other.activation_scale", torch.tensor(1.0)),
]


@pytest.mark.parametrize(("name", "tensor"), DAMAGED)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors, _ = layer(256, 128, 128, 128)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=name.split(".")[0]):
        read(float8.Reader(config(128, 128), torch.bfloat16), tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (SCALE, torch.zeros(3)),
        (SCALE, torch.zeros(1, 128)),
        (SCALE, torch.zeros(0)),
        (SCALE, torch.zeros(1, 1, 1)),
        ("m.input_scale", torch.zeros(2)),
        ("m.input_scale", torch.zeros(1, dtype=torch.int64)),
        ("m.input_scale", torch.zeros(1, 1)),
        ("m.activation_scale", torch.tensor(1.0)),
        ("m.input_scale", None),
    ],
)
def test_damaged_static_layers_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors, _ = layer(256, 128, 256, 128)
    tensors |= {SCALE: tensors.pop(INVERSE), "m.input_scale": torch.tensor(1.0)}
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(CheckpointError, match=r"m\."):
        read(float8.Reader({"quant_method": "fp8", "activation_scheme": "static"}, torch.bfloat16), tensors)
