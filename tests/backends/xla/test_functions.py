"""Every op's JAX function on the op's samples, against the float64 reference, within the op's budget."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bitport.backends.xla.decode import decode, native, pack_bits, unpack_bits
from bitport.backends.xla.encode import divide, encode_float
from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.move import to_array, to_tensor
from bitport.errors import ArgumentError
from bitport.numerics import NUMBER_TYPES, NumberType, encode
from bitport.ops import OPS, Op
from bitport.ops.reference import code_value
from tests.numerics.judges import NEW

from .arrays import CPU, DTYPES, samples_of, shortfall

pytestmark = pytest.mark.xla

CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype)[6:]}")
    for op in OPS.values()
    for dtype in DTYPES
    if next(iter(op.samples(CPU, dtype)), None) is not None
]


def test_every_op_has_a_function() -> None:
    assert set(FUNCTIONS) == set(OPS)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_within_budget(op: Op, dtype: torch.dtype) -> None:
    missed = {}
    for sample, args in samples_of(op, dtype):
        if (gap := shortfall(sample, FUNCTIONS[op.name](*args), dtype)) > 0:
            missed[sample.name] = gap
    assert missed == {}


@pytest.mark.parametrize("name", ["linear", "dyn_linear", "quantized_matmul"])
def test_within_budget_when_compiled(name: str) -> None:
    """Fused and simplified by XLA, on samples of many rows."""
    compiled = 0
    for sample, args in samples_of(OPS[name], torch.float32):
        if name != "quantized_matmul" and not sample.name.endswith("-rows"):
            continue
        static = tuple(at for at, arg in enumerate(args) if not isinstance(arg, jax.Array))
        result = jax.jit(FUNCTIONS[name], static_argnums=static)(*args)
        assert shortfall(sample, result, torch.float32) <= 0, sample.name
        compiled += 1
    assert compiled > 10


@pytest.mark.parametrize(
    "number",
    [*(number for number in NUMBER_TYPES.values() if number.kind != "int"), NEW],
    ids=lambda number: number.name,
)
def test_every_code_is_decoded_exactly(number: NumberType) -> None:
    codes = jnp.arange(1 << number.bits, dtype=jnp.uint8)
    expected = [code_value(number, code) for code in range(1 << number.bits)]
    np.testing.assert_array_equal(np.asarray(decode(codes, number)), np.asarray(expected, np.float32))


@pytest.mark.parametrize(
    "number",
    [*(number for number in NUMBER_TYPES.values() if number.kind == "float" and number.signed), NEW],
    ids=lambda number: number.name,
)
def test_every_float_is_encoded_as_on_the_cpu(number: NumberType) -> None:
    """All bfloat16 values, and the float32 just below and above each: ties, subnormals, overflow."""
    patterns = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([patterns, patterns + 1, np.maximum(patterns, 1) - 1])
    values = torch.from_numpy(bits.view(np.float32))
    values = values[~values.isnan()]
    got = to_tensor(encode_float(to_array(values), number))
    assert torch.equal(got, encode(values, number))


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_packed_densely(bits: int) -> None:
    codes = jnp.asarray(np.random.default_rng(bits).integers(0, 1 << bits, (3, 13)), jnp.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, -(-13 * bits // 8))
    assert jnp.array_equal(unpack_bits(packed, bits, 13), codes)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_division_is_exact(compiled: bool) -> None:
    """XLA multiplies by the reciprocal of a constant divisor, which would change 2.625 / 448 = 0.005859375."""
    x = jnp.asarray(np.arange(1, 4001, dtype=np.float32).reshape(1000, 4) / 16)
    wanted = np.asarray(x) / np.float32(448)
    by_a_constant = jax.jit(lambda x: divide(x, 448.0)) if compiled else lambda x: divide(x, 448.0)
    by_a_column = jax.jit(divide) if compiled else divide
    np.testing.assert_array_equal(np.asarray(by_a_constant(x)), wanted)
    np.testing.assert_array_equal(np.asarray(by_a_column(x, jnp.full((1000, 1), 448.0))), wanted)


@pytest.mark.parametrize("group", [4096, 128], ids=["channel", "group"])
def test_integer_sums_are_32_bits(group: int) -> None:
    """4096 products of 127 * -127 need 27 bits."""
    k, n = 4096, 4
    data = jnp.full((n, k), 1, jnp.uint8)
    scale = jnp.ones((n, k // group), jnp.float32)
    x = jnp.ones((1, k), jnp.float32)
    args = (data, scale, None, None, "int8", n, k, 1, group, "plain", "int8", None, None)
    y = jax.jit(lambda x: FUNCTIONS["dyn_linear"](x, *args))(x)
    np.testing.assert_allclose(np.asarray(y), -127.0 * k, rtol=2.0**-23)
    program = jax.jit(lambda x: FUNCTIONS["dyn_linear"](x, *args)).lower(x).as_text()
    dots = [line for line in program.splitlines() if "dot_general" in line]
    assert dots
    assert all("xi8>" in line and line.rstrip().endswith("xi32>") for line in dots)


@pytest.mark.parametrize("layout", ["plain", "k_major"])
@pytest.mark.parametrize("zero", [None, 0])
def test_integer_sums_of_many_columns(layout: str, zero: int | None) -> None:
    """140000 products of 127 * 127 need 32 bits, and as many of 127 * 255 (with zero points) 33."""
    n, k = 2, 140_000
    data = jnp.full((n, k), 255, jnp.uint8) if layout == "plain" else jnp.full((k, n), 127, jnp.int8)
    grid = (n, 1) if layout == "plain" else (1, n)
    zeros = None if zero is None else jnp.full(grid, zero, jnp.uint8)
    x = jnp.ones((1, k), jnp.float32)
    args = (data, jnp.ones(grid, jnp.float32), zeros, None, "int8", n, k, 1, k, layout, "int8", None, None)
    wanted = float(k * (127 if zero is None else 255))
    np.testing.assert_allclose(np.asarray(FUNCTIONS["dyn_linear"](x, *args)), wanted, rtol=2.0**-21)


def test_integer_sums_of_many_columns_in_blocks() -> None:
    """Two blocks, each too long for one sum."""
    n, size = 2, 140_000
    w, scaler = jnp.full((2, size, n), 127, jnp.int8), jnp.asarray([[1.0] * n, [2.0] * n])
    y = FUNCTIONS["quantized_matmul"](jnp.ones((1, 2 * size)), w, scaler, None, size, False, True)
    np.testing.assert_allclose(np.asarray(y), 3.0 * 127 * size, rtol=2.0**-21)


@pytest.mark.parametrize("layout", ["plain", "k_major"])
def test_an_id_outside_the_table_gives_nan(layout: str) -> None:
    codes, scale = np.arange(12, dtype=np.uint8).reshape(4, 3), np.ones((4, 1), np.float32)
    parts = (codes, scale) if layout == "plain" else ((codes ^ 128).T.view(np.int8), scale.T)
    rest = (None, None, "int8", 4, 3, 1, 3, layout, "float32")
    y = FUNCTIONS["embedding"](jnp.asarray([0, 3, 4, 99, -1]), *map(jnp.asarray, parts), *rest)
    expected = np.full((5, 3), np.nan)
    expected[:2] = codes[[0, 3]] - 128.0
    np.testing.assert_array_equal(np.asarray(y), expected)


def test_native_int4_is_unpacked_as_its_bytes_are() -> None:
    n, k = 6, 8
    data = jnp.asarray(np.random.default_rng(0).integers(0, 256, (k, n // 2)), jnp.uint8)
    rest = (jnp.ones((1, n)), None, None, "int4", n, k, 1, k, "k_major", "plain")
    expected = FUNCTIONS["repack"](data, *rest)
    codes = np.stack([np.asarray(data) & 15, np.asarray(data) >> 4], -1).reshape(k, n).T ^ 8  # by pairs of rows
    assert np.array_equal(np.asarray(expected[0]), codes[:, ::2] | codes[:, 1::2] << 4)
    for got, wanted in zip(FUNCTIONS["repack"](native(data), *rest), expected, strict=True):
        assert jnp.array_equal(got, wanted)


def test_a_layout_of_another_device_is_refused() -> None:
    args = (jnp.zeros((1, 8)), jnp.zeros((8, 8), jnp.uint8), jnp.ones((8, 1)), None, None)
    with pytest.raises(ArgumentError, match="plain and k_major, not tile_packed_8"):
        FUNCTIONS["linear"](*args, "int8", 8, 8, 1, 8, "tile_packed_8", None)
