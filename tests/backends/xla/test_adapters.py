"""Adapters for libraries that are not installed: what they pass on, with stand-ins for the one function they call."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import jax
import pytest
import torch
from torch import Tensor

from bitport.backends.xla import static, torch_tpu_ops, torch_xla_ops
from bitport.backends.xla.move import to_array, to_tensor
from bitport.numerics import sqnr
from bitport.ops import IMPLS, OPS

from .arrays import CPU

pytestmark = pytest.mark.xla

SAMPLE = next(sample for sample in OPS["quantized_matmul"].samples(CPU, torch.float32) if "asym-w4a8" in sample.name)


def on_arrays(function: Any, tensors: tuple[Tensor, ...]) -> Tensor:
    return to_tensor(function(*map(to_array, tensors)))


def test_every_op_has_a_kernel_on_both_devices() -> None:
    for device in ("xla", "tpu"):
        assert {op for op in OPS if any(impl.name == "jax" for impl in IMPLS.get((op, device), []))} == set(OPS)


def test_torch_xla_is_called_with_a_function_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = types.ModuleType("torch_xla.core.xla_builder")
    builder.call_jax = on_arrays  # type: ignore[attr-defined]
    for name in ("torch_xla", "torch_xla.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, builder.__name__, builder)
    y = torch_xla_ops.kernel("quantized_matmul")(*SAMPLE.args)
    assert float(sqnr(SAMPLE.expected(), y)) >= SAMPLE.budget


def test_torch_tpu_is_given_an_annotated_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def jax_op(name: str, function: Any) -> Any:
        signature = inspect.signature(function, eval_str=True)
        assert all(each.annotation is jax.Array for each in signature.parameters.values())
        assert signature.return_annotation is jax.Array
        made.append(name)
        return lambda *tensors: on_arrays(function, tensors)

    tpu = types.SimpleNamespace(pallas=types.SimpleNamespace(jax_op=jax_op))
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    run = torch_tpu_ops.kernel("quantized_matmul")
    for _ in range(2):
        assert float(sqnr(SAMPLE.expected(), run(*SAMPLE.args))) >= SAMPLE.budget
    assert len(made) == 1
    assert made[0].startswith("bitport_jax::quantized_matmul_")


def test_ops_of_several_results_say_so() -> None:
    shape = (static.ARRAY, "int8", None)
    signature = inspect.signature(torch_tpu_ops.annotated("quantize_input", shape), eval_str=True)
    assert signature.return_annotation == list[jax.Array]
    assert list(signature.parameters) == ["array0"]


def test_functions_of_growing_sizes_are_not_all_kept() -> None:
    """A program that decodes asks for another one at each step."""
    most = static.of_arrays.cache_info().maxsize
    assert most is not None
    before = static.of_arrays("attention", (static.ARRAY, 0))
    for n in range(1, most + 1):
        static.of_arrays("attention", (static.ARRAY, n))
    assert static.of_arrays.cache_info().currsize == most
    assert static.of_arrays("attention", (static.ARRAY, 0)) is not before


def test_a_missing_library_is_named() -> None:
    for adapter, library in ((torch_xla_ops, "torch_xla"), (torch_tpu_ops, "torch_tpu")):
        assert str(adapter.refuses(*SAMPLE.args)).startswith(f"{library} not installed")
