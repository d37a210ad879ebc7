"""The native attention over quantized keys and values, in every variant that this processor can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.backends.cpu.attention import _tokens
from bitport.backends.cpu.native import Library
from bitport.cache import KeyValueStore
from bitport.errors import ArgumentError, KernelError
from bitport.numerics import sqnr
from bitport.ops import OPS, Sample, Weight, decide, select, use_kernel
from bitport.ops.attention import AttentionArgs, sample
from bitport.report.memory import peak, resident
from tests.backends.taken import compiled, takes

pytestmark = compiled
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def shortfall(of: Sample) -> float:
    """By how much the kernel misses its budget in dB; called through Python it gives the same numbers."""
    assert decide("attention", *of.args).kernel == "native"
    y = OPS["attention"].overload(*of.args)
    with use_kernel("attention=native"):
        assert torch.equal(takes(lambda: OPS["attention"].overload(*of.args), 0), y)
    return of.budget - float(sqnr(of.expected(), y))


@DTYPES
def test_the_samples(library: Library, dtype: torch.dtype) -> None:
    missed = {of.name: gap for of in OPS["attention"].samples(CPU, dtype) if (gap := shortfall(of)) > 0}
    assert missed == {}


PLAIN: dict[str, dict[str, Any]] = {
    "one row": {"rows": 1},
    "causal rows": {"rows": 5, "causal": True},
    "bool mask": {"mask": "bool", "causal": True},
    "float mask": {"mask": "float"},
    "floats too": {"dense": 7, "first": 3},
    "floats alone": {"tokens": 0, "dense": 9},
    "a scale": {"scale": 8.0},
}


@pytest.mark.parametrize("keys", ["int8", "int4-g32", "int2-b8x1", "nf4-g16", "fp8-wo"])
@pytest.mark.parametrize("case", PLAIN)
def test_generation_does_not_go_through_python(case: str, keys: str) -> None:
    of = sample("plain", CPU, torch.bfloat16, keys, "int4-g16", **PLAIN[case])
    y = takes(lambda: OPS["attention"].overload(*of.args))
    assert float(sqnr(of.expected(), y)) >= of.budget


SPOILED: dict[str, Callable[[AttentionArgs], AttentionArgs]] = {
    "a scale of 0": lambda call: call._replace(scale=0.0),
    "a scale that is none": lambda call: call._replace(scale=math.nan),
    "codes of fewer tokens": lambda call: call._replace(keys=spoiled(call.keys, data=lambda data: data[:, :, 1:])),
    "codes of fewer heads": lambda call: call._replace(values=spoiled(call.values, data=lambda data: data[:, :1])),
    "scales of fewer tokens": lambda call: call._replace(
        values=spoiled(call.values, scale=lambda part: part[:, :, 1:])
    ),
    "zeros of fewer tokens": lambda call: call._replace(values=spoiled(call.values, zero=lambda part: part[:, :, 1:])),
    "zeros of floats": lambda call: call._replace(values=spoiled(call.values, zero=lambda part: part.double())),
    "a width of its own": lambda call: call._replace(keys=call.keys._replace(k=31)),
    "fewer than no tokens": lambda call: call._replace(keys=call.keys._replace(n=-1)),
    "blocks of 0": lambda call: call._replace(keys=call.keys._replace(block_n=0)),
    "first of none": lambda call: call._replace(first=1),
    "a mask for fewer": lambda call: call._replace(mask=torch.ones(1, 1, 1, 36, dtype=torch.bool)),
    "a mask of integers": lambda call: call._replace(mask=torch.ones(1, 1, 1, 37, dtype=torch.int32)),
    "more rows than tokens": lambda call: call._replace(q=call.q[:, :, :1].repeat(1, 1, 38, 1), causal=True),
    "dense keys alone": lambda call: call._replace(dense_keys=torch.zeros(2, 2, 3, 32)),
}


def spoiled(weight: Weight, **how: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    return weight._replace(**{name: what(getattr(weight, name)) for name, what in how.items()})


@pytest.mark.parametrize("case", SPOILED)
def test_what_does_not_fit_together_is_told(case: str) -> None:
    """The kernel at the dispatcher leaves it to the op's check, and touches no memory."""
    call = AttentionArgs.of(*sample("spoiled", CPU, torch.float32, "int8", "int4-g16").args)
    with pytest.raises(ArgumentError):
        takes(lambda: select.call("attention", *SPOILED[case](call).args()), 0)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("int8", "int8-asym"),
        ("int4-g32", "int4-g64-fzero"),
        ("int2-b32x1", "int2-g32"),
        ("int2-b32x1-sym", "int3-g16"),
        ("fp8-wo", "fp8-wo-g32"),
        ("fp8-e5m2-wo", "mxfp8-wo"),
        ("mxfp4-wo", "nf4-g48"),
        ("int6-channel", "int5-g16"),
    ],
)
@pytest.mark.parametrize("width", [16, 24, 33, 64, 128, 160])
def test_formats_and_widths(library: Library, keys: str, values: str, width: int) -> None:
    shape = (2, 6, 2, width)
    of = sample(f"{width}", CPU, torch.bfloat16, keys, values, shape=shape, value_width=width, tokens=70, causal=True)
    assert shortfall(of) <= 0


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (20, 1), (5, 5)])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 70])
def test_heads_and_rows(library: Library, heads: tuple[int, int], rows: int) -> None:
    of = sample(
        "heads", CPU, torch.float32, "int8", "int4-g16", shape=(2, *heads, 32), rows=rows, tokens=80, causal=True
    )
    assert shortfall(of) <= 0


