"""Quark files against numbers packed by plain Python from their definition, with their values in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import awq, quark

from .files import AWQ_ORDER, E2M1, assert_numbers, held, interleaved, only, read, streamed

N, K, GROUP = 48, 128, 32
E4M3 = torch.float8_e4m3fn
Layer = tuple[dict[str, Tensor], np.ndarray]


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    """In the library's own form, with most keys null."""
    said: dict[str, Any] = {
        **{"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, "observer_cls": "X"},
        **{"ch_axis": None, "group_size": None, "block_size": None, "scale_format": None, "scale_type": "float"},
        **{"round_method": "half_even", "is_scale_quant": False, "mx_element_dtype": None, "zero_point_type": "int32"},
    }
    return said | more


def config(weight: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}
    return {
        **{"quant_method": "quark", "algo_config": None, "exclude": ["lm_head"], "layer_quant_config": {}},
        **{"global_quant_config": layer, "layer_type_quant_config": {}, "quant_mode": "eager_mode", "version": "0.13"},
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng().uniform(0.001, 0.1, shape)).to(dtype)


def wide(scale: Tensor, rows: int, columns: int) -> np.ndarray:
    return np.repeat(np.repeat(scale.double().numpy(), rows, 0)[:N], columns, 1)[:, :K]


def float8(scale: Tensor, stored: tuple[int, ...], rows: int, columns: int, **more: Tensor) -> Layer:
    codes = rng().integers(0, 127, (N, K)).astype(np.uint8)
    tensors = {"weight": torch.from_numpy(codes).view(E4M3), "weight_scale": scale.reshape(stored), **more}
    return tensors, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * wide(scale, rows, columns)


def powers(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    exponents = torch.from_numpy(rng().integers(100, 140, (rows, columns)).astype(np.uint8))
    return exponents, torch.ldexp(torch.ones(rows, columns), exponents.int() - 127)


def float4(**more: Tensor) -> Layer:
    codes, (exponents, scale) = rng().integers(0, 16, (N, K)), powers(N, K // 32)
    return {"weight": streamed(codes, 4), "weight_scale": exponents, **more}, E2M1[codes] * wide(scale, 1, 32)


def float6() -> Layer:
    codes, (exponents, scale) = rng().integers(0, 64, (N, K)).astype(np.uint8), powers(N, K // 32)
    value = codes.view(ml_dtypes.float6_e2m3fn).astype(np.float64)
    return {"weight": streamed(codes, 6), "weight_scale": exponents}, value * wide(scale, 1, 32)


def nvfp4() -> Layer:
    codes = rng().integers(0, 16, (N, K))
    inner = torch.from_numpy(rng().integers(1, 127, (N, K // 16)).astype(np.uint8)).view(E4M3)
    tensors = {"weight": streamed(codes, 4), "weight_scale": inner}
    tensors |= {"weight_scale_2": torch.tensor(0.0123), "input_scale_2": torch.tensor(0.5)}
    both = inner.float() * torch.tensor(0.0123)  # in float32, as every implementation multiplies them
    return tensors, E2M1[codes] * wide(both, 1, 16)


def int4(signed: bool, symmetric: bool, order: tuple[int, ...] = AWQ_ORDER, n: int = N) -> Layer:
    low = -8 if signed else 0
    codes = rng().integers(low, low + 16, (n, K))
    zero = np.zeros((n, K // GROUP), dtype=np.int64) if symmetric else rng().integers(low, low + 16, (n, K // GROUP))
    scale = scales(n, K // GROUP, dtype=torch.bfloat16)
    tensors = {
        "weight": torch.from_numpy(interleaved(codes.T, order)),
        "weight_scale": scale.t().contiguous(),
        "weight_zero_point": torch.from_numpy(interleaved(zero.T, order)),
    }
    return tensors, (codes - np.repeat(zero, GROUP, 1)) * np.repeat(scale.double().numpy(), GROUP, 1)


def int4_rows() -> Layer:
    codes, zero = rng().integers(-8, 8, (N, K)), rng().integers(-8, 8, (1, N))
    scale = scales(N, dtype=torch.bfloat16)
    packed, zeros = (torch.from_numpy(interleaved(each)) for each in (codes, zero))
    tensors = {"weight": packed, "weight_scale": scale, "weight_zero_point": zeros[0]}
    return tensors, (codes - zero.T) * scale.double().numpy()[:, None]


def int8(stored: tuple[int, ...], scale: Tensor, columns: int, *, groups: bool = False, **more: Tensor) -> Layer:
    codes = rng().integers(-128, 128, (N, K)).astype(np.int8)
    value = codes * wide(scale, N // scale.shape[0], columns)
    weight, scale = torch.from_numpy(codes), scale.reshape(stored) if not groups else scale.t().contiguous()
    zero = torch.zeros(scale.shape, dtype=torch.int8)
    return {
        "weight": weight.t().contiguous() if groups else weight,
        "weight_scale": scale,
        "weight_zero_point": zero,
        **more,
    }, value


F8, F8_ROW = spec("fp8_e4m3", "per_tensor"), spec("fp8_e4m3", "per_channel", ch_axis=0)
F8_TOKEN = spec("fp8_e4m3", "per_channel", ch_axis=1, is_dynamic=True)
MX4 = spec("fp4", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0", symmetric=None)
MX = {**MX4, "is_dynamic": True, "scale_calculation_mode": "even"}
MX6, MX8 = {**MX4, "dtype": "fp6_e2m3"}, {**MX4, "dtype": "fp8_e4m3"}
BLOCKS = spec("fp8_e4m3", "per_block", block_size=[32, 64])
POWERS = spec("fp8_e4m3", "per_block", block_size=[128, 128], scale_type="float8_e8m0fnu")
BY_128 = spec("fp8_e4m3", "per_group", ch_axis=-1, group_size=128, is_dynamic=True)
NV4 = [
    spec("fp4", "per_group", ch_axis=-1, group_size=16, scale_format="float32", scale_type="float32", symmetric=None),
    spec("fp8_e4m3", "per_tensor", is_scale_quant=True, scale_type="float32"),
]
NV4_INPUTS = [{**NV4[0], "is_dynamic": True}, NV4[1]]
I4 = spec("int4", "per_group", ch_axis=1, group_size=GROUP)
I4_ROW = spec("int4", "per_channel", ch_axis=0)
I8, I8_ROW = spec("int8", "per_tensor"), spec("int8", "per_channel", ch_axis=0)
I8_TOKEN = spec("int8", "per_channel", ch_axis=1, is_dynamic=True)
FIXED, ZERO = torch.tensor(0.25), torch.zeros((), dtype=torch.int8)
MIXED = "custom(float4_e2m1-g32, e8m0 scales, static fp8-tensor inputs)"

CASES: dict[str, tuple[Any, Any, Callable[[], Layer], str]] = {
    "fp8": (F8, F8, lambda: float8(scales(1, 1), (), N, K, input_scale=FIXED), "fp8-static"),
    "fp8 dynamic": (F8, {**F8, "is_dynamic": True}, lambda: float8(scales(1, 1), (1,), N, K), "fp8"),
    "fp8 weights": (F8, None, lambda: float8(scales(1, 1, dtype=torch.bfloat16), (), N, K), "fp8-wo-tensor"),
    "fp8 by row and token": (F8_ROW, F8_TOKEN, lambda: float8(scales(N, 1), (N,), 1, K), "fp8-row"),
    "fp8 by blocks": (BLOCKS, None, lambda: float8(scales(2, 2), (2, 2), 32, 64), "fp8-b32x64-wo"),
    "fp8 by powers": (POWERS, BY_128, lambda: float8(torch.tensor([[0.25]]), (1, 1), N, K), "fp8-block"),
    "mxfp8": (MX8, {**MX8, "is_dynamic": True}, lambda: mxfp8(), "mxfp8"),
    "mxfp6": (MX6, None, float6, "mxfp6-wo"),
    "mxfp4": (MX4, MX, float4, "mxfp4"),
    "mxfp4, fp8": (MX4, F8, lambda: float4(input_scale=FIXED), MIXED),
    "nvfp4": (NV4, NV4_INPUTS, nvfp4, "nvfp4-static"),
    "int4": (I4, None, lambda: int4(True, True), "int4-g32-sym"),
    "int4 with zeros": ({**I4, "symmetric": False}, None, lambda: int4(True, False), "int4-g32"),
    "uint4": ({**I4, "dtype": "uint4", "symmetric": False}, None, lambda: int4(False, False), "int4-g32"),
    "uint4 from zero on": ({**I4, "dtype": "uint4"}, None, lambda: int4(False, True), "int4-g32"),
    "int4 by row": ({**I4_ROW, "symmetric": False}, None, int4_rows, "int4-channel"),
    "int8": (I8_ROW, I8_TOKEN, lambda: int8((N,), scales(N, 1), K), "int8-dyn"),
    "int8 fixed": (
        I8,
        I8,
        lambda: int8((), scales(1, 1), K, input_scale=FIXED, input_zero_point=ZERO),
        "int8-static-tensor",
    ),
    "int8 by groups": (
        {**I4, "dtype": "int8"},
        None,
        lambda: int8((), scales(N, K // GROUP), GROUP, groups=True),
        "int8-g32",
    ),
}


def mxfp8() -> Layer:
    exponents, scale = powers(N, K // 32)
    tensors, value = float8(scale, scale.shape, 1, 32)
    return {**tensors, "weight_scale": exponents}, value


def named(tensors: dict[str, Tensor], module: str = "m") -> dict[str, Tensor]:
    return {f"{module}.{role}": tensor for role, tensor in tensors.items()}


def reader(weight: Any, inputs: Any = None, **more: Any) -> quark.Reader:
    return quark.Reader(config(weight, inputs, **more), torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_definition(case: str) -> None:
    weight, inputs, layer, name = CASES[case]
    tensors, value = layer()
    q = only(reader(weight, inputs), {**named(tensors), "norm.weight": torch.ones(3)})
    assert (str(q.scheme), q.dtype, tuple(q.shape)) == (name, torch.bfloat16, (N, K))
    assert_numbers(q, value.astype(np.float32))
    fixed = tensors.get("input_scale", tensors.get("input_scale_2"))
    assert (q.act_scale is None) == (fixed is None)
    assert fixed is None or torch.equal(q.act_scale.reshape(()), fixed)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [48, 44])
def test_words_in_their_order(n: int) -> None:
    """Including rows that do not fill whole words."""
    for method, order in (("order", tuple(range(8))), ("reorder", AWQ_ORDER)):
        export = {"kv_cache_group": [], "pack_method": method, "weight_format": "real_quantized"}
        tensors, value = int4(True, False, order, n)
        q = only(reader({**I4, "symmetric": False}, export=export), named(tensors))
        assert_numbers(q, value.astype(np.float32))


def test_weights_without_zero_points_in_the_file() -> None:
    tensors, value = int4(True, True)
    del tensors["weight_zero_point"]
    q = only(reader(I4), named(tensors))
    assert_numbers(q, value.astype(np.float32))


@pytest.mark.parametrize("method", ["order", "reorder"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_files_in_the_form_of_awq(symmetric: bool, method: str) -> None:
    """Without zero points, its codes are signed, unlike those of AWQ."""
    tensors, value = int4(symmetric, symmetric, AWQ_ORDER if method == "reorder" else tuple(range(8)))
    names = {"weight": "qweight", "weight_scale": "scales", "weight_zero_point": "qzeros"}
    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": not symmetric}
    made = awq.Reader({**said, "pack_method": method}, torch.bfloat16)
    q = only(made, {f"m.{names[role]}": tensor for role, tensor in tensors.items()})
    assert str(q.scheme) == ("int4-g32-sym" if symmetric else "int4-g32")
    assert_numbers(q, value.astype(np.float32))
    for more in ({"pack_method": "odd"}, {"pack_method": "order", "version": "gemv"}):
        with pytest.raises(CheckpointError, match="pack_method"):
            awq.Reader({**said, **more}, torch.bfloat16)


def layer_of(weight: Any, inputs: Any = None, outputs: Any = None) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": outputs, "bias": None, "target_device": None}


def test_settings_of_single_layers() -> None:
    """The first matching name or pattern takes precedence, then the class, then the global settings."""
    own = {"l.b.own": layer_of(I4), "*.b.*": layer_of(I8_ROW, I8_TOKEN), "*.own": layer_of(F8_ROW, F8_TOKEN)}
    own["l.b.m"] = layer_of(I8_ROW)
    made = reader(MX4, layer_quant_config=own, exclude=["re:.*router", "l.*.head"])
    of_int8, of_int4, of_float4 = int8((N,), scales(N, 1), K)[0], int4(True, True)[0], float4()[0]
    tensors = {**named(of_int8, "l.b.m"), **named(of_int4, "l.b.own"), **named(of_float4, "l.c.m")}
    schemes = {name: str(q.scheme) for name, q in read(made, tensors).items()}
    assert schemes == {"l.b.m.weight": "int8-dyn", "l.b.own.weight": "int4-g32-sym", "l.c.m.weight": "mxfp4-wo"}
    classes = {"Linear": layer_of(I8_ROW, I8_TOKEN)}
    q = only(reader(MX4, layer_type_quant_config=classes), named(of_int8))
    assert str(q.scheme) == "int8-dyn"
    for module in ("l.router", "l.c.head"):
        with pytest.raises(CheckpointError, match=f"{module} has quantized tensors, and .* excludes it"):
            read(made, named(of_float4, module))


def test_scales_of_a_cache_are_left_out() -> None:
    layer = layer_of(F8, F8, F8)
    export = {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder", "weight_format": "real_quantized"}
    own = {"*k_proj": layer, "*v_proj": layer, "*q_proj": layer}
    tensors, _ = float8(scales(1, 1), (), N, K, input_scale=FIXED)
    one = torch.tensor(1.0)
    cache = {"l.k_proj.output_scale": one, "l.attn.v_scale": one, "l.attn.prob_output_scale": one}
    made = reader(F8, F8, layer_quant_config=own, export=export)
    every = held({**named(tensors, "l.k_proj"), **cache})
    assert [weight.name for weight in made.weights(every)] == ["l.k_proj.weight"]
    assert list(made.dropped(every)) == list(cache)
    reader(F8, F8, layer_quant_config={"l.0.k_proj": layer}, export=export)
    with pytest.raises(CheckpointError, match=r"l\.k_proj\.output_scale, torch\.float32, belongs to no weight"):
        reader(F8, F8).weights(every)
    with pytest.raises(CheckpointError, match=r"\*k_proj has output_tensors"):
        reader(F8, F8, layer_quant_config=own)
    with pytest.raises(CheckpointError, match="global_quant_config has output_tensors"):
        quark.Reader({**config(F8), "global_quant_config": layer}, torch.bfloat16)


def test_what_is_told() -> None:
    assert reader(MX4, MX).notes == []
    (note,) = reader(MX4, {**MX, "scale_calculation_mode": "floor"}).notes
    assert "'floor' there, and by 'even' here" in note
    (note,) = reader(F8, softmax_quant_spec=F8).notes
    assert "softmax_quant_spec" in note


@pytest.mark.parametrize(
    ("weight", "inputs", "reason"),
    [
        ({**F8, "dtype": "int3"}, None, "dtype 'int3'"),
        ({**F8, "dtype": "mx", "mx_element_dtype": "fp4"}, None, "dtype 'mx'"),
        ({**F8, "dtype": ["fp4"]}, None, "dtype must be str"),
        ({**F8, "qscheme": "odd"}, None, "qscheme 'odd'"),
        ({**F8, "qscheme": None}, None, "qscheme must be str"),
        ({**F8, "is_dynamic": True}, None, "is dynamic"),
        ({**F8, "new": 1}, None, "new is not understood"),
        ({**F8_ROW, "ch_axis": 1}, None, "per_channel with ch_axis 1"),
        ({**I4, "ch_axis": 0}, None, "per_group with ch_axis 0"),
        ({**I4, "group_size": None}, None, "group_size must be int"),
        ({**I4, "group_size": 0}, None, "group_size=0"),
        ({**I4, "symmetric": None}, None, "symmetric must be bool"),
        ({**I4, "zero_point_type": "float32"}, None, "zero points that are no integers"),
        ({**I4, "qscheme": "per_tensor"}, None, "int4 per_tensor is not read"),
        ({**I4, "scale_format": "e8m0"}, None, "is not read"),
        ({**MX4, "group_size": 64}, None, "is not read"),
        ({**MX4, "scale_format": "e5m3"}, None, "scale_format 'e5m3'"),
        ({**F8, "scale_type": "odd"}, None, "scale_type 'odd'"),
        ({**BLOCKS, "block_size": [32]}, None, r"block_structure=\[32\]"),
        ({**BLOCKS, "block_size": None}, None, "block_size must be list"),
        ([NV4[0], NV4[1], NV4[1]], None, "3 levels"),
        ([MX4, NV4[1]], None, "two levels of scales are read of fp4"),
        ([NV4[0], {**NV4[1], "dtype": "int8"}], None, "two levels of scales are read of fp4"),
        (["fp4"], None, "a list of them"),
        (F8, F8_ROW | {"ch_axis": 1}, "inputs of global_quant_config"),
        (F8, {**F8_TOKEN, "ch_axis": -1}, "per_channel with ch_axis -1"),
        (F8, {**I8, "symmetric": False}, "inputs of global_quant_config"),
        (F8, {**I8_TOKEN, "dtype": "uint8", "symmetric": False}, "dtype 'uint8'"),
        (MX6, {**MX6, "is_dynamic": True}, "num_bits=6"),
        (None, F8, "input_tensors without a weight"),
    ],
)
def test_specifications_that_are_not_read(weight: Any, inputs: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        reader(weight, inputs)


EXPORT = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"export": None}, "export must be dict"),
        ({"export": {**EXPORT, "weight_format": "fake_quantized"}}, "'fake_quantized'"),
        ({"export": {**EXPORT, "pack_method": "odd"}}, "'odd'"),
        ({"exclude": "lm_head"}, "exclude must be list"),
        ({"exclude": [1]}, "list of strings"),
        ({"exclude": ["re:("]}, "no regular expression"),
        ({"algo_config": [{"name": "svdquant"}]}, "the algorithm 'svdquant'"),
        ({"algo_config": [{"name": "rotation", "r1": True, "r3": True}]}, "the algorithm 'rotation'"),
        ({"algo_config": {"name": "rotation", "online_r1_rotation": True}}, "the algorithm 'rotation'"),
        ({"algo_config": ["awq"]}, "the algorithm None"),
        ({"layer_quant_config": {"m": F8}}, "dtype is not understood"),
        ({"layer_quant_config": {"m": {**layer_of(F8), "bias": F8}}}, "layer_quant_config of m has a quantized bias"),
        ({"global_quant_config": None}, "global_quant_config must be dict"),
        ({"new": True}, "new is not understood"),
    ],
)
def test_settings_that_are_not_read(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        reader(F8, **change)


def test_algorithms_that_leave_nothing_behind() -> None:
    rotation = {"name": "rotation", "r1": True, "r2": True, "r3": False, "r4": False, "online_r1_rotation": False}
    reader(F8, algo_config=[{"name": "autosmoothquant", "scaling_layers": []}, {"name": "gptq"}, rotation])
    reader(F8, algo_config={"name": "awq"})


def test_layers_of_which_nothing_is_said() -> None:
    with pytest.raises(CheckpointError, match="does not say of which kind"):
        read(reader(None), named(float8(scales(1, 1), (), N, K)[0]))


DAMAGED: list[tuple[str, str, Tensor | None]] = [
    ("fp8", "weight", torch.zeros(N, K)),
    ("fp8", "weight", torch.zeros(2, N, K).to(E4M3)),
    ("fp8", "weight", torch.zeros(0, K).to(E4M3)),
    ("fp8", "weight", None),
    ("fp8", "weight_scale", torch.zeros(N)),
    ("fp8", "weight_scale", torch.zeros((), dtype=torch.int32)),
    ("fp8", "weight_scale", None),
    ("fp8", "input_scale", torch.zeros(2)),
    ("fp8", "input_scale", None),
    ("fp8", "bias_scale", torch.zeros(())),
    ("fp8", "input_rotation", torch.zeros(K, K, dtype=torch.int8)),
    ("fp8 weights", "input_scale", torch.zeros(())),
    ("fp8 by row and token", "weight_scale", torch.zeros(())),
    ("fp8 by row and token", "weight_scale", torch.zeros(1, N)),
    ("fp8 by blocks", "weight_scale", torch.zeros(4)),
    ("fp8 by blocks", "weight_scale", torch.zeros(2, 2, dtype=torch.uint8)),
    ("mxfp6", "weight", torch.zeros(N, 97, dtype=torch.uint8)),
    ("mxfp4", "weight", torch.zeros(N, K // 2, dtype=torch.int8)),
    ("mxfp4", "weight_scale", torch.zeros(N, K // 32)),
    ("mxfp4", "weight_scale", torch.zeros(N, K // 16, dtype=torch.uint8)),
    ("nvfp4", "weight_scale", torch.zeros(N, K // 16)),
    ("nvfp4", "weight_scale_2", torch.zeros(2)),
    ("nvfp4", "weight_scale_2", None),
    ("nvfp4", "input_scale_2", None),
    ("int4", "weight", torch.zeros(K, N // 8 + 1, dtype=torch.int32)),
    ("int4", "weight", torch.zeros(K, N // 8)),
    ("int4", "weight", torch.zeros(N, K // 8, dtype=torch.int32)),
    ("int4", "weight_scale", torch.ones(N, K // GROUP)),
    ("int4", "weight_scale", torch.ones(())),
    ("int4", "weight_zero_point", torch.zeros(K // GROUP, N, dtype=torch.int32)),
    ("int4", "weight_zero_point", torch.zeros(K // GROUP, N // 8, dtype=torch.int64)),
    ("int4 with zeros", "weight_zero_point", None),
    ("uint4 from zero on", "weight_zero_point", None),
    ("int4 by row", "weight_zero_point", torch.zeros(N, dtype=torch.int32)),
    ("int4 by row", "weight_zero_point", torch.zeros((), dtype=torch.int32)),
    ("int4 by row", "weight_scale", torch.ones(N - 1)),
    ("int8", "weight", torch.zeros(N, K, dtype=torch.uint8)),
    ("int8", "weight_scale", torch.zeros(K)),
    ("int8", "weight_zero_point", torch.zeros(K, dtype=torch.int8)),
    ("int8 fixed", "input_zero_point", torch.ones((), dtype=torch.int8)),
    ("int8 by groups", "weight", torch.zeros(N, K, dtype=torch.int8)),
]


@pytest.mark.parametrize(("case", "role", "tensor"), DAMAGED)
def test_damaged_tensors_are_errors(case: str, role: str, tensor: Tensor | None) -> None:
    weight, inputs, layer, _ = CASES[case]
    tensors = {**layer()[0], role: tensor}
    with pytest.raises(BitportError, match=r"m\."):
        read(reader(weight, inputs), named({role: each for role, each in tensors.items() if each is not None}))
