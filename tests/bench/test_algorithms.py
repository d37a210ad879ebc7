"""The measurement of algorithms against their reference implementations, and those references themselves where
installed."""

from __future__ import annotations

import types
from importlib.metadata import version

import pytest
from torch import Tensor

from bench import algorithms
from bench.suites import Shape
from bitport.algorithms import AWQ, RTN, Clip
from bitport.numerics import dequantize, quantize
from bitport.schemes import preset


def stand_in(scheme: str) -> types.ModuleType:
    """A reference that rounds to nearest."""
    module = types.ModuleType("stand_in")

    def solve(weight: Tensor, x: Tensor) -> Tensor:
        fmt = preset(scheme).weight
        return dequantize(quantize(weight, fmt), fmt, *weight.shape)

    vars(module).update(PACKAGES=("torch",), SCHEME=scheme, ALGORITHM=RTN(), solve=solve)
    return module


def test_a_row_holds_both_sides() -> None:
    row = algorithms.measure("gptq", stand_in("int4"), Shape(128, 32), 2)
    assert row["error"] == row["reference_error"] > 0
    assert row["seconds"] > 0
    assert row["reference_seconds"] > 0
    assert row["reference"] == {"torch": version("torch")}


def test_the_better_one_has_the_smaller_error() -> None:
    module = stand_in("int3")
    module.ALGORITHM = Clip()  # type: ignore[attr-defined]
    row = algorithms.measure("hqq", module, Shape(128, 32), 1)
    assert row["error"] < row["reference_error"]


def test_scales_of_channels_are_searched_and_taken_back() -> None:
    module = stand_in("int4")
    module.ALGORITHM = AWQ()  # type: ignore[attr-defined]
    row = algorithms.measure("awq", module, Shape(128, 32), 1)
    assert row["error"] < row["reference_error"]


def test_a_missing_reference_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(algorithms.REFERENCES, "gptq", "nobody_has_this")
    assert list(algorithms.rows(["gptq"], [Shape(8, 8)], 1)) == []
    assert "without the reference of gptq: ModuleNotFoundError" in capsys.readouterr().out


@pytest.mark.peers
@pytest.mark.parametrize("name", algorithms.REFERENCES)
def test_no_more_than_a_hundredth_further_than_the_reference(name: str) -> None:
    module = algorithms.reference(name)
    if isinstance(module, str):
        pytest.skip(module)
    ours, theirs = 0.0, 0.0
    for seed in range(8):  # on a small layer, a search over few candidates depends on luck
        weight, x = algorithms.operands(256, 128, 2048, seed)
        ours += algorithms.error(name, weight, algorithms.ours(module, weight, x), x)
        theirs += algorithms.error(name, weight, module.solve(weight, x), x)
    assert ours < 1.01 * theirs
