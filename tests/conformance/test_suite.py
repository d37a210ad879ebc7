"""The conformance suite tells a right kernel from a wrong one, and says which ran."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.conformance import run, suite
from bitport.conformance.command import main
from bitport.conformance.suite import never_chosen, subject
from bitport.errors import ArgumentError, DeviceError
from bitport.layouts import Matrix, register_layout
from bitport.layouts.plain import Plain
from bitport.numerics import Quantized
from bitport.ops import OPS, Impl, Sample, register_kernel, unregister_kernel, use_kernel
from bitport.ops.outside import OUTSIDE, Outside

pytestmark = pytest.mark.usefixtures("own_tables")


def of_everything(name: str, scale: float = 1.0) -> Impl:
    """A kernel for embedding that takes every call: the generic one, its result times ``scale``."""

    def kernel(*args: object) -> Tensor:
        return OPS["embedding"].generic(*args) * scale

    return Impl("embedding", name, "cpu", kernel, lambda *args: None, priority=1 << 20)


def test_the_cpu_passes_with_its_own_kernels() -> None:
    rows = run("cpu", ["embedding", "quantized_matmul"])
    assert {row.dtype for row in rows} == {"float32", "bfloat16", "float16"}
    assert {row.op for row in rows} == {"embedding", "quantized_matmul"}
    assert all(row.passed and row.margin >= 0 and row.samples > 0 for row in rows)


def test_the_kernel_that_ran_is_named() -> None:
    register_kernel(of_everything("mine"))
    assert {row.kernels for row in run("cpu", ["embedding"])} == {("mine",)}


def test_kernels_that_are_not_chosen_are_tried_and_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel of lower priority is judged like the first; one that takes no sample is reported, since it may refuse by
    mistake."""
    op, generic = "int4pack_mm", OPS["int4pack_mm"].generic
    for name, priority, reason in (("first", 3, None), ("second", 2, None), ("shy", 1, "not today")):
        wrong = 2 if name == "second" else 1
        run_it = lambda *args, wrong=wrong: generic(*args) * wrong  # noqa: E731
        register_kernel(Impl(op, name, "cpu", run_it, lambda *args, reason=reason: reason, priority))
    assert main(["--ops", op]) == 1
    said = capsys.readouterr()
    assert "never chosen: second of int4pack_mm: another comes first wherever it could run" in said.out
    assert "never chosen: shy of int4pack_mm: it took no sample" in said.out
    assert "first of" not in said.out
    assert "-rows, forced second: " in said.err
    assert said.err.count("FAILED") == said.err.count("forced second")
    rows = run("cpu", [op])
    assert {(row.kernels, row.forced) for row in rows} == {(("first",), ("second",))}
    with use_kernel("first"):
        assert never_chosen("cpu", run("cpu", [op])) == []


