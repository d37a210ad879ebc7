"""The Pallas kernel without a TPU: values in the interpreter, lowering by jax.export, and that ops dispatch to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.k_major import NAME
from bitport.backends.xla.pallas_matmul import Tiles, matmul, tiles
from bitport.numerics import sqnr
from bitport.ops.samples import product_budget

from .products import Product, products

pytestmark = pytest.mark.xla

KINDS = [pytest.param(*kind, id="-".join(map(str, kind))) for kind in products()]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize(("x", "w", "zero", "group"), KINDS)
def test_values(x: str, w: str, zero: bool, group: int) -> None:
    """Rows that do not fill a block, groups, and one scale for all of K over two steps along it."""
    product = Product(5, 128, 2048, group, x, w, zero)
    arrays, expected = product.arrays(), product.expected()
    got = matmul(*arrays, group=group, shape=product.tiles(), interpret=True)
    assert got.shape == expected.shape
    dtype = DTYPES.get(x, torch.float32)
    level = float(sqnr(torch.from_numpy(expected), torch.from_numpy(np.array(got.astype(jnp.float32)))))
    assert level >= product_budget(dtype, 2048, expected.size)


@pytest.mark.parametrize(("x", "w", "zero", "group"), KINDS)
def test_lowering(x: str, w: str, zero: bool, group: int) -> None:
    """The TPU's kernel compiler accepts the block shapes, dtypes and operations."""
    product = Product(40, 256, 2048, group, x, w, zero)

    def run(*arrays: Any) -> Any:
        return matmul(*arrays, group=group, shape=product.tiles())

    exported = export.export(jax.jit(run), platforms=["tpu"])(*product.arrays())
    assert "tpu_custom_call" in exported.mlir_module()


@pytest.mark.parametrize("op", ["linear", "dyn_linear"])
@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_ops_reach_the_kernel_on_a_tpu_alone(op: str, platform: str) -> None:
    n, k, group = 256, 1024, 128
    rest = ("int8", None, None) if op == "dyn_linear" else (None,)

    def run(x: Any, data: Any, scale: Any) -> Any:
        return FUNCTIONS[op](x, data, scale, None, None, "int4", n, k, 1, group, NAME, *rest)

    shapes = [((3, k), jnp.bfloat16), ((k, n), jnp.int4), ((k // group, n), jnp.bfloat16)]
    program = export.export(jax.jit(run), platforms=[platform])(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    assert ("tpu_custom_call" in program.mlir_module()) == (platform == "tpu")


def test_blocks_of_real_layers() -> None:
    for n, k, group in ((4096, 4096, 128), (14336, 4096, 128), (4096, 14336, 128), (4096, 4096, 4096), (512, 2048, 32)):
        shape = tiles(512, n, k, group)
        assert isinstance(shape, Tiles)
        assert n % shape.bn == 0
        assert k % shape.bk == 0
        assert group == k or shape.bk == k or shape.bk % (8 * group) == 0


@pytest.mark.parametrize(
    ("n", "k", "group", "reason"),
    [
        pytest.param(100, 1024, 128, "N and K must be multiples of 128, not 100 and 1024", id="n"),
        pytest.param(128, 1024, 96, "groups must divide K=1024", id="group"),
        pytest.param(128, 8192 + 128, 128, "no block of K=8320", id="block"),
    ],
)
def test_what_does_not_fit_is_said(n: int, k: int, group: int, reason: str) -> None:
    refused = tiles(16, n, k, group)
    assert isinstance(refused, str)
    assert reason in refused
