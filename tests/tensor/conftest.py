"""Fixtures that make quantized tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitport.schemes import preset
from bitport.tensor import QTensor, quantize_tensor

Make = Callable[..., QTensor]


@pytest.fixture
def make() -> Make:
    def quantized(
        scheme: str = "int4-g32", *shape: int, dtype: torch.dtype = torch.float32, **extra: object
    ) -> QTensor:
        value = torch.randn(shape or (64, 96)).to(dtype)
        return quantize_tensor(value, preset(scheme), **extra)  # type: ignore[arg-type]

    return quantized


@pytest.fixture
def full(make: Make) -> QTensor:
    """A QTensor with every optional part: zero, perm, pre_scale and act_scale."""
    extra: dict[str, Tensor] = {
        "perm": torch.randperm(96),
        "pre_scale": torch.rand(96) + 0.5,
        "act_scale": torch.tensor([[0.1]]),
    }
    return make("int4-g32", **extra)
