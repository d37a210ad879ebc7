"""Rows [batch, heads, rows, width] that can be appended to.

Memory is allocated for a quarter more rows than needed: appending n rows one by one copies at most 5 n, and, but for
the smallest sizes, at most a fifth of the memory is unused. It is never allocated in inference mode, since torch would
then forbid writing to it outside that mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bitport.numerics.packing import as_bytes

SPARE, LEAST = 4, 64
"""Memory grows by at least 1/SPARE of the rows and by at least LEAST tokens."""


class GrowingRows:
    """``like`` gives batch, heads, width, dtype and device; ``tokens``: how many a row stands for."""

    @torch.inference_mode(False)
    def __init__(self, like: Tensor, tokens: int = 1) -> None:
        self.least = max(LEAST // tokens, 1)
        self.buffer = like.new_empty(*like.shape[:2], 0, like.shape[3])
        self.count = 0

    @property
    def held(self) -> Tensor:
        """The appended rows: a view, valid until the next change."""
        return self._buffer.narrow(2, 0, self.count)

    @property
    def buffer(self) -> Tensor:
        """[batch, heads, rows, width], of which ``count`` rows are held."""
        return self._buffer

    @buffer.setter
    @torch.inference_mode(False)
    def buffer(self, buffer: Tensor) -> None:
        self._buffer, self.matrices = buffer, buffer.flatten(0, 1)

    @property
    def nbytes(self) -> int:
        return self.held.numel() * self.buffer.element_size()

    @property
    def reserved(self) -> int:
        return self.buffer.nbytes

    def reserve(self, count: int) -> None:
        """Allocate what ``count`` rows need, so that appending up to them cannot run out of memory."""
        if count > self.buffer.shape[2]:
            self._grow(count + max(count // SPARE, self.least))

    @torch.inference_mode(False)
    def _grow(self, room: int) -> None:
        grown = self.buffer.new_empty(*self.buffer.shape[:2], room, self.buffer.shape[3])
        grown[:, :, : self.count] = self.held
        self.buffer = grown

    def append(self, rows: Tensor) -> None:
        count = self.count + rows.shape[2]
        self.reserve(count)
        self.buffer[:, :, self.count : count] = rows
        self.count = count

    def crop(self, count: int) -> None:
        self.count = count

    @torch.inference_mode(False)
    def changed(self, what: Callable[[Tensor], Tensor]) -> Tensor:
        """``what`` of the rows (8-bit floats as bytes), to be the next ``buffer``: another order or number of
        sequences, or a device."""
        return what(as_bytes(self.held)).view(self.buffer.dtype).contiguous()
