"""Products into tensors that are given, or added to them in place, as TRL's losses compute the outputs of a head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import sqnr
from bitport.tensor import QTensor

Make = Callable[..., QTensor]
ROOM: dict[str, Callable[[], Tensor]] = {
    "full": lambda: torch.empty(3, 64),
    "empty": lambda: torch.empty(0),
    "transposed": lambda: torch.empty(64, 3).t(),
}


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("name", ["mm", "matmul", "addmm"])
def test_a_product_is_written_into_what_is_given(make: Make, name: str, room: str) -> None:
    q, x, out, function = make(), torch.randn(3, 96), ROOM[room](), getattr(torch, name)
    product = functools.partial(function, torch.randn(64)) if name == "addmm" else function
    assert product(x, q.t(), out=out) is out
    assert torch.equal(out, product(x, q.t()))


def test_products_of_experts_and_of_one_row(make: Make) -> None:
    q, experts, x = make(), make("int4-g32", 2, 64, 96), torch.randn(2, 3, 96)
    for product, out in (
        (functools.partial(torch.bmm, x, experts.mT), torch.empty(2, 3, 64)),
        (functools.partial(torch.baddbmm, torch.randn(2, 1, 64), x, experts.mT), torch.empty(2, 3, 64)),
        (functools.partial(torch.mv, q, x[0, 0]), torch.empty(64)),
    ):
        assert product(out=out) is out
        assert torch.equal(out, product())


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_a_product_of_16_bits_may_be_wider(make: Make, autocast: bool) -> None:
    """float32 sums are nearer by far than the 52 dB that rounding to bfloat16 leaves (8 bits: 6.02 * 8 + 4)."""
    q, x, out = make(dtype=torch.bfloat16), torch.randn(3, 96).bfloat16(), torch.zeros(3, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = torch.mm(x, q.t(), out_dtype=torch.float32)
        torch.addmm(out, x, mat2=q.t(), out_dtype=torch.float32, out=out)
    exact = x.double() @ q.dequantize(torch.float32).double().t()
    for each in (y, out):
        assert each.dtype == torch.float32
        assert sqnr(exact, each) > 120


@pytest.mark.parametrize("scheme", ["int4", "int8-dyn"])
def test_products_are_added_in_place(make: Make, scheme: str) -> None:
    q, g, x = make(scheme), torch.randn(3, 64), torch.randn(3, 96)
    for begin, a, b in ((torch.randn(3, 96), g, q), (torch.randn(3, 64), x, q.t())):
        total = begin.clone()
        assert total.addmm_(a, b, beta=0.5, alpha=2) is total
        assert torch.equal(total, torch.addmm(begin, a, b, beta=0.5, alpha=2))


@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        (torch.ones(3, 96), {"out": torch.empty(3, 64).half()}, r"torch.float32 \[3, 64\], but is torch.float16"),
        (torch.ones(3, 96, requires_grad=True), {"out": torch.empty(3, 64)}, r"no derivative: .*torch\.no_grad"),
        (torch.ones(3, 96), {"out_dtype": torch.float64}, "is torch.float32, .*, not torch.float64"),
    ],
    ids=["another dtype", "a gradient", "wider than float32"],
)
def test_what_cannot_be_given(make: Make, x: Tensor, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        torch.mm(x, make().t(), **given)
