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
from bitport.numerics import FLOATS, Format, is_computed, packed_size
from bitport.ops import Weight
from bitport.ops.attention import joined
from bitport.ops.convert import quantize_into, with_room
from bitport.ops.device import check_present
from bitport.ops.select import DIRECT, call


class _Side:
    """Keys, or values."""

    def __init__(self, fmt: Format, like: Tensor) -> None:
        self.fmt, self.width, (tall, wide) = fmt, like.shape[3], fmt.block
        self.block = (tall, wide or self.width)
        self.dense, none = GrowingRows(like), like[:, :, :0]
        codes = none.new_empty(*none.shape[:3], packed_size(self.width, fmt.number.bits), dtype=fmt.number.storage)
        parts = with_room(codes, none, fmt)
        self.data, self.scale = GrowingRows(parts.data), GrowingRows(parts.scale, tall)
        self.zero = None if parts.zero is None else GrowingRows(parts.zero, tall)

    def reserve(self, tokens: int, floats: int) -> None:
        """Allocate what ``tokens`` more quantized ones, whole blocks, and ``floats`` in all in float need."""
        for rows, more in self._with(tokens):
            rows.reserve(rows.count + more)
        self.dense.reserve(floats)

    def quantize(self, tokens: Tensor) -> None:
        """Write whole blocks of tokens behind those that are held. Heads are matrices: no block spans two of them."""
        zero = None if self.zero is None else self.zero.matrices
        places = (self.data.count, self.data.matrices, self.scale.matrices, zero)
        quantize_into(tokens.flatten(0, 1), self.fmt, *places)

    def take(self, tokens: int) -> None:
        """Hold the tokens that were quantized last."""
        for rows, more in self._with(tokens):
            rows.count += more

    def _with(self, tokens: int) -> Iterator[tuple[GrowingRows, int]]:
        """The rows of the quantized tokens, and how many of these are so many tokens."""
        blocks = tokens // self.block[0]
        yield self.data, tokens
        yield self.scale, blocks
        if self.zero is not None:
            yield self.zero, blocks

    def quantized(self) -> Weight:
        """The quantized tokens as a weight of views into the store."""
        zero = None if self.zero is None else self.zero.held
        described = (self.fmt.dtype, self.data.count, self.width, *self.block, "plain")
        return tuple.__new__(Weight, (self.data.held, self.scale.held, zero, None, *described))  # as product.operand

    def between(self, first: int, end: int) -> Weight:
        """The quantized tokens from ``first`` to ``end``, borders of blocks."""
        every, blocks = self.quantized(), slice(first // self.block[0], end // self.block[0])
        data, scale = every.data[:, :, first:end], every.scale[:, :, blocks]
        zero = None if every.zero is None else every.zero[:, :, blocks]
        return every._replace(data=data, scale=scale, zero=zero, n=end - first)

    def crop(self, count: int) -> None:
        """Keep the whole blocks among the first ``count`` quantized tokens."""
        for rows, kept in self._with(count // self.block[0] * self.block[0]):
            rows.crop(kept)

    def all(self) -> Iterator[GrowingRows]:
        yield from (rows for rows in (self.dense, self.data, self.scale, self.zero) if rows is not None)


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
        for side, each in zip(sides, new, strict=True):
            side.reserve(move, stay + each.shape[2] - move)
            if move:
                side.quantize(each if move == each.shape[2] else each[:, :, start : start + move])
        for side, each in zip(sides, new, strict=True):
            side.take(move)
            side.dense.crop(stay)
            if move < each.shape[2]:
                side.dense.append(each[:, :, :start])
                side.dense.append(each[:, :, start + move :])
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
        args = (q, *keys.quantized(), *values.quantized(), *dense, first, mask, causal, scale)
        direct = DIRECT.get(("attention", q.device.type, "plain")) if is_computed(q, mask) else None
        return call("attention", *args) if direct is None else direct(*args)

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
            rests.append(side.between(whole, whole + self.format.block).dense(side.dense.buffer.dtype))
            side.reserve(0, first + kept - whole)
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
