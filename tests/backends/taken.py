"""Arguments for the native kernels at PyTorch's dispatcher, and a count of the calls that they handled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bitport as bp
from bitport.backends import cpu
from bitport.backends.cpu.native import Library
from bitport.ops.product import operand
from bitport.tensor import QTensor

BF16 = torch.bfloat16
NEEDED = "the native kernels were not compiled: pip install --no-deps -e ."
compiled = pytest.mark.skipif(not isinstance(cpu.LIBRARY, Library), reason=NEEDED)


def taken() -> int:
    assert isinstance(cpu.LIBRARY, Library)
    count: int = cpu.LIBRARY.functions.bitport_calls_taken()
    return count


def takes(run: Callable[[], Any], calls: int = 1) -> Any:
    """What ``run`` returns, asserting that the native kernels handled ``calls`` calls in it."""
    before = taken()
    result = run()
    assert taken() - before == calls
    return result


def tiles(scheme: str, *shape: int, dtype: torch.dtype = BF16) -> QTensor:
    return bp.quantize_tensor(torch.randn(*shape, dtype=dtype), bp.preset(scheme)).to_layout("cpu_tiles")


def arguments(scheme: str = "int4-g32", n: int = 40, k: int = 96) -> list[Any]:
    return [torch.randn(3, k, dtype=BF16), *operand(tiles(scheme, n, k)), torch.randn(n, dtype=BF16)]


def linear(*args: Any) -> Any:
    return torch.ops.bitport.linear.default(*args)
