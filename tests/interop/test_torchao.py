"""torchao files against numbers computed by plain Python loops from the definitions of its classes, in float64."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from bitport.errors import CheckpointError
from bitport.interop import torchao
from bitport.interop.shifts import ROUNDED

from .files import E2M1, only, read, words
from .torchao_files import (
    RNG,
    bfloat16,
    dtype,
    file,
    float8_inputs,
    in_tiles,
    int8_inputs,
    integers,
    nibbles,
    plain,
    reader,
    spread,
    tiles,
    values,
)


def rounded_by(exact: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The zero point, the difference from it and the product are rounded to float32, each with a relative error of
    2^-24."""
    return 2.0**-24 * (1 + 2**-20) * (np.abs(shift) + 2 * np.abs(exact))


@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 32), (5, 256, 128), (3, 80, 32)])
def test_int4(n: int, k: int, group: int) -> None:
    made, exact, shift = plain(n, k, group, activation_dtype=dtype("bfloat16"))
    q, got = values(made)
    assert str(q.scheme) == ("int4-fzero" if group == 128 else f"int4-g{group}-fzero")
    assert (np.abs(got - exact) <= rounded_by(exact, shift)).all()
    unsigned = {**made[0], "m._weight_qdata": made[0]["m._weight_qdata"].view(torch.uint8)}
    np.testing.assert_array_equal(values((unsigned, made[1]))[1], got)


def test_int4_without_zero_points_is_exact() -> None:
    made, exact, _ = plain(8, 256, 128, zeros=False, activation_dtype=dtype("float8_e4m3fn"))
    q, got = values(made)
    assert (str(q.scheme), q.zero, q.scale.dtype) == ("int4-fp8", None, torch.bfloat16)
    np.testing.assert_array_equal(got, exact)


def test_int4_in_words() -> None:
    codes, zero = RNG.integers(0, 16, (8, 64)), RNG.integers(0, 16, (8, 2))
    scale, exact = bfloat16(RNG.uniform(0.001, 0.1, (8, 2)))
    parts = {"qdata": words(codes, 4), "scale": scale.T.contiguous(), "zero_point": zero.T.astype(np.int8).copy()}
    q, got = values(file("Int4PlainInt32Tensor", parts, block_size=[1, 32], shape=[8, 64]))
    assert str(q.scheme) == "int4-g32"
    np.testing.assert_array_equal(got, (codes - spread(zero, 64, 32)) * spread(exact, 64, 32))


@pytest.mark.parametrize(("n", "k", "group"), [(12, 192, 64), (8, 1024, 32), (3, 48, 128)])
def test_int4_in_tiles(n: int, k: int, group: int) -> None:
    made, exact, shift = tiles(n, k, group)
    q, got = values(made)
    assert q.scheme.weight.zero == "float"
    assert (np.abs(got - exact) <= rounded_by(exact, shift)).all()


@pytest.mark.parametrize(
    ("block", "zero", "inputs", "name"),
    [
        ((1, 64), False, None, "int8"),
        ((1, 16), False, None, "int8-g16"),
        ((8, 64), False, None, "int8-tensor"),
        ((4, 16), True, None, "int8-b4x16-asym"),
        ((1, 64), False, int8_inputs(), "int8-dyn"),
        ((8, 64), False, int8_inputs(), "int8-dyn-tensor"),
        ((1, 64), False, int8_inputs(mapping="ASYMMETRIC"), "int8-asym"),
        ((1, 64), False, int8_inputs("PerTensor"), "int8-tensor"),
    ],
)
def test_int8(block: tuple[int, int], zero: bool, inputs: Any, name: str) -> None:
    made, exact = integers("Int8Tensor", 8, block, zero, act_quant_kwargs=inputs, reduce_range=False)
    q, got = values(made)
    assert name in (str(q.scheme), q.scheme.act)
    np.testing.assert_array_equal(got, exact)
    del made[0]["m._weight_zero_point"]
    made[1]["_tensor_data_names"].remove("zero_point")
    assert values(made)[0].zero is None


def test_int8_with_a_fixed_scale_of_inputs() -> None:
    inputs = int8_inputs("PerTensor")
    tensors, said = integers("Int8Tensor", 8, (1, 64), False, act_quant_kwargs=inputs)[0]
    said["_tensor_data_names"] += ["act_quant_scale", "act_quant_zero_point", "act_pre_scale"]
    tensors["m._weight_act_quant_scale"] = torch.tensor([[0.25]])
    tensors["m._weight_act_quant_zero_point"] = torch.zeros(1, 1, dtype=torch.int8)
    tensors["m._weight_act_pre_scale"] = torch.rand(1, 64)
    q, _ = values((tensors, said))
    assert str(q.scheme) == "int8-static"
    assert q.act_scale is not None
    assert q.act_scale.item() == 0.25
    assert q.pre_scale is not None
    assert torch.equal(q.pre_scale, tensors["m._weight_act_pre_scale"][0])
    tensors["m._weight_act_quant_zero_point"] += 1
    with pytest.raises(CheckpointError, match="must be 0"):
        values((tensors, said))


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_few_bits_in_bytes(bits: int, zero: bool) -> None:
    made, exact = integers(
        "IntxUnpackedToInt8Tensor",
        bits,
        (1, 32),
        zero,
        target_dtype=dtype(f"int{bits}"),
        activation_quantization="int8_asym_per_token",
    )
    q, got = values(made)
    assert (q.scheme.weight.dtype, q.scheme.act) == (f"int{bits}", "int8-asym")
    np.testing.assert_array_equal(got, exact)
    made[0]["m._weight_zero_point"] = made[0]["m._weight_zero_point"].bfloat16()
    np.testing.assert_array_equal(values(made)[1], exact)


