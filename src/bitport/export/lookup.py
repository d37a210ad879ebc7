"""Look up rows of a quantized table in universally supported operators, from the codes of the plain layout."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.export.relink import Operand
from bitport.numerics import number_type
from bitport.tensor import QTensor


class Lookup(Operand):
    packed: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, q: QTensor) -> None:
        super().__init__()
        matrix, parts, number = q.matrix, q.plain(), number_type(q.matrix.dtype)
        self.k, self.block_n, self.block_k = matrix.k, matrix.block_n, matrix.block_k
        self.bits, self.midpoint = number.bits, number.midpoint
        self.register_buffer("packed", parts.data)
        self.register_buffer("scale", parts.scale.float())
        self.register_buffer("zero", None if parts.zero is None else parts.zero.float())

    def embedding(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        flat = ids.reshape(-1)
        blocks = flat // self.block_n if self.block_n > 1 else flat
        zero = self.midpoint if self.zero is None else self._each(self.zero.index_select(0, blocks))
        codes = self._codes(self.packed.index_select(0, flat))
        value = (codes - zero) * self._each(self.scale.index_select(0, blocks))
        return value.reshape(*ids.shape, self.k)

    def _each(self, part: Tensor) -> Tensor:
        """Expand to one number per column, or one for all."""
        return part.repeat_interleave(self.block_k, 1)[:, : self.k] if self.block_k < self.k else part

    def _codes(self, rows: Tensor) -> Tensor:
        """Unpack to float32, exactly. ExecuTorch has no bit shifts."""
        if self.bits == 8:
            return rows.float()
        low = rows & 15
        return torch.stack([low.float(), (rows - low).float() / 16], -1).flatten(1)[:, : self.k]