def test_a_device_without_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a backend may name another device by mistake."""
    assert never_chosen("cpu", []) == []
    monkeypatch.setattr(suite, "IMPLS", {("linear", "cup"): [of_everything("mine")]})
    assert never_chosen("cpu", []) == ["no kernel is registered for cpu; there are kernels for cup"]


def test_every_product_of_the_cpu_takes_a_sample() -> None:
    rows = run("cpu", ["linear"], [torch.bfloat16])
    assert {row.dtype for row in rows} == {"bfloat16"}
    assert [line for line in never_chosen("cpu", rows) if "took no sample" in line] == []


def test_a_kernel_slightly_off_fails_where_that_is_more_than_rounding() -> None:
    """A result off by 2^-10 has an SQNR of 60.2 dB: below the budgets of float32 and float16, above that of bfloat16
    (48.2 dB), whose own rounding adds to it."""
    register_kernel(of_everything("off", scale=1 + 2**-10))
    rows = [row for row in run("cpu", ["embedding"]) if row.sqnr != math.inf]
    assert {row.dtype for row in rows if row.failures} == {"float32", "float16"}
    worst = min(row.sqnr for row in rows if row.dtype == "float32")
    assert worst == pytest.approx(60.2, abs=0.1)


def test_a_kernel_that_raises_is_a_failure_with_its_message(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*args: object) -> Tensor:
        raise RuntimeError("no such instruction")

    register_kernel(Impl("embedding", "broken", "cpu", broken, lambda *args: None, priority=1 << 20))
    rows = run("cpu", ["embedding"])
    assert not any(row.passed for row in rows)
    printed = "no such instruction" in capfd.readouterr().err  # before PyTorch 2.13
    said = "torch has printed why" if printed else "RuntimeError: no such instruction"
    assert all(said in failure for row in rows for failure in row.failures)


def test_a_result_of_the_wrong_size_is_a_failure() -> None:
    def short(*args: object) -> Tensor:
        return OPS["embedding"].generic(*args)[..., :-1]

    register_kernel(Impl("embedding", "short", "cpu", short, lambda *args: None, priority=1 << 20))
    full = run("cpu", ["embedding"], [torch.float32])
    assert full
    assert all(any("71] on cpu, not" in failure for failure in row.failures) for row in full if row.subject == "int8")
    assert not any(row.passed for row in full)


def test_a_result_of_another_kind_is_a_failure() -> None:
    """Traced programs assume the shape, dtype and strides of the generic kernel's result."""
    ways = {
        "not torch.float16": lambda y: y.float(),
        r"\[\d+\] on cpu, not": lambda y: y.reshape(-1),
        "is not contiguous": lambda y: y.mT.contiguous().mT if y.dim() > 1 else y,
        "nan dB": lambda y: y * torch.nan,
    }
    for said, changed in ways.items():

        def other(*args: Any, changed: Any = changed) -> Tensor:
            return changed(OPS["embedding"].generic(*args))

        kernel = Impl("embedding", "other", "cpu", other, lambda *args: None, priority=1 << 20)
        register_kernel(kernel)
        rows = run("cpu", ["embedding"], [torch.float16])
        assert rows
        assert all(any(re.search(said, failure) for failure in row.failures) for row in rows), said
        assert all(row.sqnr == -math.inf for row in rows), said
        unregister_kernel(kernel)


def test_a_kernel_that_returns_nothing_is_a_failure() -> None:
    """It ended the run with a TypeError."""
    register_kernel(Impl("quantized_matmul", "forgetful", "cpu", lambda *args: None, lambda *args: None, 1 << 20))
    rows = run("cpu", ["quantized_matmul"], [torch.bfloat16])
    assert rows
    assert all("the result is of type NoneType, not a tensor" in failure for row in rows for failure in row.failures)
    assert not any(row.passed for row in rows)


@pytest.mark.parametrize("error", [IndexError, KeyError, ValueError, AttributeError, AssertionError, ZeroDivisionError])
def test_the_suite_goes_on_behind_any_error(error: type[Exception]) -> None:
    def broken(*args: object) -> Any:
        raise error("not yet")

    take: Any = lambda *args: None  # noqa: E731
    for name, run_it, supports in (("runs", broken, take), ("refuses", take, broken)):
        kernel = Impl("quantized_matmul", name, "cpu", run_it, supports, priority=1 << 20)
        register_kernel(kernel)
        rows = run("cpu", ["quantized_matmul"])
        assert len(rows) > 3
        assert all(f"{error.__name__}: " in failure for row in rows for failure in row.failures)
        assert not any(row.passed for row in rows)
        unregister_kernel(kernel)


def test_a_kernel_that_writes_into_its_arguments_is_a_failure() -> None:
    def greedy(x: Tensor, *rest: object) -> Tensor:
        result = OPS["linear"].generic(x, *rest)
        data = rest[0]
        assert isinstance(data, Tensor)
        data.view(torch.uint8).add_(1)
        return result

    register_kernel(Impl("linear", "greedy", "cpu", greedy, lambda *args: None, priority=1 << 20))
    failures = [failure for row in run("cpu", ["linear"]) for failure in row.failures]
    assert failures
    assert all("wrote into its arguments [1]" in failure for failure in failures)