@pytest.mark.parametrize("tokens", [31, 32, 33, 2047, 2048, 2049, 4100])
def test_many_tokens_are_put_together(library: Library, tokens: int) -> None:
    for first, dense in ((0, 0), (5, 40)):
        of = sample(
            "long", CPU, torch.float32, "int8", "int8", rows=2, tokens=tokens, first=first, dense=dense, causal=True
        )
        assert shortfall(of) <= 0


def test_the_threads_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    of = sample("threads", CPU, torch.float32, "int8", "int4-g32", shape=(2, 8, 2, 64), tokens=4100, rows=3)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with use_kernel("attention=native"):
            found.append(OPS["attention"].overload(*of.args))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_queries_and_masks_may_lie_anyhow(library: Library) -> None:
    of = sample("strided", CPU, torch.float32, "int8", "int8", rows=4, mask="float")
    args = AttentionArgs.of(*of.args)
    assert args.mask is not None
    q = args.q.transpose(1, 2).contiguous().transpose(1, 2)
    mask = args.mask.transpose(2, 3).contiguous().transpose(2, 3)
    assert not q.is_contiguous()
    got = OPS["attention"].overload(*args._replace(q=q, mask=mask.expand(2, 4, 4, -1)).args())
    assert torch.equal(got, OPS["attention"].overload(*of.args))


def test_scores_far_apart_and_masks_of_the_largest_size(library: Library) -> None:
    """Vanishing weights become zero, and nothing overflows, with scores up to 1e4 and a mask of the lowest float."""
    of = sample("far", CPU, torch.float32, "int8", "int8", rows=2)
    args = AttentionArgs.of(*of.args)
    mask = torch.zeros(1, 1, 2, 37)
    mask[..., 20:] = torch.finfo(torch.float32).min
    far = args._replace(q=args.q * 3000, mask=mask)
    got, wanted = (OPS["attention"].overload(*far.args()), OPS["attention"].generic(*far.args()))
    assert got.isfinite().all()
    assert float(sqnr(wanted, got)) > 60


def test_a_row_of_the_least_masks_sees_all_tokens_alike(library: Library) -> None:
    """-3.4e38 is finite, and so large that scores do not change it: the result is the mean of all values."""
    of = AttentionArgs.of(*sample("least", CPU, torch.float32, "int8", "int8", rows=2).args)
    got = OPS["attention"].overload(*of._replace(mask=torch.full((1, 1, 1, 37), -3.4e38)).args())
    mean = of.values.dense(torch.float64).mean(2, keepdim=True).repeat_interleave(2, 1)
    assert (got - mean).abs().max() < 1e-5


