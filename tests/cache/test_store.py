"""The key-value store: appending tokens in pieces of any size gives what quantizing them all at once gives."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from bitport.cache import KeyValueStore, cache_format
from bitport.cache import store as store_module
from bitport.cache.rows import GrowingRows
from bitport.errors import ArgumentError, DeviceError
from bitport.numerics import Format, quantize_dequantize, sqnr
from bitport.ops import Weight
from bitport.ops.samples import product_budget

FORMATS = (
    "int8",
    "int4-g32",
    "int4:int8",
    "int3-g16-fzero",
    "int2-b8x1:int2-g16",
    "int2-b32x1:int2-g32+first4+last5",
    "fp8-wo",
    "mxfp4-wo",
    "nf4-g32+first2",
    "int4-g32+last3",
    "int8+last999",
    "float",
)
TOKENS = 100


def tokens(count: int = TOKENS, *, width: int = 64, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(name: str, *steps: int, dtype: torch.dtype = torch.float32) -> KeyValueStore:
    store = KeyValueStore(name)
    keys, values = tokens(dtype=dtype).split(steps, 2), tokens(width=48, dtype=dtype, seed=1).split(steps, 2)
    for pair in zip(keys, values, strict=True):
        store.append(*pair)
    return store


def held(store: KeyValueStore) -> tuple[Tensor, Tensor]:
    return store.dense_keys(), store.dense_values()


def kept(x: Tensor, fmt: Format, first: int, quantized: int) -> Tensor:
    """The values that a store should hold for tokens x."""
    value = x.float().clone()
    value[:, :, first : first + quantized] = quantize_dequantize(x[:, :, first : first + quantized], fmt)
    return value.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_it_holds_the_tokens_as_their_format_says(name: str, dtype: torch.dtype) -> None:
    store, fmt = filled(name, TOKENS, dtype=dtype), cache_format(name)
    quantized = fmt.quantized(TOKENS)
    assert torch.equal(store.dense_keys(), kept(tokens(dtype=dtype), fmt.keys, fmt.first, quantized))
    assert torch.equal(
        store.dense_values(), kept(tokens(width=48, dtype=dtype, seed=1), fmt.values, fmt.first, quantized)
    )


@pytest.mark.parametrize("steps", [(1,) * TOKENS, (37, 63), (2, 0, 1, 61, 36)], ids=["single", "two", "uneven"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_steps_make_no_difference(name: str, steps: tuple[int, ...]) -> None:
    one, other = filled(name, TOKENS), filled(name, *steps)
    assert len(one) == len(other) == TOKENS
    assert one.nbytes == other.nbytes
    for wanted, got in zip(held(one), held(other), strict=True):
        assert torch.equal(wanted, got)


def test_keys_and_values_of_one_shape_are_quantized_alike() -> None:
    store = KeyValueStore("int4-g32")
    store.append(tokens(), tokens(seed=1))
    fmt = cache_format("int4-g32").keys
    assert torch.equal(store.dense_keys(), quantize_dequantize(tokens(), fmt))
    assert torch.equal(store.dense_values(), quantize_dequantize(tokens(seed=1), fmt))


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_counted_one_by_one(name: str) -> None:
    store, fmt = filled(name, TOKENS), cache_format(name)
    quantized = fmt.quantized(TOKENS)
    floats = 2 * 3 * (TOKENS - quantized) * (64 + 48) * 4
    sizes = fmt.keys.nbytes(quantized, 64, torch.float32), fmt.values.nbytes(quantized, 48, torch.float32)
    assert store.nbytes == floats + 2 * 3 * sum(sizes)
    assert store.reserved >= store.nbytes


def test_a_prompt_reserves_a_quarter_more_than_it_needs() -> None:
    """And nothing for floats, of which none are left."""
    store = KeyValueStore("int8")
    store.append(tokens(1000), tokens(1000, width=48))
    assert store.reserved <= 1.25 * store.nbytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("left", [99, 97, 70, 64, 33, 4, 3, 0])
def test_a_crop_leaves_the_tokens_before_it(name: str, left: int) -> None:
    store = filled(name, TOKENS)
    before = [part[:, :, :left] for part in held(store)]
    store.crop(left)
    assert len(store) == left
    for wanted, got in zip(before, held(store), strict=True):
        assert torch.equal(wanted, got)
    store.append(tokens(7, seed=2), tokens(7, width=48, seed=3))
    assert len(store) == left + 7
    first = min(left, store.format.first)
    assert torch.equal(store.dense_keys()[:, :, :first], before[0][:, :, :first])


def test_a_crop_makes_floats_of_what_it_cuts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the cut blocks are dequantized, however long the store: speculative decoding crops at every step."""
    store, made = filled("int2-b8x1:int2-g16", TOKENS), []
    whole = Weight.dense
    monkeypatch.setattr(Weight, "dense", lambda weight, dtype: (made.append(weight.n), whole(weight, dtype))[1])
    store.crop(TOKENS - 7)
    store.crop(20)
    assert made == [8] * 4


