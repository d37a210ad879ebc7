"""The conformance suite on torchax's device, in part. All of it: ``make support-xla``."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from bitport.backends.xla import torchax_ops
from bitport.conformance import run
from bitport.ops import OPS
from bitport.ops.outside import outside

pytestmark = pytest.mark.xla


def test_it_is_called_what_it_is() -> None:
    place = outside("jax:0")
    assert place is not None
    assert place.name == "torchax, XLA:CPU"
    assert place.library.startswith(f"jax {jax.__version__}, torchax ")


@pytest.mark.parametrize("op", ["quantize_input", "int4pack_mm", "dequantize"])
def test_ops_pass_eagerly_and_compiled(op: str) -> None:
    rows = run("jax", [op])
    assert [line for row in rows for line in row.failures] == []
    assert {row.kernels for row in rows} == {("jax", "jax.jit")}
    assert {row.refused for row in rows} == {()}


def test_layouts_of_other_devices_are_refused() -> None:
    rows = run("jax", ["repack"])
    assert [line for row in rows for line in row.failures] == []
    refused = [line for row in rows for line in row.refused]
    assert refused
    assert all(": XLA reads the layouts plain and k_major, not " in line for line in refused)
    assert not any(line.endswith(("not plain", "not k_major")) for line in refused)


def test_a_wrong_function_fails_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = torchax_ops.register().default_env()._ops
    op = OPS["int4pack_mm"].overload
    before = ops[op].func

    def off(*args: Any) -> Any:
        return before(*args) * 1.03125

    monkeypatch.setattr(ops[op], "func", off)
    rows = [row for row in run("jax", ["int4pack_mm"]) if row.subject == "inner2-g32"]
    empty = 2  # empty results, which are right
    assert [len(row.failures) for row in rows] == [row.samples - empty for row in rows]


def test_bytes_come_back_as_the_floats_they_are() -> None:
    """float8 codes and e8m0 scales are passed as bytes, and come back in their own dtypes."""
    place = outside("jax")
    assert place is not None
    every = OPS["quantize"].samples(torch.device("cpu"), torch.float32)
    sample = next(each for each in every if each.name == "fp8-row")
    for run_op in place.kernels.values():
        data, scale, *_ = run_op("quantize", *sample.args)
        expected = OPS["quantize"].generic(*sample.args)
        assert data.dtype == torch.float8_e4m3fn
        assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scale, expected[1])
