"""Weights sharded over four devices along N and along K give the results of one device."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bitport.backends.xla import shard
from bitport.backends.xla.decode import JaxWeight
from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.k_major import NAME
from bitport.backends.xla.move import to_array, to_tensor, weight_arrays
from bitport.errors import ArgumentError
from bitport.numerics import fake_quantize, quantize, sqnr
from bitport.ops import Weight, samples
from bitport.ops.reference import value_of
from bitport.schemes import preset

from .arrays import CPU

pytestmark = pytest.mark.xla

N, K, M = 64, 256, 6
SCHEMES = [
    pytest.param(scheme, layout, id=f"{scheme}-{layout}")
    for scheme, layout in (
        ("int4-g32", "plain"),
        ("int4-g32", NAME),
        ("int8", NAME),
        ("int4-int8-g32", NAME),
        ("int8-dyn", "plain"),
        ("mxfp4", "plain"),
        ("nvfp4", "plain"),
        ("int3-g64", "plain"),
        ("fp8", "plain"),
    )
]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = jax.devices()
    assert len(devices) >= 4, "conftest.py asks for four devices of the host"
    return Mesh(np.asarray(devices[:4]), ("x",))


def weight_of(name: str, layout: str) -> tuple[JaxWeight, torch.Tensor, str]:
    """(weight, its float64 value, the rounding of the input)."""
    scheme = preset(name)
    parts = quantize(samples.values(CPU, torch.float32, N, K), scheme.weight)
    weight = Weight.of(parts, scheme.weight, N, K).to_layout(layout)
    return JaxWeight(*weight_arrays(weight)), value_of(parts, *weight.matrix), scheme.act


@pytest.mark.parametrize("along", ["n", "k"])
@pytest.mark.parametrize(("name", "layout"), SCHEMES)
def test_cut_by_xla(name: str, layout: str, along: Literal["n", "k"], mesh: Mesh) -> None:
    weight, value, act = weight_of(name, layout)
    x = samples.rows(CPU, torch.float32, M, K)
    there = shard.put(weight, mesh, "x", along)
    assert not there.data.sharding.is_fully_replicated
    lies = PartitionSpec(None, "x") if along == "k" else PartitionSpec()
    given = jax.device_put(to_array(x), NamedSharding(mesh, lies))

    def run(x: Any, *parts: Any) -> Any:
        rest = (act, None, None) if act else (None,)
        return FUNCTIONS["dyn_linear" if act else "linear"](x, *parts, *weight[4:], *rest)

    got = to_tensor(jax.jit(run)(given, *there[:4]))
    used = fake_quantize(x, act) if act else x
    assert float(sqnr(used.double() @ value.T, got)) >= samples.product_budget(torch.float32, K, M * N)


@pytest.mark.parametrize("along", ["n", "k"])
@pytest.mark.parametrize(("name", "layout"), [case for case in SCHEMES if not preset(case.values[0]).act])
def test_one_kernel_per_device(name: str, layout: str, along: Literal["n", "k"], mesh: Mesh) -> None:
    weight, value, _ = weight_of(name, layout)
    x = samples.rows(CPU, torch.float32, M, K).reshape(2, 3, K)
    bias = samples.bias(CPU, torch.float32, N)
    there = shard.put(weight, mesh, "x", along)
    got = shard.linear(mesh, "x", along, to_array(x), *there, to_array(bias))
    expected = x.double() @ value.T + bias.double()
    assert got.shape == expected.shape
    assert float(sqnr(expected, to_tensor(got))) >= samples.product_budget(torch.float32, K, M * N)


def test_a_cut_through_a_group_is_refused(mesh: Mesh) -> None:
    weight, _, _ = weight_of("int4", "plain")
    with pytest.raises(ArgumentError, match="K=256 in blocks of 128 cannot be cut over 4 devices"):
        shard.put(weight, mesh, "x", "k")


def test_a_sum_over_devices_is_of_float32(mesh: Mesh) -> None:
    """Rounding the four devices' sums to bfloat16 before adding them would lose bits."""
    weight, value, _ = weight_of("int8", NAME)
    x = samples.rows(CPU, torch.bfloat16, M, K)
    there = shard.put(weight, mesh, "x", "k")
    got = shard.linear(mesh, "x", "k", to_array(x), *there, None)
    assert got.dtype == jnp.bfloat16
    expected = x.double() @ value.T
    assert float(sqnr(expected, to_tensor(got))) >= samples.product_budget(torch.bfloat16, K, M * N)
