"""torch.equal of QTensors, and copy_, which wants the same of both."""

from __future__ import annotations

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.schemes import preset
from bitport.tensor import QTensor, from_parts

from .conftest import Make


def test_equal_compares_bits(make: Make) -> None:
    q = make()
    assert torch.equal(q, q.clone())
    assert not torch.equal(q, q.half())
    assert not torch.equal(q[:32], q[32:])
    broken = q.clone()
    broken.qdata[1, 1] ^= 1
    assert not torch.equal(q, broken)
    assert not any(torch.equal(*pair) for pair in [(q, q.dequantize()), (q.dequantize(), q)])
    square = make("int8", 64, 64)
    assert not torch.equal(square, square.t())
    assert not torch.equal(square, square.replace(scheme=preset("int8-dyn")))


def test_equal_compares_shapes(make: Make) -> None:
    """The same parts as another tensor."""
    matrix, experts, conv = make("int8", 64, 96), make("int8", 4, 64, 96), make("int8", 8, 4, 3, 3, kind="conv")

    def reshaped(q: QTensor, *shape: int) -> QTensor:
        plain = q.to_layout("plain")
        batch = shape[:-2] if q.batched else ()
        parts = (None if part is None else part.reshape(*batch, *part.shape[-2:]) for part in plain.parts)
        return from_parts(type(plain.parts)(*parts), q.scheme, shape=shape, dtype=q.dtype)  # type: ignore[arg-type]

    for other, q in (
        (matrix.expand(3, 64, 96), matrix),
        (reshaped(experts, 2, 2, 64, 96), experts),
        (reshaped(conv, 8, 36), conv),
        (reshaped(conv, 8, 4, 9), conv),
    ):
        assert not torch.equal(q, other)
        assert not torch.equal(other, q)
        with pytest.raises(ArgumentError, match="scheme and shape must be equal"):
            q.copy_(other)
    with pytest.raises(ArgumentError, match="scheme and shape must be equal"):
        make("int8", 3, 64, 96).copy_(matrix)
    assert torch.equal(reshaped(conv, 8, 4, 3, 3), conv)
