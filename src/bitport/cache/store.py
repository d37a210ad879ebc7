"""Growing store of the keys and values of one layer, and attention over it.

The tokens form three segments, in this order; :class:`CacheFormat` determines their lengths::

    first, in float | quantized | the newest, in float

The two float segments share one tensor. How many tokens are quantized depends only on their total, not on the steps in
which they arrived: a prompt gives the same store whole, in chunks or token by token. Only :meth:`KeyValueStore.crop`
makes a difference: quantized tokens stay quantized, except those of a block that it cuts, which become floats again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bitport.cache.format import CacheFormat, cache_format
from bitport.cache.rows import GrowingRows
from bitport.errors import ArgumentError
from bitport.numerics import FLOATS, Format
from bitport.ops import OPS, Weight
from bitport.ops.attention import joined
from bitport.ops.convert import format_json, from_list
from bitport.ops.device import check_present

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and zeros."""


def _parts(tokens: Tensor, fmt: Format) -> Parts:
    """Quantize whole blocks of tokens. All heads form one matrix, since no block spans two heads."""
    batch, heads, count, width = tokens.shape
    flat = tokens.reshape(batch * heads * count, width)
    data, scale, zero, _ = from_list(OPS["quantize"].overload(flat, format_json(fmt)))
    blocks = count // fmt.block[0]

    def of_blocks(part: Tensor) -> Tensor:
        return part.reshape(batch, heads, blocks, part.shape[-1])

    return (
        data.reshape(batch, heads, count, data.shape[-1]),
        of_blocks(scale),
        None if zero is None else of_blocks(zero),
    )