def runs_out_of_memory_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The ``call``-th call of ``owner.name`` from now on raises what torch raises if memory runs out."""
    function, calls = getattr(owner, name), itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("out of memory")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


STEPS = {
    "append": lambda store: store.append(tokens(100, seed=2), tokens(100, width=48, seed=3)),
    "crop": lambda store: store.crop(23),
    "select": lambda store: store.select(torch.tensor([1, 0])),
}
FAILING: list[tuple[str, Any, str, int]] = [
    *(("append", store_module, "quantize_into", at) for at in (0, 1)),
    *(("append", GrowingRows, "reserve", at) for at in range(8)),
    *(("crop", Weight, "dense", at) for at in (0, 1)),
    *(("crop", GrowingRows, "reserve", at) for at in (0, 1)),
    *(("select", GrowingRows, "changed", at) for at in range(8)),
]


@pytest.mark.parametrize(("step", "owner", "function", "at"), FAILING)
def test_a_step_that_runs_out_of_memory_can_be_repeated(
    step: str, owner: Any, function: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the store as it was, so that the same step then gives what it would have given at once."""
    name = "int2-b8x1:int2-g16+first4+last5"
    store, wanted = filled(name, TOKENS), filled(name, TOKENS)
    before = held(wanted)
    with monkeypatch.context() as patched:
        runs_out_of_memory_at(patched, owner, function, at)
        with pytest.raises(torch.OutOfMemoryError):
            STEPS[step](store)
    assert len(store) == TOKENS
    for one, other in zip(held(store), before, strict=True):
        assert torch.equal(one, other)
    STEPS[step](store)
    STEPS[step](wanted)
    for one, other in zip(held(store), held(wanted), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("step", ["append", "crop"])
def test_nothing_is_changed_before_all_memory_is_there(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled("int2-b8x1:int2-g16+first4", TOKENS)
    store.repeat(1)  # which leaves no room
    append, into, same = GrowingRows.append, store_module.quantize_into, []

    def watched(rows: GrowingRows, new: Tensor) -> None:
        before = rows.buffer
        append(rows, new)
        same.append(rows.buffer is before)

    def written(value: Tensor, fmt: Format, first: int, *parts: Tensor) -> None:
        same.append(all(part is None or part.shape[1] > first // fmt.block[0] for part in parts))
        into(value, fmt, first, *parts)

    monkeypatch.setattr(GrowingRows, "append", watched)
    monkeypatch.setattr(store_module, "quantize_into", written)
    STEPS[step](store)
    assert len(same) >= 2
    assert all(same)


def test_a_first_append_that_fails_leaves_the_store_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyValueStore("int8")
    with monkeypatch.context() as patched:
        runs_out_of_memory_at(patched, store_module, "quantize_into", 1)
        with pytest.raises(torch.OutOfMemoryError):
            store.append(tokens(), tokens())
    store.append(tokens(width=32), tokens(width=32))
    assert len(store) == TOKENS


def test_tokens_that_follow_a_crop_are_quantized_as_ever() -> None:
    store = filled("int8", TOKENS)
    store.crop(40)
    store.append(tokens()[:, :, 40:], tokens(width=48, seed=1)[:, :, 40:])
    for wanted, got in zip(held(filled("int8", TOKENS)), held(store), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("name", FORMATS)
def test_sequences_are_chosen_and_repeated(name: str) -> None:
    store = filled(name, TOKENS)
    keys, values = held(store)
    store.select(torch.tensor([1, 1, 0]))
    assert torch.equal(store.dense_keys(), keys[[1, 1, 0]])
    store.repeat(2)
    assert torch.equal(store.dense_values(), values[[1, 1, 1, 1, 0, 0]])
    store.append(torch.randn(6, 3, 1, 64), torch.randn(6, 3, 1, 48))
    assert store.dense_keys().shape == (6, 3, TOKENS + 1, 64)


def test_a_reset_store_takes_anything_again() -> None:
    store = filled("int8", TOKENS)
    store.reset()
    assert (len(store), store.nbytes, store.reserved) == (0, 0, 0)
    store.append(torch.randn(1, 1, 3, 32, dtype=torch.bfloat16), torch.randn(1, 1, 3, 32, dtype=torch.bfloat16))
    assert store.dense_keys().dtype == torch.bfloat16


def test_moved_to_a_device() -> None:
    store = filled("int2-b8x1:int2-g16+first1", TOKENS)
    store.to("meta")
    assert store.dense_keys().device.type == "meta"
    assert store.dense_keys().shape == (2, 3, TOKENS, 64)


def test_a_copy_is_a_store_of_its_own() -> None:
    store = filled("int8", TOKENS)
    other = copy.deepcopy(store)
    other.append(tokens(1), tokens(1, width=48))
    assert (len(store), len(other)) == (TOKENS, TOKENS + 1)


@pytest.mark.parametrize("change", ["none", "select", "repeat", "to"])
@pytest.mark.parametrize("name", ["int8", "fp8-wo", "int2-b8x1:int2-g16+first4+last5"])
def test_a_store_of_inference_mode_is_one_outside_of_it(name: str, change: str) -> None:
    """Outside it, tokens can be appended, and gradients of queries computed."""
    how = {"select": torch.arange(2), "repeat": 1, "to": "cpu"}
    with torch.inference_mode():
        store = filled(name, TOKENS)
        if change != "none":
            getattr(store, change)(how[change])
    store.append(tokens(9), tokens(9, width=48))
    q = torch.randn(2, 3, 1, 64, requires_grad=True)
    store.attend(q).sum().backward()
    assert q.grad is not None


def test_so_is_one_that_has_quantized_nothing() -> None:
    store = KeyValueStore("int8+first9")
    with torch.inference_mode():
        store.append(tokens(5), tokens(5, width=48))
    q = torch.randn(2, 3, 1, 64, requires_grad=True)
    store.attend(q).sum().backward()
    assert q.grad is not None


def test_rows_made_in_inference_mode_are_normal_tensors() -> None:
    with torch.inference_mode():
        rows = GrowingRows(torch.empty(1, 1, 0, 8))
        empty = rows.buffer
        rows.append(torch.zeros(1, 1, 1, 8))
    assert not empty.is_inference()
    assert not rows.buffer.is_inference()


def test_appending_copies_each_row_a_few_times_at_most() -> None:
    """n rows are copied when memory grows to 1.25 n, n / 1.25 before that, and so on: 5 n in all."""
    rows, copied = GrowingRows(torch.empty(1, 1, 0, 8)), 0
    for _ in range(5000):
        before = rows.buffer
        rows.append(torch.zeros(1, 1, 1, 8))
        copied += 0 if rows.buffer is before else rows.count - 1
    assert copied <= 5 * 5000
    assert rows.reserved <= 1.25 * rows.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_that_over_the_tokens_it_holds(name: str) -> None:
    store = filled(name, TOKENS)
    q = torch.randn(2, 6, 5, 64, generator=torch.Generator().manual_seed(5))
    past = torch.ones(5, TOKENS, dtype=torch.bool).tril(TOKENS - 5)
    keys, values = (part.double() for part in held(store))
    wanted = F.scaled_dot_product_attention(q.double(), keys, values, past, enable_gqa=True)
    got = store.attend(q, causal=True)
    assert float(sqnr(wanted, got)) >= product_budget(torch.float32, 4 * 64 + TOKENS, got.numel())
    masked = store.attend(q, past[None, None])
    assert float(sqnr(wanted, masked)) >= product_budget(torch.float32, 4 * 64 + TOKENS, got.numel())


WRONG = {
    "int": (tokens().long(), tokens(), "keys must be float32.*not torch.int64"),
    "three axes": (tokens()[0], tokens()[0], r"\[batch, heads, tokens, width\]"),
    "no heads": (tokens()[:, :0], tokens()[:, :0], "of which only tokens may be 0"),
    "no columns": (tokens()[..., :0], tokens(), "of which only tokens may be 0"),
    "other tokens": (tokens(), tokens(5), "values must be .* as the keys are"),
    "other dtype": (tokens(), tokens().bfloat16(), "values must be torch.float32.*not torch.bfloat16"),
    "values of no columns": (tokens(), tokens(width=48)[..., :0], r"values must be .*100, 0\]"),
    "values of three axes": (tokens(), tokens(width=48)[..., 0], r"values must be .* as the keys are.* \[2, 3, 100\]"),
    "values elsewhere": (tokens(), tokens(width=48).to("meta"), "on cpu as the keys are, not .* on meta"),
    "elsewhere than before": (
        tokens().to("meta"),
        tokens(width=48).to("meta"),
        "like those before them, not .* on meta",
    ),
    "other width than before": (tokens(width=32), tokens(width=48), "keys must be .*64.* like those before them"),
    "other heads than before": (tokens()[:, :1], tokens(width=48)[:, :1], "like those before them"),
    "other dtype than before": (tokens().half(), tokens(width=48).half(), "keys must be torch.float32.*float16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str) -> None:
    keys, values, says = WRONG[case]
    for store in (filled("int8", TOKENS), *([] if "before" in case else [KeyValueStore("int8")])):
        count = len(store)
        with pytest.raises(ArgumentError, match=says):
            store.append(keys, values)
        assert len(store) == count


def test_an_empty_store_has_nothing_to_look_at() -> None:
    store = KeyValueStore("int8")
    with pytest.raises(ArgumentError, match=r"values must be torch.float32 .* as the keys are"):
        store.append(tokens(), tokens().bfloat16())
    assert len(store) == 0
    with pytest.raises(ArgumentError, match="no tokens yet"):
        store.attend(tokens())
    store.append(tokens(3), tokens(3))
    store.crop(0)
    with pytest.raises(ArgumentError, match="need at least 1 tokens"):
        store.attend(tokens())
    for count in (1, 0.0):
        with pytest.raises(ArgumentError, match=f"0 to 0, not to {count}"):
            store.crop(count)  # type: ignore[arg-type]


def test_sequences_and_devices_that_are_none() -> None:
    store = filled("int8", TOKENS)
    for sequences in ([0], torch.tensor([0.0])):
        with pytest.raises(ArgumentError, match="sequences must be a tensor of their numbers"):
            store.select(sequences)  # type: ignore[arg-type]
    for times in (0, 1.5):
        with pytest.raises(ArgumentError, match=f"times must be a whole number of at least 1, not {times}"):
            store.repeat(times)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="no device cuda:99 here"):
        store.to("cuda:99")


def test_negative_views_are_read_as_what_they_mean() -> None:
    """Their memory holds the opposite numbers."""

    def negative(x: Tensor) -> Tensor:
        return torch._neg_view(-x)

    one, other = KeyValueStore("int8+last2"), KeyValueStore("int8+last2")
    one.append(tokens(), tokens(seed=1))
    other.append(negative(tokens()), negative(tokens(seed=1)))
    for wanted, got in zip(held(one), held(other), strict=True):
        assert torch.equal(wanted, got)
    q, mask = tokens()[:, :, :1], tokens(seed=2)[:, :1, :1, :1].expand(-1, -1, -1, TOKENS)
    assert torch.equal(other.attend(negative(q), negative(mask)), one.attend(q, mask))


def test_queries_in_forward_mode_keep_their_tangent() -> None:
    """Of the generic kernel: those for one device have no derivative, and would take it for zero."""
    store = filled("int8", TOKENS, dtype=torch.float32)
    q = torch.randn(2, 3, 2, 64)
    with forward_ad.dual_level():
        y = store.attend(forward_ad.make_dual(q, torch.ones_like(q)))
        got = forward_ad.unpack_dual(y).tangent
    step = 1e-3
    wanted = (store.attend(q + step).double() - store.attend(q - step).double()) / (2 * step)
    assert float(sqnr(wanted, got)) > 40
