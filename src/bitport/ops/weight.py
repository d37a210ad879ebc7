"""The weight operand: the ten arguments by which every op takes a quantized matrix."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from bitport import layouts
from bitport.errors import ArgumentError
from bitport.layouts import Matrix
from bitport.numerics import Format, Quantized, dequantize, number_type

SCHEMA = (
    "Tensor data, Tensor scale, Tensor? zero, Tensor? scale2, str dtype, int n, int k, int block_n, int block_k, str layout"
)


class Weight(NamedTuple):
    """value[n, k] = (decode(data)[n, k] - zero) * scale * scale2, one scale per block_n x block_k block.

    ``dtype`` names the number type of the codes, ``layout`` says how ``data`` and ``scale`` are packed; a leading
    dimension of the parts counts experts. ``zero`` is in units of codes; None is the middle of the integer range.
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

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.dtype, self.n, self.k, self.block_n, self.block_k)

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.data.shape[: self.data.dim() - layouts.layout(self.layout).data_ndim])

    def plain(self) -> Quantized:
        parts = Quantized(self.data, self.scale, self.zero, self.scale2)
        return layouts.repack(self.matrix, parts, self.layout, "plain")

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The float matrix, computed in float32 and rounded once to ``dtype``."""
        parts = self.plain()
        return dequantize(parts, self.format(parts), self.n, self.k, dtype)

    def format(self, parts: Quantized) -> Format:
        zero = "none" if parts.zero is None else "float" if parts.zero.is_floating_point() else "int"
        return _format(self.dtype, self.block_n, self.block_k, zero, parts.scale.dtype, parts.scale2 is not None)

    def check(self) -> None:
        """ArgumentError unless the parts fit the description: sizes that come from a file are not trusted."""
        bits, storage = _bits_and_storage(self.dtype)
        if self.n < 0 or self.k < 0 or self.block_n < 1 or self.block_k < 1:
            raise ArgumentError(f"weight: sizes must be positive, not n={self.n}, k={self.k}, block={self[7:9]}")
        device = self.data.device
        for name, part in zip(("scale", "zero", "scale2"), self[1:4], strict=True):
            if part is not None and part.device != device:
                raise ArgumentError(f"weight: {name} is on {part.device}, data on {device}; move both to one device")
        if self.layout != "plain":
            return  # a layout checks what it unpacks
        columns = self.k if storage != torch.uint8 else (self.k * bits + 7) // 8
        batch = self.batch
        if self.data.dtype != storage or self.data.shape[-2:] != (self.n, columns):
            raise ArgumentError(
                f"weight: {self.dtype} {self.n}x{self.k} needs data {storage} [..., {self.n}, {columns}], "
                f"not {self.data.dtype} {list(self.data.shape)}"
            )
        grid = self.matrix.grid
        for name, part in (("scale", self.scale), ("zero", self.zero)):
            if part is not None and part.shape != (*batch, *grid):
                raise ArgumentError(
                    f"weight: blocks of {self.block_n}x{self.block_k} need {name} {[*batch, *grid]}, not {list(part.shape)}"
                )


@functools.cache
def _bits_and_storage(dtype: str) -> tuple[int, torch.dtype]:
    kind = number_type(dtype)
    return kind.bits, kind.storage


@functools.cache
def _format(dtype: str, block_n: int, block_k: int, zero: str, scale: torch.dtype, second: bool) -> Format:
    names = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}
    return Format(dtype=dtype, block=(block_n, block_k), zero=zero, scale=names.get(scale, "input"), global_scale=second)
