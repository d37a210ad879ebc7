"""A bias, or a factor applied after a product, whose values are not those in its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bitport.ops.product import linear_then
from bitport.ops.select import use_kernel
from bitport.tensor import QTensor

Make = Callable[..., QTensor]


class Wrapper(Tensor):
    """A tensor without memory of its own (its address is 0); ops see ``inner``."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, Wrapper) else each for each in args), **(kwargs or {}))


class Named(Tensor):
    pass


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda values: torch._neg_view(-values),
    "negated-parameter": lambda values: nn.Parameter(torch._neg_view(-values), requires_grad=False),
    "imaginary": lambda values: torch.complex(values, -values).conj().imag,
    "wrapper": Wrapper,
    "subclass": lambda values: values.as_subclass(Named),
}


@pytest.mark.parametrize("kernel", [None, "native"])
@pytest.mark.parametrize("learns", [False, True], ids=["", "learns"])
@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 64])
def test_it_counts_as_what_it_stands_for(
    make: Make, n: int, kind: str, scheme: str, learns: bool, kernel: str | None
) -> None:
    q, x, bias, times = make(scheme, n, 96), torch.randn(5, 96, requires_grad=learns), torch.randn(n), torch.rand(5, n)
    given, factor = KINDS[kind](bias), KINDS[kind](times)
    with use_kernel(f"linear={kernel},dyn_linear={kernel}") if kernel else nullcontext():
        y, z = F.linear(x, q, given), linear_then(x, q, given, "silu", factor)
    torch.testing.assert_close(y.as_subclass(Tensor), F.linear(x, q, bias))
    torch.testing.assert_close(z.as_subclass(Tensor), F.silu(F.linear(x, q, bias)) * times)
    assert y.requires_grad == z.requires_grad == learns
    if kind == "subclass":
        assert type(z) is Named
        assert type(y) is Named or learns  # an autograd.Function returns plain tensors


def test_one_without_values_is_refused(make: Make) -> None:
    with FakeTensorMode() as mode:
        bias = mode.from_tensor(torch.randn(64))
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        F.linear(torch.randn(5, 96), make(), bias)


@pytest.mark.parametrize("kernel", ["native", "dense_mm", "generic"])
def test_a_forced_kernel_has_its_gradient(make: Make, kernel: str) -> None:
    q, x = make(), nn.Parameter(torch.randn(5, 96))
    with use_kernel(f"linear={kernel}"):
        F.linear(x, q).sum().backward()
    torch.testing.assert_close(x.grad, q.dequantize().sum(0).expand(5, -1), rtol=1e-5, atol=1e-5)
