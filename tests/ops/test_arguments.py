"""Wrong arguments: each is refused before any kernel sees it, with what was given and what is allowed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bitport.errors import ArgumentError, LayoutError
from bitport.numerics import quantize
from bitport.ops import OPS, Weight, call
from bitport.schemes import preset

N, K = 6, 64
FLOATS = (torch.float32, torch.bfloat16)
NAMES = ("data", "scale", "zero", "scale2", "dtype", "n", "k", "block_n", "block_k", "layout")


def weight(scheme: str = "int4-g32", *batch: int) -> Weight:
    fmt = preset(scheme).weight
    return Weight.of(quantize(torch.randn(*batch, N, K), fmt), fmt, N, K)


def linear(x: Any = None, bias: Any = None, of: str = "int4-g32", **changes: Any) -> torch.Tensor:
    x = torch.randn(3, K) if x is None else x
    return OPS["linear"].overload(x, *weight(of)._replace(**changes), bias)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "x-int": ({"x": torch.ones(3, K, dtype=torch.int32)}, r"x must be float32, bfloat16 or float16, not torch.int32"),
    "x-float64": ({"x": torch.ones(3, K, dtype=torch.float64)}, "not torch.float64"),
    "x-scalar": ({"x": torch.ones(())}, rf"x must have shape \[..., {K}\]"),
    "x-columns": ({"x": torch.ones(3, K - 1)}, rf"\[..., {K}\].*not \[3, {K - 1}\]"),
    "x-device": ({"x": torch.ones(3, K, device="meta")}, "x is on meta, the weight on cpu"),
    "bias-shape": ({"bias": torch.ones(N + 1)}, rf"bias must be float \[{N}\], not torch.float32 \[{N + 1}\]"),
    "bias-2d": ({"bias": torch.ones(1, N)}, rf"not torch.float32 \[1, {N}\]"),
    "bias-device": ({"bias": torch.ones(N, device="meta")}, "bias is on meta, x on cpu"),
    "bias-int": ({"bias": torch.ones(N, dtype=torch.int64)}, rf"bias must be float \[{N}\], not torch.int64"),
    "dtype-unknown": ({"dtype": "int9"}, "int9.*int8"),
    "dtype-other": (
        {"dtype": "int8"},
        rf"int8 {N}x{K}.*needs data torch.uint8.*{N}, {K}\].*not torch.uint8 \[{N}, {K // 2}\]",
    ),
    "dtype-scale-only": ({"dtype": "float8_e8m0"}, "float8_e8m0"),
    "data-dtype": ({"data": torch.ones(N, K // 2, dtype=torch.int8)}, "needs data torch.uint8.*not torch.int8"),
    "data-rows": ({"data": torch.ones(N + 1, K // 2, dtype=torch.uint8)}, rf"not torch.uint8 \[{N + 1}, {K // 2}\]"),
    "data-columns": ({"data": torch.ones(N, K, dtype=torch.uint8)}, rf"{N}, {K // 2}\], not torch.uint8 \[{N}, {K}\]"),
    "data-1d": ({"data": torch.ones(N, dtype=torch.uint8)}, rf"\[{N}\]"),
    "data-device": ({"data": torch.ones(N, K // 2, dtype=torch.uint8, device="meta")}, "meta"),
    "data-batch": (
        {"data": torch.ones(2, N, K // 2, dtype=torch.uint8), "scale": torch.ones(2, N, 2), "zero": None},
        "one weight",
    ),
    "scale-shape": ({"scale": torch.ones(N, 3)}, rf"scale \[{N}, 2\].*not torch.float32 \[{N}, 3\]"),
    "scale-1d": ({"scale": torch.ones(N)}, rf"\[{N}, 2\]"),
    "scale-device": ({"scale": torch.ones(N, 2, device="meta")}, "scale .* on cpu, not .* on meta"),
    "scale-int": ({"scale": torch.ones(N, 2, dtype=torch.int32)}, "float scale .*not torch.int32"),
    "scale-float64": ({"scale": torch.ones(N, 2, dtype=torch.float64)}, "float scale .*not torch.float64"),
    "zero-shape": ({"zero": torch.ones(1, 2, dtype=torch.uint8)}, rf"\[{N}, 2\].*\[1, 2\]"),
    "zero-dtype": ({"zero": torch.ones(N, 2, dtype=torch.int64)}, "zero must be .*not torch.int64"),
    "zero-8-bit": ({"zero": torch.ones(N, 2).to(torch.float8_e4m3fn)}, "zero must be .*not torch.float8_e4m3fn"),
    "zero-device": (
        {"zero": torch.ones(N, 2, dtype=torch.uint8, device="meta")},
        "zero must be .* on cpu, not .* on meta",
    ),
    "zero-of-a-float": (
        {"of": "fp8-wo", "zero": torch.ones(N, 1, dtype=torch.uint8)},
        "a zero goes with an integer type.*not float8_e4m3",
    ),
    "scale2-shape": ({"scale2": torch.ones(1)}, r"scale2 must be float32 \[1, 1\]"),
    "scale2-dtype": ({"scale2": torch.ones(1, 1, dtype=torch.int32)}, "scale2 must be float32.*not torch.int32"),
    "scale2-of-an-int": ({"scale2": torch.ones(1, 1)}, "scale2 goes with float8_e4m3fn scales, not torch.float32"),
    "n-negative": ({"n": -1}, "n=-1"),
    "k-negative": ({"k": -64}, r"\[..., -64\]|k=-64"),
    "n-huge": ({"n": 1 << 62}, str(1 << 62)),
    "block_n-zero": ({"block_n": 0}, "blocks of 0x32"),
    "block_k-zero": ({"block_k": 0}, "blocks of 1x0"),
    "block_k-negative": ({"block_k": -32}, "blocks of 1x-32"),
    "block_k-huge": ({"block_k": 1 << 62}, str(1 << 62)),
    "layout-unknown": ({"layout": "nope"}, "unknown layout 'nope'; known: .*plain"),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [pytest.param(*case, id=name) for name, case in WRONG.items()],
)
def test_linear(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, LayoutError), match=message):
        linear(**changes)


@pytest.mark.parametrize("name", ["dyn_linear", "embedding", "grouped_linear", "dequantize", "repack"])
@pytest.mark.parametrize(
    "change", ["data-rows", "scale-shape", "block_k-zero", "n-negative", "layout-unknown", "dtype-other"]
)
def test_every_op_checks_its_weight(name: str, change: str) -> None:
    changes, _ = WRONG[change]
    batch = (2,) if name == "grouped_linear" else ()
    changes = {at: torch.stack([v, v]) if batch and isinstance(v, torch.Tensor) else v for at, v in changes.items()}
    parts = weight("int4-g32", *batch)._replace(**changes)
    before: dict[str, tuple[Any, ...]] = {
        "dyn_linear": (torch.randn(3, K),),
        "embedding": (torch.tensor([1]),),
        "grouped_linear": (torch.randn(3, K), torch.tensor([1, 3], dtype=torch.int32)),
    }
    after: dict[str, tuple[Any, ...]] = {
        "dyn_linear": ("int8", None, None),
        "embedding": (torch.float32,),
        "dequantize": (torch.float32,),
        "repack": ("plain",),
    }
    with pytest.raises((ArgumentError, LayoutError)):
        call(name, *before.get(name, ()), *parts, *after.get(name, ()))


@pytest.mark.parametrize(
    ("act", "scale", "message"),
    [
        pytest.param("int9", None, "unknown activation 'int9'; known: int8", id="unknown"),
        pytest.param(
            "int8",
            torch.ones(1, 1),
            "is for int8-tensor, fp8-tensor, fp8-e5m2-tensor, nvfp4, not for 'int8'",
            id="static-per-token",
        ),
        pytest.param("int8-tensor", torch.ones(2), r"one float32 number.*\[2\]", id="two-scales"),
        pytest.param(
            "int8-tensor", torch.ones(1, 1, device="meta"), "one float32 number on cpu, not .* on meta", id="device"
        ),
        pytest.param(
            "int8-tensor", torch.ones(1, 1, dtype=torch.float64), "float32 number.*not torch.float64", id="dtype"
        ),
    ],
)
def test_activations(act: str, scale: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        OPS["dyn_linear"].overload(torch.randn(3, K), *weight("int8-dyn"), act, scale, None)
    with pytest.raises(ArgumentError, match=message):
        OPS["quantize_input"].overload(torch.randn(3, K), act, scale)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        pytest.param(torch.ones(2), ArgumentError, "int32 or int64, not torch.float32", id="float"),
        pytest.param(torch.ones(2, dtype=torch.int64, device="meta"), ArgumentError, "ids are on meta", id="device"),
        pytest.param(torch.tensor([N]), IndexError, "out of range", id="past-the-end"),
        pytest.param(torch.tensor([-1]), IndexError, "out of range", id="negative"),
    ],
)
def test_ids(ids: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call("embedding", ids, *weight(), torch.float32)


@pytest.mark.parametrize(
    ("x", "ends", "message"),
    [
        pytest.param(torch.ones(2, 3, K), [1, 2], "grouped x must be", id="x-3d"),
        pytest.param(torch.ones(3, K - 1), [1, 3], rf"x must have shape \[\.\.\., {K}\]", id="x-columns"),
        pytest.param(torch.ones(3, K).double(), [1, 3], "not torch.float64", id="x-float64"),
        pytest.param(torch.ones(3, K), [1, 2, 3], r"ends must be int32 \[2\]", id="one-end-too-many"),
        pytest.param(torch.ones(3, K), [2, 1], "ends must grow", id="not-growing"),
        pytest.param(torch.ones(3, K), [1, 4], "at most 3 rows", id="past-the-rows"),
        pytest.param(torch.ones(3, K), [-1, 3], "ends must grow", id="negative"),
    ],
)
def test_groups(x: torch.Tensor, ends: list[int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        OPS["grouped_linear"].overload(x, torch.tensor(ends, dtype=torch.int32), *weight("int4-g32", 2))


def test_experts_are_for_grouped_products() -> None:
    with pytest.raises(ArgumentError, match=r"linear takes one weight.*use grouped_linear"):
        OPS["dyn_linear"].overload(torch.ones(3, K), *weight("int4-g32", 2), "int8", None, None)
    ends = torch.ones(2, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"one weight per expert \[E, N, K\], not a batch of \[2, 2\]"):
        OPS["grouped_linear"].overload(torch.ones(3, K), ends, *weight("int4-g32", 2, 2))


def test_groups_must_be_int32() -> None:
    with pytest.raises(ArgumentError, match=r"not torch.int64 \[2\]"):
        OPS["grouped_linear"].overload(torch.ones(3, K), torch.tensor([1, 2]), *weight("int4-g32", 2))


@pytest.mark.parametrize("layout", ["tile_packed_2", "tile_packed_8", "plain_int32"])
def test_packed_data_of_a_wrong_shape(layout: str) -> None:
    """Sizes from a file are not trusted: N = 8 is claimed, but the data has 16 rows or another layout."""
    for shape in ((2, 1, 32, 1), (1, 8), (8, 1, 1, 1)):
        parts = (torch.zeros(shape, dtype=torch.int32), torch.ones(2, 8, 2, dtype=torch.bfloat16))
        with pytest.raises((ArgumentError, LayoutError)):
            OPS["linear"].overload(torch.ones(1, 64), *parts, None, None, "int4", 8, 64, 1, 32, layout, None)


@pytest.mark.parametrize(
    ("value", "fmt", "message"),
    [
        pytest.param(torch.ones(4), '{"dtype": "int4", "block": [1, 0]}', "float matrix", id="1d"),
        pytest.param(torch.ones(4, 4, dtype=torch.int8), '{"dtype": "int4", "block": [1, 0]}', "torch.int8", id="int"),
        pytest.param(torch.ones(4, 4), "", "not a format", id="empty"),
        pytest.param(torch.ones(4, 4), "[]", "not a format", id="list"),
        pytest.param(torch.ones(4, 4), '{"dtype": "int4"}', "not a format", id="no-block"),
        pytest.param(torch.ones(4, 4), '{"dtype": "int4", "block": [1, -1]}', "not a format", id="negative-block"),
        pytest.param(
            torch.ones(4, 4), '{"dtype": "int4", "block": [1, 0], "more": 1}', "not a format", id="unknown-key"
        ),
    ],
)
def test_formats(value: torch.Tensor, fmt: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        OPS["quantize"].overload(value, fmt)


def test_dequantize_to_an_integer() -> None:
    with pytest.raises(ArgumentError, match=r"not torch\.int8"):
        OPS["dequantize"].overload(*weight(), torch.int8)


def test_the_checks_run_in_tracers_too() -> None:
    x = torch.ones(3, K - 1, device="meta")
    parts = [part.to("meta") if isinstance(part, torch.Tensor) else part for part in weight()]
    with pytest.raises(ArgumentError, match=f"not .3, {K - 1}."):
        OPS["linear"].overload(x, *parts, None)


@pytest.mark.parametrize("length", [97, 1 << 40])
def test_a_block_longer_than_its_axis_is_the_axis(length: int) -> None:
    x, whole = torch.randn(3, K), weight("int4-channel")
    longer = whole._replace(block_k=length)
    assert torch.equal(call("linear", x, *longer, None), call("linear", x, *whole, None))


@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@pytest.mark.parametrize("name", OPS)
def test_a_tensor_that_is_missing(name: str, gradient: bool) -> None:
    """torch accepts None for a tensor argument. embedding's overload is left out: it runs in C++, from which only the
    text of the error comes back."""
    op = OPS[name]
    args = next(sample for dtype in FLOATS for sample in op.samples(torch.device("cpu"), dtype)).args
    if gradient and args[0].is_floating_point():
        args = (args[0].detach().requires_grad_(), *args[1:])
    tensors = {at: each for at, (each, kind) in enumerate(op.arguments.items()) if kind == "Tensor"}
    assert tensors
    fakes = FakeTensorMode()
    faked = [fakes.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    for at, missing in tensors.items():
        without = [*args[:at], None, *args[at + 1 :]]
        says = f"{missing} must be a tensor, not None"
        runs = [getattr(torch.ops.bitport, name).generic, functools.partial(call, name)]
        for run in runs if name == "embedding" else [op.overload, *runs]:
            with pytest.raises(ArgumentError, match=says):
                run(*without)
        if len(tensors) > 1:  # otherwise no argument is fake
            with fakes, pytest.raises(ArgumentError, match=says):
                op.overload(*faked[:at], None, *faked[at + 1 :])
