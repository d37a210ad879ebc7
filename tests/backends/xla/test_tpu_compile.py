"""The real TPU compiler, without a TPU: ops with k_major weights compile to the Pallas kernel for v5e and v6e."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from bench.tpu_compile import TOPOLOGIES, compiled, device, prepare, report
from bitport.backends.xla.pallas_matmul import Tiles, matmul

pytestmark = pytest.mark.tpu


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


@pytest.mark.parametrize("group", [128, 0], ids=["g128", "channel"])
@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize("w", ["int4", "int8"])
@pytest.mark.parametrize("op", ["linear", "dyn_linear"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiles(topology: str, op: str, w: str, rows: int, group: int) -> None:
    """The program contains the kernel, and the weight in HBM takes as many bits as its codes."""
    k = n = 2048
    found = report(compiled(topology, op, w, rows, k, n, group))
    assert found["kernel"]
    weight = k * n * (4 if w == "int4" else 8) // 8
    scales = max(k // (group or k), 16) * n * 2
    assert weight <= found["arguments"] <= weight + scales + 2 * max(rows, 16) * k + (1 << 16)


def test_what_does_not_fit_is_rejected() -> None:
    """Two blocks of 16 MB of codes, one in use and one in flight, exceed VMEM: so what compiles above does fit."""
    where = device(TOPOLOGIES[0])
    shapes = (((16, 16384), jnp.bfloat16), ((16384, 2048), jnp.int8), ((1, 2048), jnp.float32))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes]
    lowered = matmul.lower(*args, group=16384, shape=Tiles(16, 2048, 8192))
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        lowered.compile()
