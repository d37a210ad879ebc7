"""The weight operand: the ten arguments that represent a quantized matrix in every op."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError
from bitport.layouts import Matrix
from bitport.numerics import NUMBER_TYPES, SCALES, ZEROS, Format, Quantized, dequantize_now, is_computed, stretches
from bitport.numerics.codec import readable

SCHEMA = (
    "Tensor data, Tensor scale, Tensor? zero, Tensor? scale2, "
    "str dtype, int n, int k, int block_n, int block_k, str layout"
)


LARGEST = 1 << 26
"""Bytes of floats that a generic product makes of its weight at a time: all at once, those of a large vocabulary would
be gigabytes."""


class Weight(NamedTuple):
    """value[n, k] = (decode(data)[n, k] - zero) * scale * scale2, one scale per block_n x block_k block.

    ``dtype`` names the number type of the codes, ``layout`` the layout of the parts; a leading dimension of the parts
    is a batch of experts. ``zero`` is in units of codes; None means the midpoint of the integer range.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    scale2: Tensor | None
    dtype: str
    n: int
    k: int
    block_n: int
    block_k: int
    layout: str

    @classmethod
    def of(cls, parts: Quantized, fmt: Format, n: int, k: int) -> Weight:
        """The operand for ``parts`` in the canonical layout, of an n x k matrix in the format ``fmt``."""
        return cls(*parts, fmt.dtype, n, k, *fmt.block_shape(n, k), "plain")

    @property
    def parts(self) -> Quantized:
        """The parts, in ``layout``."""
        return Quantized(*self[:4])

    @property
    def matrix(self) -> Matrix:
        """The logical matrix, as layouts take it."""
        return Matrix(self.dtype, self.n, self.k, self.block_n, self.block_k)

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading batch dimensions (experts); () for a single matrix."""
        return tuple(self.data.shape[: self.data.dim() - layouts.layout(self.layout).data_ndim])

    def plain(self) -> Quantized:
        """The parts in the canonical layout."""
        return layouts.repack(self.matrix, self.parts, self.layout, "plain")

    def to_layout(self, name: str) -> Weight:
        """The same weight in the layout called ``name``; LayoutError if that layout cannot hold it."""
        return self._replace(**layouts.repack(self.matrix, self.parts, self.layout, name)._asdict(), layout=name)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The float matrix, computed in float32 and rounded once to ``dtype``."""
        parts = layouts.repack(self.matrix, readable(self.parts), self.layout, "plain")
        return dequantize_now(parts, self.format(parts), self.n, self.k, dtype)

    def stretches(self, dtype: torch.dtype) -> Iterator[tuple[slice, Weight]]:
        """Cut a single matrix into (rows, their weight), of about the same size, at most LARGEST bytes in ``dtype``. A
        traced program gets one, since it would contain each by itself."""
        most = max(1, LARGEST // (max(self.k, 1) * dtype.itemsize)) if is_computed(*self.parts) else None
        if most is None or self.n <= most:
            yield slice(None), self
            return
        even = -(-self.n // -(-self.n // most))
        blocks = -(-even // self.block_n) * self.block_n
        for rows, parts in stretches(self.plain(), self.block_n, blocks if blocks <= most else even):
            yield rows, Weight(*parts, self.dtype, rows.stop - rows.start, *self[6:9], "plain")

    def format(self, parts: Quantized) -> Format:
        """The format of canonical ``parts`` of this weight."""
        zero = "none" if parts.zero is None else "float" if parts.zero.is_floating_point() else "int"
        block_n, block_k = min(self.block_n, max(self.n, 1)), min(self.block_k, max(self.k, 1))  # at most the axis
        return _format(self.dtype, block_n, block_k, zero, parts.scale.dtype, parts.scale2 is not None)


def check_weight(
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    scale2: Tensor | None,
    dtype: str,
    n: int,
    k: int,
    block_n: int,
    block_k: int,
    layout: str,
) -> None:
    """Raise ArgumentError unless the parts match the description: sizes read from a file are not trusted.

    Runs on every call, so it is written as flat code for speed.
    """
    expected = _expected(layout, dtype, n, k, block_n, block_k)
    shape, device = data.shape, data.device
    ndim = len(expected.data_shape)
    batch = shape[: len(shape) - ndim]
    if data.dtype != expected.data_dtype or shape[len(batch) :] != expected.data_shape:
        raise ArgumentError(
            f"weight: {dtype} {n}x{k} in layout {layout} needs data {expected.data_dtype} "
            f"{['...', *expected.data_shape]}, not {data.dtype} {[*shape]}"
        )
    if scale.shape != (*batch, *expected.scale_shape) or scale.dtype not in SCALES or scale.device != device:
        raise ArgumentError(
            f"weight: blocks of {block_n}x{block_k} need a float scale {[*batch, *expected.scale_shape]} on {device}, "
            f"not {scale.dtype} {[*scale.shape]} on {scale.device}"
        )
    if zero is not None:
        grid = (*batch, *(expected.zero_shape or (-(-n // block_n), -(-k // block_k))))
        if zero.shape != grid or zero.dtype not in ZEROS or zero.device != device:
            raise ArgumentError(
                f"weight: zero must be uint8 or a 16- or 32-bit float {[*grid]} on {device}, "
                f"not {zero.dtype} {[*zero.shape]} on {zero.device}"
            )
        if NUMBER_TYPES[dtype].kind != "int" or scale.dtype.itemsize == 1:
            raise ArgumentError(
                f"weight: a zero goes with an integer type and a 16- or 32-bit scale, not {dtype}, {scale.dtype}"
            )
    if scale2 is not None:
        if scale2.shape != (*batch, 1, 1) or scale2.dtype != torch.float32 or scale2.device != device:
            raise ArgumentError(
                f"weight: scale2 must be float32 {[*batch, 1, 1]} on {device}, "
                f"not {scale2.dtype} {[*scale2.shape]} on {scale2.device}"
            )
        if scale.dtype != torch.float8_e4m3fn:
            raise ArgumentError(f"weight: scale2 goes with float8_e4m3fn scales, not {scale.dtype}")


@functools.lru_cache(4096)  # bounded: a KV cache has another n at each step
def _expected(layout: str, dtype: str, n: int, k: int, block_n: int, block_k: int) -> layouts.Packed:
    if n < 0 or k < 0 or block_n < 1 or block_k < 1:
        raise ArgumentError(f"weight: sizes must be positive, not n={n}, k={k}, blocks of {block_n}x{block_k}")
    if dtype not in NUMBER_TYPES:
        raise ArgumentError(f"weight: unknown number type {dtype!r}; known: {', '.join(NUMBER_TYPES)}")
    return layouts.layout(layout).expects(Matrix(dtype, n, k, block_n, block_k))


@functools.cache
def _format(dtype: str, block_n: int, block_k: int, zero: str, scale: torch.dtype, second: bool) -> Format:
    names = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}
    return Format(
        dtype=dtype, block=(block_n, block_k), zero=zero, scale=names.get(scale, "input"), global_scale=second
    )
