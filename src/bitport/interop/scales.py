"""Rounding of scales to fewer bits: the only change of numbers that a conversion can make, and its error.

A scale s becomes s (1 + e), so a value (code - zero) * s has the relative error e. A float zero point is rounded, too,
which moves all values of its group by the part e of zero * s. |e| is at most 2^-8 for bfloat16 and 2^-11 for float16,
except for scales below 2^-14 there, whose absolute error is at most 2^-25.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.interop.codec import Described
from bitport.interop.sources import Readable
from bitport.numerics import decibels, squares
from bitport.numerics.format import FLOAT8_SCALES
from bitport.ops.by_rows import dequantized_rows
from bitport.schemes import Scheme
from bitport.tensor import QTensor

NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Narrowed:
    """``files`` with scales rounded to ``dtype``, one of :data:`NARROW`. Its notes report the error, once items() is
    exhausted."""

    def __init__(self, files: Readable, dtype: str) -> None:
        if dtype not in NARROW:
            raise ArgumentError(f"scales are rounded to {' or '.join(map(repr, NARROW))}, not to {dtype!r}")
        self.files, self.dtype = files, dtype
        self.format, self.path, self.nbytes, self.tied = files.format, files.path, files.nbytes, files.tied
        self.levels: dict[str, float] = {}
        """Name of each changed weight -> its signal-to-noise ratio in dB."""

    def names(self) -> list[str]:
        return self.files.names()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.files.items():
            yield name, self._narrow(name, tensor) if isinstance(tensor, QTensor) else tensor

    def described(self) -> Iterator[Described]:
        for q in self.files.described():
            yield dataclasses.replace(q, scheme=self._scheme(q.scheme))

    def others(self, quantization: dict[str, Any]) -> Iterator[tuple[Path, str | Path]]:
        return self.files.others(quantization)

    @property
    def notes(self) -> list[str]:
        if not self.levels:
            return [*self.files.notes, f"every scale is a {self.dtype} already, or has 8 bits: no number was changed"]
        worst = min(self.levels, key=self.levels.__getitem__)
        said = f"scales of {len(self.levels)} weights were rounded to {self.dtype}"
        return [*self.files.notes, f"{said}: {self.levels[worst]:.1f} dB at worst, for {worst}"]

    def _scheme(self, scheme: Scheme) -> Scheme:
        fmt = scheme.weight
        if fmt.scale in FLOAT8_SCALES or fmt.scale == "input":  # "input": any of the floats
            return scheme
        return dataclasses.replace(scheme, weight=dataclasses.replace(fmt, scale=self.dtype))

    def _narrow(self, name: str, q: QTensor) -> QTensor:
        if q.scheme.weight.scale in FLOAT8_SCALES:
            return q
        scale, zero = self._rounded(f"{name}: a scale", q.scale), q.zero
        if zero is not None and zero.is_floating_point():
            zero = self._rounded(f"{name}: a zero point", zero)
        made = q.replace(q.parts._replace(scale=scale, zero=zero), scheme=self._scheme(q.scheme))
        if math.isfinite(level := _sqnr(q, made)):
            self.levels[name] = level
        return made

    def _rounded(self, what: str, part: Tensor) -> Tensor:
        rounded = part.to(NARROW[self.dtype])
        if bool((rounded.isinf() & part.isfinite()).any()):
            most = float(part.abs().masked_fill(~part.isfinite(), 0).max())
            raise ArgumentError(f"{what} of {most:g} is too large for {self.dtype}: leave it as it is, or try bfloat16")
        return rounded


def _sqnr(before: QTensor, after: QTensor) -> float:
    """The signal-to-noise ratio in dB, over all numbers of the weight; infinite if none has changed."""
    pairs = zip(dequantized_rows(before), dequantized_rows(after), strict=True)
    return float(decibels(*squares((one, other) for (_, one), (_, other) in pairs)))
