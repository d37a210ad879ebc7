"""Inputs that do not fit are refused with a reason: a wrong number of columns, or a tensor that is not dense. Only
nested tensors of torch.jagged are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.errors import ArgumentError
from bitport.ops.product import linear_then
from bitport.tensor import QTensor

Make = Callable[..., QTensor]


def nested(rows: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([rows[:1], rows[1:]], layout=layout)


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
def test_texts_of_different_lengths(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 64))
    bitport.quantize_(model, {"0": "int8", "1": scheme})
    ids = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4])], layout=torch.jagged)
    y, rows = model(ids), model[0](ids)
    assert y.layout == torch.jagged
    assert torch.equal((rows + model[0](ids)).values(), 2 * rows.values())  # torch adds only those of the same offsets
    for mine, each in zip(y.unbind(), ids.unbind(), strict=True):
        torch.testing.assert_close(mine, model(each))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda x: nested(x, torch.strided),
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "mkldnn": Tensor.to_mkldnn,
}
PRODUCTS: dict[str, Callable[[Tensor, QTensor], Tensor]] = {
    "linear": lambda x, q: F.linear(x, q),
    "bias": lambda x, q: F.linear(x, q, torch.ones(64)),
    "linear_then": lambda x, q: linear_then(x, q, None, "silu"),
    "matmul": lambda x, q: x @ q.t(),
    "gradient": lambda x, q: F.linear(x.detach().requires_grad_(), q),
}


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_inputs_are_refused(make: Make, kind: str, product: str, scheme: str) -> None:
    with pytest.raises(
        ArgumentError, match="as torch.nested.*jagged" if kind == "nested" else r"dense ones: \.to_dense"
    ):
        PRODUCTS[product](OTHERS[kind](torch.randn(3, 96)), make(scheme))


def test_other_ids_are_refused(make: Make) -> None:
    with pytest.raises(ArgumentError, match="ids is a nested tensor of the layout"):
        F.embedding(nested(torch.arange(3), torch.strided), make())


def test_what_comes_before_the_codes_makes_no_other_columns_fit(full: QTensor) -> None:
    """Broadcasting one column with pre_scale would give as many as the weight has."""
    for shape in ((3, 1), (1,), (), (3, 95), (3, 97)):
        with pytest.raises(ArgumentError, match=r"x must have shape \[\.\.\., 96\]"):
            F.linear(torch.ones(shape), full)
