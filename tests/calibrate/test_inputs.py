"""The inputs of weights, wherever a model multiplies with them: the sum of x x^T against one computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.calibrate.inputs import PANEL, PRODUCTS, Inputs, Rows, Watch, check_inputs
from bitport.errors import ArgumentError
from bitport.ops.functional import TRACED_GROUPED_MM
from bitport.ops.matmul import matmul
from bitport.ops.product import linear
from bitport.tensor import FUNCTIONS

W, V = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))
"""One stored as [N, K] = [6, 4], and one as [K, N]."""

X = torch.randn(2, 5, 4)

SEEN: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(X, W),
    "module": lambda: _module()(X),
    "matmul": lambda: torch.matmul(X, W.t()),
    "operator": lambda: X @ W.mT,
    "mm": lambda: torch.mm(X.flatten(0, 1), W.t()),
    "mm by name": lambda: torch.mm(input=X.flatten(0, 1), mat2=W.t()),
    "on the left": lambda: W @ X.mT,
    "mm on the left": lambda: torch.mm(W, X.flatten(0, 1).t()),
    "addmm": lambda: torch.addmm(torch.zeros(6), X.flatten(0, 1), W.t()),
    "mm into a tensor": lambda: torch.mm(X.flatten(0, 1), W.t(), out=torch.empty(10, 6)),
    "addmm in place": lambda: torch.zeros(10, 6).addmm_(X.flatten(0, 1), W.t()),
    "addmm of a tensor": lambda: torch.zeros(6).addmm(X.flatten(0, 1), W.t()),
    "vectors": lambda: torch.stack([W @ x for x in X.flatten(0, 1)]),
    "mv": lambda: torch.stack([torch.mv(W, x) for x in X.flatten(0, 1)]),
    "mv of a tensor": lambda: torch.stack([W.mv(vec=x) for x in X.flatten(0, 1)]),
    "rows of it": lambda: F.linear(X, W[2:5]),
}


def _module() -> nn.Linear:
    linear = nn.Linear(4, 6, bias=False)
    linear.weight = W
    return linear


def by_hand(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).double()
    return rows.t() @ rows


@pytest.mark.parametrize("how", SEEN)
def test_a_product_is_seen(how: str) -> None:
    with torch.no_grad(), Watch({"w": W}) as watch:
        SEEN[how]()
        SEEN[how]()
    assert int(watch.seen["w"].rows) == 20
    torch.testing.assert_close(watch.seen["w"].gram.double(), 2 * by_hand(X), rtol=1e-5, atol=1e-5)


def test_a_weight_that_lies_transposed() -> None:
    with torch.no_grad(), Watch({"v": V}, transposed=["v"]) as watch:
        torch.addmm(torch.zeros(6), X.flatten(0, 1), V)
        F.linear(X, V.t())
    torch.testing.assert_close(watch.seen["v"].gram.double(), 2 * by_hand(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_inputs_and_states_of_recurrent_layers(make: Callable[..., nn.RNNBase]) -> None:
    """PyTorch multiplies them in a function of its own. Each state but the last is an input of the next step."""
    layer, x = make(4, 6), torch.randn(5, 2, 4)
    with torch.no_grad(), Watch({"ih": layer.weight_ih_l0, "hh": layer.weight_hh_l0}) as watch:
        watched = layer(x)[0]
    with torch.no_grad():
        states = layer(x)[0]
    torch.testing.assert_close(watched, states, rtol=1e-5, atol=1e-5)
    seen = watch.seen["ih"], watch.seen["hh"]
    assert [int(each.rows) for each in seen] == [10, 10]
    for each, rows in zip(seen, (x, states[:-1]), strict=True):  # the first state is zero
        torch.testing.assert_close(each.gram.double(), by_hand(rows), rtol=1e-5, atol=1e-5)


UNSEEN: dict[str, Callable[[], Tensor]] = {
    "another weight": lambda: F.linear(X, W.detach().clone()),
    "columns of it": lambda: F.linear(X[..., :2], W[:, :2]),
    "the other way round": lambda: F.linear(torch.ones(3, 6), W.t()),
    "no product": lambda: X.sum() + W.sum(),
}


@pytest.mark.parametrize("how", UNSEEN)
def test_what_is_no_product_with_its_rows_is_not_seen(how: str) -> None:
    with torch.no_grad(), Watch({"w": W}) as watch:
        UNSEEN[how]()
    assert not watch.seen["w"].any_rows


def test_a_square_weight_is_seen_in_its_own_direction_only() -> None:
    """Transposed it has the same shape, but inputs of its rows instead of its columns."""
    square, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    with torch.no_grad(), Watch({"square": square}) as watch:
        F.linear(X, square)
        F.linear(x, square.t())
        torch.mm(x, square)
    torch.testing.assert_close(watch.seen["square"].gram.double(), by_hand(X), rtol=1e-5, atol=1e-5)


def test_rows_stay_as_they_were_multiplied() -> None:
    """A model may go on to write to them."""
    x = X.clone()
    with torch.no_grad(), Watch({"w": W}, collect=Rows) as watch:
        F.linear(x, W)
        x.zero_()
    ((index, rows),) = watch.seen["w"].calls
    assert index == ()
    assert torch.equal(rows, X.flatten(0, 1))


EXPERTS = nn.Parameter(torch.randn(3, 16, 8))
ROUTED = torch.randn(6, 8)

ROUTES: dict[str, Callable[[], Tensor]] = {
    "one by one": lambda: torch.cat([F.linear(ROUTED[:2], EXPERTS[0]), F.linear(ROUTED[2:], EXPERTS[2])]),
    "grouped": lambda: F.grouped_mm(
        ROUTED.bfloat16().float(), EXPERTS.mT, offs=torch.tensor([2, 2, 6], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("how", ROUTES)
def test_experts_see_their_own_inputs(how: str) -> None:
    with torch.no_grad(), Watch({"experts": EXPERTS}) as watch:
        ROUTES[how]()
    seen = watch.seen["experts"]
    assert seen.rows.tolist() == [2, 0, 4]
    for at, rows in ((0, ROUTED[:2]), (1, ROUTED[:0]), (2, ROUTED[2:])):
        torch.testing.assert_close(seen[at].gram.double(), by_hand(rows), rtol=2e-2, atol=2e-2)


BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": torch.bmm,
    "bmm of a tensor": Tensor.bmm,
    "bmm by name": lambda x, w: x.bmm(mat2=w),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(3, 1, 16), batch2=w, batch1=x),
    "baddbmm of a tensor": lambda x, w: torch.zeros(3, 1, 16).baddbmm(x, w, beta=2),
    "baddbmm in place": lambda x, w: torch.zeros(3, x.shape[1], 16).baddbmm_(x, w),
    "baddbmm on the left": lambda x, w: torch.baddbmm(torch.zeros(3, 16, 1), w.mT, x.mT),
}


@pytest.mark.parametrize("product", BATCHED.values(), ids=BATCHED)
def test_experts_in_one_batched_product(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(3, 5, 8)
    with torch.no_grad(), Watch({"experts": EXPERTS}) as watch:
        product(x, EXPERTS.mT)
    for at in range(3):
        torch.testing.assert_close(watch.seen["experts"][at].gram.double(), by_hand(x[at]), rtol=1e-5, atol=1e-5)


DENSE: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: torch.matmul(x, EXPERTS.mT),
    "one batch": lambda x: x.unsqueeze(0) @ EXPERTS.mT,
    "two batches": lambda x: torch.matmul(x.view(2, 1, 3, 8), EXPERTS.mT),
    "row by row": lambda x: torch.stack([torch.matmul(row, EXPERTS.mT) for row in x]),
    "on the left": lambda x: EXPERTS @ x.mT,
}


@pytest.mark.parametrize("how", DENSE)
def test_all_experts_see_the_same(how: str) -> None:
    with torch.no_grad(), Watch({"experts": EXPERTS}) as watch:
        DENSE[how](ROUTED)
    assert watch.seen["experts"].rows.tolist() == [6, 6, 6]
    for at in range(3):
        torch.testing.assert_close(watch.seen["experts"][at].gram.double(), by_hand(ROUTED), rtol=1e-5, atol=1e-5)


def test_one_expert_sees_every_batch() -> None:
    one, x = nn.Parameter(torch.randn(1, 16, 8)), torch.randn(4, 5, 8)
    with torch.no_grad(), Watch({"one": one}) as watch:
        x @ one.mT
    torch.testing.assert_close(watch.seen["one"][0].gram.double(), by_hand(x), rtol=1e-5, atol=1e-5)


def test_every_product_of_a_quantized_weight_is_one_that_is_seen() -> None:
    """Except einsum, which refuses such weights, F.grouped_mm, which is Python and calls torch._grouped_mm, and what
    stands for it in compiled models of transformers: calibration is eager."""
    taken = {func for func, made in FUNCTIONS.items() if made is linear or made.__module__ == matmul.__module__}
    assert taken - set(PRODUCTS) == {torch.einsum, F.grouped_mm, TRACED_GROUPED_MM}


def test_inputs_of_two_batches_add_up() -> None:
    parts, whole = Inputs((), 4), Inputs((), 4)
    for found, rows in ((parts, X[0]), (parts, X[1]), (whole, X)):
        found.add(rows)
    torch.testing.assert_close(parts.gram, whole.gram)
    assert int(parts.rows) == int(whole.rows) == 10


def test_inputs_of_more_columns_than_are_summed_up_at_once() -> None:
    """Float32 sums of 7 products of numbers below 8."""
    x, found = torch.randn(7, 2 * PANEL + 5), Inputs((), 2 * PANEL + 5)
    found.add(x)
    torch.testing.assert_close(found.gram.double(), x.double().t() @ x.double(), rtol=0, atol=7 * 7 * 64 * 2.0**-24)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_inputs_are_told(bad: float) -> None:
    inputs = Inputs((), 4)
    inputs.add(torch.tensor([1.0, bad, 0.0, 0.0]))
    with pytest.raises(ArgumentError, match="NaN or infinity at the input of some"):
        check_inputs({"some.weight": inputs})


def test_the_products_of_attention_are_seen() -> None:
    """Both projections are inside one torch function; an identity projection exposes the input of the second."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    inner = copy.deepcopy(attention)
    with torch.no_grad():
        inner.out_proj.weight.copy_(torch.eye(8))
        inner.out_proj.bias.zero_()
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        with Watch({"in": attention.in_proj_weight, "out": attention.out_proj.weight}) as watch:
            seen = attention(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(seen, attention(x, x, x, need_weights=False)[0])
        held = inner(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(watch.seen["in"].gram.double(), by_hand(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(watch.seen["out"].gram.double(), by_hand(held), rtol=1e-5, atol=1e-5)


def test_queries_and_keys_go_into_the_same_weight() -> None:
    """In cross-attention, torch multiplies the two by different rows of in_proj_weight."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    queries, keys = torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    with torch.no_grad(), Watch({"in": attention.in_proj_weight}) as watch:
        attention(queries, keys, keys, need_weights=False)
    assert int(watch.seen["in"].rows) == 3 * (5 + 7)
    torch.testing.assert_close(watch.seen["in"].gram.double(), by_hand(queries) + by_hand(keys), rtol=1e-5, atol=1e-5)