def test_masks_of_bool_need_no_default_dtype(library: Library) -> None:
    of = sample("default", CPU, torch.float32, "int8", "int8", mask="bool")
    wanted = OPS["attention"].overload(*of.args)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(OPS["attention"].overload(*of.args), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_many_rows_over_many_tokens(library: Library) -> None:
    """So many work items that each one covers all tokens."""
    of = sample("pieces", CPU, torch.float32, "int8", "int8", shape=(2, 8, 8, 16), rows=300, tokens=2100, causal=True)
    assert shortfall(of) <= 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak of memory")
def test_many_rows_take_memory_for_one_result() -> None:
    """Independent of the number of tokens: 4 MB in float32 beside the 4 MB result, and scratch for two threads."""
    few = AttentionArgs.of(
        *sample("memory", CPU, torch.float32, "int8", "int8", shape=(1, 8, 8, 16), value_width=256).args
    )
    many = few._replace(q=few.q[:, :, :1].expand(-1, -1, 512, -1), keys=longer(few.keys), values=longer(few.values))
    OPS["attention"].overload(*few.args())
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident()
    OPS["attention"].overload(*many.args())
    assert peak() - before < 24 << 20


def longer(weight: Weight) -> Weight:
    tokens = 1 << 15
    data, scale = (part[:, :, :1].expand(-1, -1, tokens, -1).contiguous() for part in weight[:2])
    return weight._replace(data=data, scale=scale, n=tokens)


@pytest.mark.parametrize("change", ["no-sequences", "no-width"])
def test_results_without_numbers(library: Library, change: str) -> None:
    of = AttentionArgs.of(*sample("none", CPU, torch.float32, "int8", "int8").args)
    if change == "no-sequences":
        none = [each._replace(data=each.data[:0], scale=each.scale[:0]) for each in (of.keys, of.values)]
        of = of._replace(q=of.q[:0], keys=none[0], values=none[1])
    else:
        data, scale = of.values.data[..., :0], of.values.scale[..., :0]
        of = of._replace(values=of.values._replace(data=data, scale=scale, k=0, block_k=1))
    assert OPS["attention"].overload(*of.args()).shape == (*of.q.shape[:3], of.values.k)


def test_no_number_stays_none(library: Library) -> None:
    """A NaN in a query makes its row NaN, a NaN in a token every row that attends to it; other rows are untouched."""
    of = AttentionArgs.of(*sample("nan", CPU, torch.float32, "int8", "int8", dense=3, first=0, causal=True).args)
    q = of.q.clone()
    q[0, 0, 0, 5] = math.nan
    y = OPS["attention"].overload(*of._replace(q=q).args())
    assert y[0, 0, 0].isnan().all()
    assert y[0, 0, 1:].isfinite().all()
    assert y[1].isfinite().all()
    assert of.dense_keys is not None
    keys = of.dense_keys.clone()
    keys[1, 0, 2] = math.nan  # only the last row sees the newest token; query heads 0 and 1 read it
    y = OPS["attention"].overload(*of._replace(dense_keys=keys).args())
    assert y[1, :2, 2].isnan().all()
    assert y[1, :2, :2].isfinite().all()
    assert y[0].isfinite().all()
    assert y[1, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("keys", "values", "says"),
    [
        ("int8", "int8-b4x1", "values must have scales of one token, not of blocks of 4x1"),
        ("int8-b4x8", "int8", "keys must have scales of one token or, of keys, a channel"),
        ("int4-g8", "int8", "keys must have groups of a multiple of 16"),
    ],
)
def test_what_it_refuses(keys: str, values: str, says: str) -> None:
    of = sample("refused", CPU, torch.float32, keys, values)
    decision = decide("attention", *of.args)
    assert decision.kernel == "generic"
    assert says in dict(decision.refused)["native"]
    with use_kernel("attention=native"), pytest.raises(KernelError, match="was forced"):
        OPS["attention"].overload(*of.args)


def test_a_store_is_read_where_it_lies() -> None:
    """A query copies no part of a long store: the kernel is given the store's own buffers."""
    store = KeyValueStore("int4-g32+first4+last40")
    store.append(torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64))
    store.append(torch.randn(1, 2, 1, 64), torch.randn(1, 2, 1, 64))
    side = store._sides[0]  # type: ignore[index]
    _, kept = _tokens(side.quantized(), side.dense.held)
    places = [rows.buffer.data_ptr() for rows in (side.data, side.scale, side.zero, side.dense) if rows is not None]
    assert [part.data_ptr() for part in kept if part is not None] == places
