"""Quantized keys and values of one layer in memory of a fixed size, for programs whose shapes do not change:
torch.compile, CUDA graphs, torch.export.

A token lies at its position, and places that no mask shows are not read. What happens does not depend on data: so no
tokens stay in float, and none are rounded together with later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bitport.cache.format import CacheFormat, cache_format
from bitport.errors import ArgumentError
from bitport.numerics import Format, packed_size
from bitport.numerics.packing import as_bytes
from bitport.ops import Weight
from bitport.ops.convert import format_json, from_list
from bitport.ops.select import call


def static_format(name: str | CacheFormat) -> CacheFormat:
    """The format called ``name``; ArgumentError unless each token of it can be rounded as it comes, by compiled code
    too."""
    found = cache_format(name)
    if found.block > 1 or found.first or found.last:
        raise ArgumentError(
            f"a cache of a fixed size rounds every token by itself, as it comes, and {name} keeps some in float until "
            "later: take scales of one token (such as int8 or int4-g32), without +first and +last"
        )
    if "e8m0" in (found.keys.scale, found.values.scale):
        raise ArgumentError(
            f"{name} has scales of e8m0, for which PyTorch's compiler writes no code on CPUs: take a format without "
            "mx, such as int4-g32 or fp8-wo-g32"
        )
    return found


class _Side:
    """Keys or values: parts [batch, heads, room, ..] of rows of ``width`` numbers of ``dtype``."""

    def __init__(self, fmt: Format) -> None:
        self.fmt, self.text = fmt, format_json(fmt)
        self.count = 2 if fmt.zero == "none" else 3
        self.parts: Sequence[Tensor] = ()

    def zeros(self, like: Tensor, room: int) -> list[Tensor]:
        (batch, heads, _, width), dtype = like.shape, like.dtype
        codes, groups = packed_size(width, self.fmt.number.bits), self.fmt.scale_shape(1, width)[1]
        zero = self.fmt.zero_dtype(dtype)
        sizes = [(codes, self.fmt.number.storage), (groups, self.fmt.scale_dtype(dtype)), (groups, zero)]
        return [like.new_zeros(batch, heads, room, size, dtype=kind) for size, kind in sizes if kind is not None]

    def hold(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> None:
        self.parts, self.width, self.dtype = parts, width, dtype

    def write(self, tokens: Tensor, positions: Tensor) -> None:
        rounded = from_list(call("quantize", tokens.detach(), self.text))
        for whole, part in zip(self.parts, rounded, strict=False):
            assert part is not None
            if torch.compiler.is_compiling():
                whole.index_copy_(2, positions, part)
            else:  # where the op has no kernel for 8-bit floats
                as_bytes(whole).index_copy_(2, positions, as_bytes(part))

    def operand(self) -> Weight:
        data, scale, *zero = self.parts
        room, block = data.shape[2], self.fmt.block_shape(1, self.width)
        return Weight(data, scale, zero[0] if zero else None, None, self.fmt.dtype, room, self.width, *block, "plain")

    def dense(self) -> Tensor:
        return call("dequantize", *self.operand(), self.dtype)


class StaticStore:
    """The keys and values of one attention layer, in memory that :meth:`allocate` makes, or that another owns and
    :meth:`hold` is given.

    ``format``: one that rounds each token by itself, such as "int8" or "int4-g32".
    """

    def __init__(self, format: str | CacheFormat) -> None:
        self.format = static_format(format)
        self._keys, self._values = _Side(self.format.keys), _Side(self.format.values)

    def zeros(self, keys: Tensor, values: Tensor, room: int) -> list[Tensor]:
        """Memory for ``room`` tokens like those of ``keys`` and ``values`` [batch, heads, any number, width]."""
        return [*self._keys.zeros(keys, room), *self._values.zeros(values, room)]

    def hold(self, parts: Sequence[Tensor], keys: int, values: int, dtype: torch.dtype) -> None:
        """Use ``parts``, as :meth:`zeros` gave them, for keys and values of these widths and ``dtype``."""
        self._keys.hold(parts[: self._keys.count], keys, dtype)
        self._values.hold(parts[self._keys.count :], values, dtype)

    def allocate(self, keys: Tensor, values: Tensor, room: int) -> None:
        self.hold(self.zeros(keys, values, room), keys.shape[3], values.shape[3], keys.dtype)

    @property
    def parts(self) -> list[Tensor]:
        return [*self._keys.parts, *self._values.parts]

    @property
    def room(self) -> int:
        return self._keys.parts[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to(self, device: torch.device | str) -> None:
        """Move what is stored to ``device``."""
        parts = [part.to(device) for part in self.parts]
        self.hold(parts, self._keys.width, self._values.width, self._keys.dtype)

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Round the tokens [batch, heads, count, width] and put them at ``positions``, int64 [count]."""
        self._keys.write(keys, positions)
        self._values.write(values, positions)

    def attend(self, q: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
        """Attention of the queries over the tokens that ``mask`` [.., room] shows, as :mod:`bitport.ops.attention`
        defines it."""
        return call("attention", q, *self._keys.operand(), *self._values.operand(), None, None, 0, mask, False, scale)

    def dense_keys(self) -> Tensor:
        """All places of the keys as floats [batch, heads, room, width]."""
        return self._keys.dense()

    def dense_values(self) -> Tensor:
        return self._values.dense()


class StaticFloats:
    """Such a store of keys and values as they are, for programs with caches of either kind."""

    def __init__(self) -> None:
        self.parts: Sequence[Tensor] = ()

    def zeros(self, keys: Tensor, values: Tensor, room: int) -> list[Tensor]:
        return [like.new_zeros(*like.shape[:2], room, like.shape[3]) for like in (keys, values)]

    def hold(self, parts: Sequence[Tensor], *_: object) -> None:
        self.parts = parts

    @property
    def room(self) -> int:
        return self.parts[0].shape[2]

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for whole, part in zip(self.parts, (keys, values), strict=True):
            whole.index_copy_(2, positions, part)

    def attend(self, q: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
        keys, values = self.parts
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=True)

    def dense_keys(self) -> Tensor:
        return self.parts[0]

    def dense_values(self) -> Tensor:
        return self.parts[1]