def test_unknown_ops_are_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown ops"):
        run("cpu", ["convolution_of_everything"])
    with pytest.raises(ArgumentError, match=r"inputs of torch.float32, .* not torch.int8"):
        run("cpu", ["linear"], [torch.int8])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8-row", "int8"),
        ("int8-asym-row", "int8-asym"),
        ("int4-g32-sym-every-other", "int4-g32-sym"),
        ("mxfp8", "mxfp8"),
        ("inner2-g32-rows", "inner2-g32"),
        ("channel-sym-w8a16", "channel-sym-w8a16"),
    ],
)
def test_subject(name: str, expected: str) -> None:
    assert subject(name) == expected


def test_weights_are_tried_as_they_lie_on_the_device() -> None:
    """A kernel that only takes the device's own layout is judged too."""

    class Reversed(Plain):
        name, devices = "reversed", ("cpu",)

        def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
            return parts._replace(data=parts.data.view(torch.uint8).flip(-1).view(parts.data.dtype))

        unpack = pack

    def supports(ids: Tensor, *rest: object) -> str | None:
        return None if rest[9] == "reversed" else "only its own layout"

    def wrong(ids: Tensor, *rest: object) -> Tensor:
        return torch.zeros(*ids.shape, rest[6], dtype=rest[10])  # type: ignore[arg-type, call-overload]

    register_layout(Reversed())
    register_kernel(Impl("embedding", "own", "cpu", wrong, supports, priority=1 << 20))
    rows = [row for row in run("cpu", ["embedding"]) if row.subject == "int4" and row.dtype == "float32"]
    assert {failure.split(":")[0] for row in rows for failure in row.failures} == {
        f"int4-{shape}-reversed, own" for shape in ("vector", "matrix", "scalar", "large", "whole-large", "odd-large")
    }
    assert {kernel for row in rows for kernel in row.kernels} == {"own", "generic"}


class Tiles(Plain):
    """Only matrices of whole tiles, in an order that is not undone."""

    name, devices = "tiles", ("cpu",)

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        return (
            f"N and K must be multiples of 64, not {matrix.n} and {matrix.k}"
            if matrix.n % 64 or matrix.k % 64
            else None
        )

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(data=parts.data.view(torch.uint8).flip(-1).view(parts.data.dtype))


@pytest.mark.parametrize("op", ["repack", "dequantize", "embedding"])
def test_a_layout_of_whole_tiles_is_tried(op: str) -> None:
    """No sample had such a size, so a layout that loses every weight passed."""
    register_layout(Tiles())
    rows = run("cpu", [op], [torch.bfloat16])
    failures = [failure for row in rows for failure in row.failures]
    assert failures
    assert all("whole" in failure for failure in failures)
    assert not next(row for row in rows if row.subject == "int4").passed


def test_layouts_that_hold_no_sample_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    class Never(Plain):
        name, devices = "never", ("cpu",)

        def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
            return "not today"

    class Shadowed(Plain):
        name, devices = "shadowed", ("cpu",)

    class Last(Plain):
        name, devices = "last", ("cpu",)

    for layout in (Never, Shadowed, Last):
        register_layout(layout())
    assert main(["--ops", "int4pack_mm"]) == 0
    out = capsys.readouterr().out
    assert "never used: layout never: it takes no sample" in out
    assert "never used: layout shadowed: another comes first wherever it could be" in out
    assert "layout last" not in out


class Preferred(Plain):
    name, devices = "preferred", ("cpu",)


class OfFloats(Preferred):
    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        return parts._replace(scale=parts.scale.float())


class Unready(Preferred):
    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        raise NotImplementedError("no such shift")


class Undecided(Preferred):
    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        raise KeyError(matrix.dtype)