def per(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


@pytest.mark.parametrize(
    ("block", "granularity", "name"),
    [
        ((256, 128), per("PerTensor"), "fp8"),
        ((1, 128), per("PerRow", dim=-1), "fp8-row"),
        ((1, 128), None, "fp8-wo"),
        ((128, 128), per("PerBlock", block_size=[1, 128]), "fp8-block"),
    ],
)
def test_float8(block: tuple[int, int], granularity: Any, name: str) -> None:
    codes = RNG.integers(0, 127, (256, 128)).astype(np.uint8)
    scale = RNG.uniform(0.001, 0.1, (256 // block[0], 128 // block[1])).astype(np.float32)
    inputs = None if granularity is None else float8_inputs(granularity=granularity)
    kernel = {"_type": "KernelPreference", "_data": "AUTO"}
    parts = {"qdata": torch.from_numpy(codes).view(torch.float8_e4m3fn), "scale": scale}
    made = file("Float8Tensor", parts, block_size=list(block), act_quant_kwargs=inputs, kernel_preference=kernel)
    q, got = values(made)
    assert str(q.scheme) == name
    wide = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)
    np.testing.assert_array_equal(got, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide)


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize(("elements", "name"), [("float8_e4m3fn", "mxfp8"), ("float4_e2m1fn_x2", "mxfp4")])
def test_mx(elements: str, name: str, swizzle: bool) -> None:
    n, k = 160, 192
    codes = RNG.integers(0, 127 if name == "mxfp8" else 16, (n, k)).astype(np.uint8)
    scales = RNG.integers(100, 140, (n, k // 32)).astype(np.uint8)
    stored = torch.from_numpy(in_tiles(scales) if swizzle else scales).view(torch.float8_e8m0fnu)
    qdata = torch.from_numpy(codes).view(torch.float8_e4m3fn) if name == "mxfp8" else torch.from_numpy(nibbles(codes))
    mode = {"_type": "ScaleCalculationMode", "_data": "RCEIL"}
    inputs = {"_type": "QuantizeTensorToMXKwargs", "_data": {"elem_dtype": dtype(elements), "scaling_mode": mode}}
    said = {"elem_dtype": dtype(elements), "block_size": 32, "is_swizzled_scales": swizzle, "act_quant_kwargs": inputs}
    q, got = values(file("MXTensor", {"qdata": qdata, "scale": stored}, **said))
    assert str(q.scheme) == name
    value = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) if name == "mxfp8" else E2M1[codes]
    np.testing.assert_array_equal(got, value * np.repeat(2.0 ** (scales.astype(int) - 127), 32, 1))


@pytest.mark.parametrize("second", [None, 0.0123])
@pytest.mark.parametrize("swizzle", [False, True])
def test_nvfp4(swizzle: bool, second: float | None) -> None:
    n, k = 144, 96
    codes, scales = RNG.integers(0, 16, (n, k)), RNG.integers(1, 127, (n, k // 16)).astype(np.uint8)
    stored = torch.from_numpy(in_tiles(scales) if swizzle else scales).view(torch.float8_e4m3fn)
    parts = {"qdata": nibbles(codes), "scale": stored}
    if second is not None:
        parts["per_tensor_scale"] = torch.tensor(second)
    q, got = values(file("NVFP4Tensor", parts, block_size=16, is_swizzled_scales=swizzle, orig_dtype=dtype("float32")))
    assert str(q.scheme) == "nvfp4-wo"
    factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(1 if second is None else second)
    np.testing.assert_array_equal(got, E2M1[codes].astype(np.float32) * np.repeat(factor, 16, 1))


@pytest.mark.parametrize(
    ("dynamic", "second", "scheme", "wanted"),
    [(False, 0.5, "nvfp4-static", 0.5), (False, None, "nvfp4-static", 1.0), (True, None, "nvfp4", None)],
)
def test_nvfp4_inputs(dynamic: bool, second: float | None, scheme: str, wanted: float | None) -> None:
    inputs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {"use_dynamic_per_tensor_scale": dynamic}}
    parts = {"qdata": np.zeros((2, 16), np.uint8), "scale": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    if second is not None:
        parts["act_per_tensor_scale"] = torch.tensor(second)
    tensors, metadata = file("NVFP4Tensor", parts, block_size=16, act_quant_kwargs=inputs)
    q = only(reader(metadata), tensors)
    assert str(q.scheme) == scheme
    assert (None if q.act_scale is None else float(q.act_scale)) == wanted


def test_notes() -> None:
    seven = integers("Int8Tensor", 8, (1, 64), False, act_quant_kwargs=int8_inputs(reduce_range=True))[0]
    six = integers("Int8Tensor", 8, (1, 64), False, act_quant_kwargs=int8_inputs())[0]
    none = integers("Int8Tensor", 8, (1, 64), False)[0]
    expected = {"reduce_range": seven, "127.5": six, "float32": plain()[0], "": none}
    for part, made in expected.items():
        made_of = reader(made[1])
        read(made_of, made[0])
        assert len(made_of.notes) == bool(part)
        assert part in "".join(made_of.notes)
    assert ROUNDED.count("float32") == 1


def test_parameters_of_other_names() -> None:
    tensors, said = integers("Int8Tensor", 8, (1, 64), False)[0]
    found = torchao.Reader({}, torch.float32)
    found.metadata = {"a.gate_up_proj": json.dumps(said)}
    tensors = {name.replace("m._weight", "a._gate_up_proj"): tensor for name, tensor in tensors.items()}
    assert list(read(found, tensors)) == ["a.gate_up_proj"]
