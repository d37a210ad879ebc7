"""attention: what it refuses, the order of tokens and heads, and that its budget is not slack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitport.errors import ArgumentError
from bitport.numerics import sqnr
from bitport.ops import OPS
from bitport.ops.attention import AttentionArgs, joined, sample

CPU = torch.device("cpu")


def call(**changes: Any) -> AttentionArgs:
    """Two sequences of 37 int8 tokens and 5 dense ones, 4 query heads on 2 key heads, 3 query rows."""
    of = sample("small", CPU, torch.float32, "int8", "int4-g16", dense=5, first=2, causal=True)
    return AttentionArgs.of(*of.args)._replace(**changes)


def run(of: AttentionArgs) -> torch.Tensor:
    result: torch.Tensor = OPS["attention"].overload(*of.args())
    return result


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "q-int": ({"q": torch.ones(2, 4, 3, 32, dtype=torch.int32)}, "q must be float32.*not torch.int32"),
    "q-axes": ({"q": torch.ones(4, 3, 32)}, r"q must be .*\[batch, heads, rows, width\]"),
    "q-number": ({"q": torch.tensor(1.0), "scale": None}, r"q must be .*not torch.float32 \[\]"),
    "q-no-width": ({"q": torch.ones(2, 4, 3, 0), "scale": None}, "a width that is not 0"),
    "q-width": (
        {"q": torch.ones(2, 4, 3, 16)},
        r"keys must be \[2, a divisor of 4, tokens, 16\].*not \[2, 2, 37, 32\]",
    ),
    "q-heads": ({"q": torch.ones(2, 3, 3, 32)}, "a divisor of 3"),
    "q-batch": ({"q": torch.ones(1, 4, 3, 32)}, "keys must be .1, "),
    "q-device": ({"q": torch.ones(2, 4, 3, 32, device="meta")}, "q is on meta, keys on cpu"),
    "rows": ({"q": torch.ones(2, 4, 43, 32)}, "43 rows need at least 43 tokens .*not 42"),
    "one-dense": ({"dense_values": None}, "give dense keys and dense values"),
    "dense-dtype": ({"dense_keys": torch.ones(2, 2, 5, 32).half()}, "dense keys must be torch.float32.*float16"),
    "dense-shape": ({"dense_values": torch.ones(2, 2, 5, 32)}, r"dense values must be .*\[2, 2, 5, 48\]"),
    "first": ({"first": 6}, "first must be from 0 to the 5 dense tokens, not 6"),
    "first-negative": ({"first": -1}, "not -1"),
    "mask-shape": ({"mask": torch.ones(2, 4, 3, 41)}, r"mask must be .*\[2, 4, 3, 42\].*not .*41"),
    "mask-axes": ({"mask": torch.ones(3, 42)}, "mask must be"),
    "mask-int": ({"mask": torch.ones(1, 1, 3, 42).long()}, "not torch.int64"),
    "mask-device": ({"mask": torch.ones(1, 1, 3, 42, device="meta")}, "on meta"),
    "scale-zero": ({"scale": 0.0}, "scale must be a positive number, not 0.0"),
    "scale-nan": ({"scale": math.nan}, "not nan"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(case: str) -> None:
    changes, says = WRONG[case]
    with pytest.raises(ArgumentError, match=says):
        run(call(**changes))


def test_parts_that_do_not_fit_are_refused() -> None:
    of = call()
    with pytest.raises(ArgumentError, match=r"needs data torch\.uint8"):
        run(of._replace(keys=of.keys._replace(data=of.keys.data[..., :-1])))
    with pytest.raises(ArgumentError, match="float scale"):
        run(of._replace(values=of.values._replace(scale=of.values.scale[:, :, :-1])))
    for changes in ({"tokens": 36}, {"shape": (1, 4, 2, 32)}, {"shape": (2, 4, 1, 32)}):
        other = sample("other", CPU, torch.float32, "int8", "int8", **changes)
        with pytest.raises(ArgumentError, match=r"values must be \[2, 2, 37, '...'\] as the keys are"):
            run(of._replace(values=AttentionArgs.of(*other.args).values))


def test_no_tokens_are_refused() -> None:
    empty = sample("row", CPU, torch.float32, "int8", "int8", rows=1, tokens=1)
    args = AttentionArgs.of(*empty.args)
    none = [w._replace(data=w.data[:, :, :0], scale=w.scale[:, :, :0], n=0) for w in (args.keys, args.values)]
    with pytest.raises(ArgumentError, match="need at least 1 tokens to look at, not 0"):
        run(args._replace(keys=none[0], values=none[1]))


def test_tokens_stand_in_the_order_of_the_sequence() -> None:
    """First dense tokens, quantized tokens, remaining dense tokens: the last row sees all of them, the first all but
    two."""
    of = call()
    keys = joined(of.keys, of.dense_keys, of.first, torch.float64)
    values = joined(of.values, of.dense_values, of.first, torch.float64)
    assert of.dense_keys is not None
    assert torch.equal(keys[:, :, :2].float(), of.dense_keys[:, :, :2])
    assert torch.equal(keys[:, :, -3:].float(), of.dense_keys[:, :, 2:])
    got = run(of)
    for row, tokens in enumerate((40, 41, 42)):
        q = of.q[:, :, row : row + 1].double()
        wanted = F.scaled_dot_product_attention(q, keys[:, :, :tokens], values[:, :, :tokens], enable_gqa=True)
        assert float(sqnr(wanted, got[:, :, row : row + 1])) > 110


def test_a_row_that_sees_nothing_is_zero() -> None:
    mask = torch.ones(1, 1, 3, 42, dtype=torch.bool)
    mask[:, :, 1] = False
    for of in (mask, torch.zeros(1, 1, 3, 42).masked_fill(~mask, -math.inf)):
        for kernel in (OPS["attention"].overload, OPS["attention"].generic):
            y = kernel(*call(mask=of).args())
            assert not y[:, :, 1].any()
            assert y[:, :, [0, 2]].abs().min() > 0


def test_a_default_scale_is_that_of_the_width() -> None:
    args = call().args()
    assert torch.equal(OPS["attention"].overload(*args[:-1], None), OPS["attention"].overload(*args[:-1], 32**-0.5))


def test_a_budget_is_not_slack() -> None:
    """A change of 3 of 256 steps in one code of one of 37 tokens is noticed."""
    of = sample("noticed", CPU, torch.float32, "int8", "int8")
    args = AttentionArgs.of(*of.args)
    for name in ("keys", "values"):
        weight = getattr(args, name)
        data = weight.data.clone()
        data[..., 5, 7] ^= 3
        broken = run(args._replace(**{name: weight._replace(data=data)}))
        assert float(sqnr(of.expected(), broken)) < of.budget


def test_a_gradient_reaches_the_queries() -> None:
    of = call(q=call().q.requires_grad_())
    grad = torch.randn(run(of).shape, generator=torch.Generator().manual_seed(3))
    run(of).backward(grad)
    exact = of.q.detach().double().requires_grad_()
    keys = joined(of.keys, of.dense_keys, of.first, torch.float64)
    values = joined(of.values, of.dense_values, of.first, torch.float64)
    past = torch.ones(3, 42, dtype=torch.bool).tril(39)
    F.scaled_dot_product_attention(exact, keys, values, past, enable_gqa=True).backward(grad.double())
    assert of.q.grad is not None
    assert exact.grad is not None
    assert float(sqnr(exact.grad, of.q.grad)) > 100