@pytest.mark.parametrize(
    ("layout", "op", "said"),
    [
        (
            OfFloats,
            "repack",
            r"int2-plain-preferred, generic: scale, torch.float32 \[24, 1\], has other bits than it should have",
        ),
        (Unready, "dequantize", "int2-e0, packed for cpu: NotImplementedError: no such shift"),
        (Unready, "repack", "int2-preferred, generic: NotImplementedError: no such shift"),
        (Undecided, "dequantize", "int2-e0, packed for cpu: KeyError: 'int2'"),
        (
            Undecided,
            "repack",
            r"behind int2-plain: KeyError: 'int2' \[.*test_suite.py:\d+, in refuses\]; those behind it were not tried",
        ),
    ],
)
def test_a_layout_in_the_making(layout: type[Plain], op: str, said: str) -> None:
    """The suite reports what is wrong with an unfinished layout, and goes on."""
    register_layout(layout())
    rows = [row for row in run("cpu", [op]) if row.dtype == "bfloat16"]
    assert any(re.search(said, failure) for row in rows for failure in row.failures)


def test_parts_that_are_missing_are_a_failure() -> None:
    def short(*args: object) -> list[Tensor]:
        return OPS["quantize_input"].generic(*args)[:2]

    register_kernel(Impl("quantize_input", "short", "cpu", short, lambda *args: None, priority=1 << 20))
    failures = [failure for row in run("cpu", ["quantize_input"]) for failure in row.failures]
    assert failures
    assert all("the result has 2 tensors, not 4" in failure for failure in failures)


def test_samples_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        asked.append(device)
        return iter(())

    monkeypatch.setitem(OPS, "dequantize", dataclasses.replace(OPS["dequantize"], samples=samples))
    assert run("cpu:0", ["dequantize"]) == []
    assert asked == [torch.device("cpu:0")] * 3


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Outside:
    """A device of another library: two kernels, of which one rounds once more, and no support for scalar ids."""

    def kernel(op: str, *args: Any) -> Tensor:
        return OPS[op].generic(*args)

    def rough(op: str, *args: Any) -> Tensor:
        return kernel(op, *args).to(torch.bfloat16).to(args[-1])

    def refuses(op: str, ids: Tensor, *rest: Any) -> str | None:
        return None if ids.dim() else "no scalars"

    place = Outside("Elsewhere on a chip", "elsewhere 1.2", {"plain": kernel, "rough": rough}, refuses)
    monkeypatch.setitem(OUTSIDE, "privateuseone", lambda: place)
    return place


def test_a_device_of_another_library_computes_in_every_way_it_has(elsewhere: Outside) -> None:
    rows = run("privateuseone", ["embedding"])
    assert {row.kernels for row in rows} == {("plain", "rough")}
    assert {row.samples for row in rows} == {2 * 6}  # ids as a vector, as a matrix, none, and many for three tables
    assert {row.dtype for row in rows if row.failures} == {"float32", "float16"}  # "rough" rounds to bfloat16
    assert all("dB, at least" in line for row in rows for line in row.failures)


def test_what_it_refuses_is_told_apart_from_what_fails(elsewhere: Outside) -> None:
    rows = [row for row in run("privateuseone", ["embedding"]) if row.subject == "nf4"]
    assert [row.refused for row in rows] == [("nf4-scalar: no scalars",)] * 3


def test_its_results_are_judged_like_any_other(elsewhere: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(op: str, *args: Any) -> Tensor:
        raise RuntimeError("out of order")

    kernels = {"doubled": lambda op, *args: OPS[op].generic(*args).double(), "broken": broken}
    monkeypatch.setitem(OUTSIDE, "privateuseone", lambda: dataclasses.replace(elsewhere, kernels=kernels))
    row = next(row for row in run("privateuseone", ["embedding"]) if row.dtype == "float16")
    assert any("torch.float64" in line and "not torch.float16" in line for line in row.failures)
    assert any("RuntimeError: out of order" in line for line in row.failures)
    assert len(row.failures) == row.samples


def test_a_library_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (["jax", "torchax"], ["torchax"]):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, missing=missing: None if name in missing else True)
        with pytest.raises(
            DeviceError, match=f"no device jax here: {' and '.join(missing)} not installed: pip install"
        ):
            run("jax")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no device privateuseone here"):
        run("privateuseone")