class _Side:
    """Keys, or values."""

    def __init__(self, fmt: Format, like: Tensor) -> None:
        self.fmt, self.width = fmt, like.shape[3]
        self.dense = GrowingRows(like)
        data, scale, zero = _parts(like[:, :, :0], fmt)
        self.data, self.scale = GrowingRows(data), GrowingRows(scale, fmt.block[0])
        self.zero = None if zero is None else GrowingRows(zero, fmt.block[0])

    def append(self, parts: Parts) -> None:
        for rows, part in self._with(parts):
            rows.append(part)

    def reserve(self, parts: Parts | None, floats: int) -> None:
        """Allocate what ``parts`` and ``floats`` tokens in float need."""
        for rows, part in self._with(parts) if parts is not None else ():
            rows.reserve(rows.count + part.shape[2])
        self.dense.reserve(floats)

    def _with(self, parts: Parts) -> Iterator[tuple[GrowingRows, Tensor]]:
        for rows, part in zip((self.data, self.scale, self.zero), parts, strict=True):
            if rows is not None and part is not None:
                yield rows, part

    def quantized(self, first: int = 0, end: int | None = None) -> Weight:
        """Return the quantized tokens from ``first`` to ``end``, borders of blocks, as a weight of views into the
        store."""
        tokens = slice(first, end)
        blocks = slice(first // self.fmt.block[0], None if end is None else end // self.fmt.block[0])
        data, scale = self.data.held[:, :, tokens], self.scale.held[:, :, blocks]
        zero = None if self.zero is None else self.zero.held[:, :, blocks]
        block = self.fmt.block_shape(data.shape[2], self.width)
        return Weight(data, scale, zero, None, self.fmt.dtype, data.shape[2], self.width, *block, "plain")

    def crop(self, count: int) -> None:
        """Keep the whole blocks among the first ``count`` quantized tokens."""
        blocks = count // self.fmt.block[0]
        self.data.crop(blocks * self.fmt.block[0])
        for rows in (self.scale, self.zero):
            if rows is not None:
                rows.crop(blocks)

    def all(self) -> Iterator[GrowingRows]:
        yield from (rows for rows in (self.dense, self.data, self.scale, self.zero) if rows is not None)


def _parts_of_both(sides: tuple[_Side, _Side], keys: Tensor, values: Tensor) -> tuple[Parts, Parts]:
    """Quantize both, in one call if format and shape are the same: for a single token the call overhead dominates."""
    fmt = sides[0].fmt
    if fmt != sides[1].fmt or keys.shape != values.shape:
        return _parts(keys, fmt), _parts(values, sides[1].fmt)
    halves = [(None, None) if part is None else part.chunk(2) for part in _parts(torch.cat([keys, values]), fmt)]
    return tuple(zip(*halves, strict=True))  # type: ignore[return-value]


class KeyValueStore:
    """The keys and values of one attention layer, quantized as tokens are appended.

    ``format``: a name or a :class:`CacheFormat`. Batch, heads, widths, dtype and device are those of the first tokens.
    """

    def __init__(self, format: str | CacheFormat) -> None:
        self.format = cache_format(format)
        self._sides: tuple[_Side, _Side] | None = None

    def __len__(self) -> int:
        """Number of tokens of each sequence."""
        return 0 if self._sides is None else self._sides[0].data.count + self._sides[0].dense.count

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tokens."""
        return sum(rows.nbytes for rows in self._rows())

    @property
    def reserved(self) -> int:
        """Bytes of the stored tokens and of the spare capacity."""
        return sum(rows.reserved for rows in self._rows())

    def _rows(self) -> Iterator[GrowingRows]:
        for side in self._sides or ():
            yield from side.all()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append the next tokens of each sequence: [batch, heads, tokens, width] in one float dtype. If it fails, as
        for lack of memory, the store is as it was."""
        self._check(keys, values)
        sides = self._sides or (_Side(self.format.keys, keys), _Side(self.format.values, values))
        quantized, floats = sides[0].data.count, sides[0].dense.count
        move = max(self.format.quantized(quantized + floats + keys.shape[2]) - quantized, 0)
        stay = min(floats, self.format.first) if move else floats
        start = max(self.format.first - quantized - floats, 0)
        new = [
            torch.cat([side.dense.held[:, :, stay:], each], 2) if stay < floats else each
            for side, each in zip(sides, (keys.detach(), values.detach()), strict=True)
        ]
        parts = _parts_of_both(sides, *(each[:, :, start : start + move] for each in new)) if move else (None, None)
        for side, part in zip(sides, parts, strict=True):
            side.reserve(part, stay + new[0].shape[2] - move)
        for side, part, each in zip(sides, parts, new, strict=True):
            if part is not None:
                side.append(part)
            side.dense.crop(stay)
            for piece in (each[:, :, :start], each[:, :, start + move :]):
                if piece.shape[2]:
                    side.dense.append(piece)
        self._sides = sides

    def dense_keys(self) -> Tensor:
        """Return all keys [batch, heads, tokens, width], in the dtype they were appended in."""
        return self._dense(self._filled()[0])

    def dense_values(self) -> Tensor:
        """Return all values, as :meth:`dense_keys` does."""
        return self._dense(self._filled()[1])

    def _dense(self, side: _Side) -> Tensor:
        held = side.dense.held
        return joined(side.quantized(), held, min(self.format.first, held.shape[2]), held.dtype)

    def attend(
        self, q: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        """Return attention of the queries over all tokens, as :mod:`bitport.ops.attention` defines it."""
        keys, values = self._filled()
        dense = (keys.dense.held, values.dense.held) if keys.dense.count else (None, None)
        first = min(self.format.first, keys.dense.count)
        return OPS["attention"].overload(q, *keys.quantized(), *values.quantized(), *dense, first, mask, causal, scale)

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of each sequence."""
        if not hasattr(tokens, "__index__") or not 0 <= tokens <= len(self):
            raise ArgumentError(f"a store of {len(self)} tokens can be cut to 0 to {len(self)}, not to {tokens!r}")
        if self._sides is None:
            return
        quantized = self._sides[0].data.count
        if tokens >= self.format.first + quantized:
            for side in self._sides:
                side.dense.crop(tokens - quantized)
            return
        kept = max(tokens - self.format.first, 0)
        whole = kept // self.format.block * self.format.block
        first = min(self.format.first, tokens)
        rests = []
        for side in self._sides if whole < kept else ():
            rests.append(side.quantized(whole, whole + self.format.block).dense(side.dense.buffer.dtype))
            side.reserve(None, first + kept - whole)
        for side in self._sides:
            side.crop(whole)
            side.dense.crop(first)
        for side, rest in zip(self._sides, rests, strict=False):
            side.dense.append(rest[:, :, : kept - whole])

    def select(self, sequences: Tensor) -> None:
        """Keep the sequences with these indices, in this order; an index may be repeated."""
        if not isinstance(sequences, Tensor) or sequences.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(f"sequences must be a tensor of their numbers, int32 or int64, not {sequences!r}")
        self._change(lambda rows: rows.index_select(0, sequences.to(rows.device)))

    def repeat(self, times: int) -> None:
        """Repeat every sequence ``times`` times, side by side."""
        if not hasattr(times, "__index__") or times < 1:
            raise ArgumentError(f"times must be a whole number of at least 1, not {times!r}")
        self._change(lambda rows: rows.repeat_interleave(times, 0))

    def to(self, device: torch.device | str | int) -> None:
        """Move the stored tokens to ``device``, in place and bit for bit."""
        check_present(device)
        self._change(lambda rows: rows.to(device))

    def reset(self) -> None:
        """Discard all tokens, and with them dtype, shape and memory."""
        self._sides = None

    def _change(self, what: Callable[[Tensor], Tensor]) -> None:
        changed = [(rows, rows.changed(what)) for rows in self._rows()]  # first all, for one may fail
        for rows, buffer in changed:
            rows.buffer = buffer

    def _filled(self) -> tuple[_Side, _Side]:
        if self._sides is None:
            raise ArgumentError("the store holds no tokens yet; append some first")
        return self._sides

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dtype not in FLOATS or keys.dim() != 4 or not keys.shape[0] * keys.shape[1] * keys.shape[3]:
            raise ArgumentError(
                "keys must be float32, bfloat16 or float16 [batch, heads, tokens, width], of which only tokens may be "
                f"0, not {keys.dtype} {[*keys.shape]}"
            )
        alike = values.dtype == keys.dtype and values.device == keys.device
        if values.dim() != 4 or values.shape[:3] != keys.shape[:3] or not values.shape[3] or not alike:
            raise ArgumentError(
                f"values must be {keys.dtype} {[*keys.shape[:3], '...']} on {keys.device} as the keys are, "
                f"not {values.dtype} {[*values.shape]} on {values.device}"
            )
        for side, new, name in zip(self._sides or (), (keys, values), ("keys", "values"), strict=False):
            held = side.dense.buffer
            shape = (*held.shape[:2], new.shape[2], held.shape[3])
            if new.shape != shape or new.dtype != held.dtype or new.device != held.device:
                raise ArgumentError(
                    f"{name} must be {held.dtype} {[*shape]} on {held.device} like those before them, not {new.dtype} "
                    f"{[*new.shape]} on {new.device}"
                )
