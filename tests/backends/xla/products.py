"""Products to test the Pallas kernel with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from bitport.backends.xla.pallas_matmul import Tiles, tiles


def products() -> Iterator[tuple[str, str, bool, int]]:
    """(x, w, with a zero point, group): weight-only and integer products, with groups and one scale per channel."""
    yield from itertools.product(("bfloat16", "float32", "int8"), ("int4", "int8"), (False, True), (128, 2048))


class Product(NamedTuple):
    m: int
    n: int
    k: int
    group: int
    x: str
    w: str
    zero: bool

    def tiles(self) -> Tiles:
        shape = tiles(self.m, self.n, self.k, self.group)
        assert isinstance(shape, Tiles), shape
        return shape

    def _numbers(self) -> tuple[Any, Any, Any, Any]:
        at = np.random.default_rng(0)
        half = 8 if self.w == "int4" else 128
        grid = (self.k // self.group, self.n)
        x = at.integers(-127, 128, (self.m, self.k)) if self.x == "int8" else at.standard_normal((self.m, self.k))
        zero = at.integers(-4, 5, grid).astype(np.float32) if self.zero else None
        return x, at.integers(-half, half, (self.k, self.n)), at.random(grid, np.float32) + np.float32(0.5), zero

    def arrays(self) -> tuple[Any, ...]:
        x, w, scale, zero = self._numbers()
        given = (jnp.asarray(x, self.x), jnp.asarray(w, self.w), jnp.asarray(scale))
        return given if zero is None else (*given, jnp.asarray(zero))

    def expected(self) -> Any:
        _, w, scale, zero = self._numbers()
        x = np.asarray(self.arrays()[0], np.float64)
        value = w.reshape(-1, self.group, self.n) - (0 if zero is None else zero[:, None].astype(np.float64))
        return x @ (value * scale[:, None]).reshape(self.k, self.n)
