"""Triton's kernels against the generic ones and float64: in its interpreter on CPU tensors, or on the device that
TRITON_DEVICE names. Run by test_triton.py in a separate process, since triton reads at import whether to interpret."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from bitport.backends.triton import OPS as NAMED
from bitport.backends.triton import configs, kernels, linear, operand, rounding, rows
from bitport.backends.triton.kernels import KERNELS
from bitport.numerics import NUMBER_TYPES, to_storage
from bitport.ops import OPS, Impl, Sample, Weight, register_kernel, use_kernel
from bitport.schemes import preset
from tests.backends.products import products, shortfall
from tests.turns import slow, turns

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
NO_ROWS = "x has no rows"
GRAPHS = "eager" if DEVICE.type == "cpu" else "inductor"
RECORDS = Path(__file__).parents[2] / "bench" / "results"
DEFAULT = json.loads((configs.FOLDER / "default.json").read_text())

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


def here(args: tuple[Any, ...]) -> list[Any]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


def misses(sample: Sample, run: Callable[..., Tensor]) -> float:
    return shortfall(sample, run(*here(sample.args)).cpu())


def test_the_ops_that_are_reported_without_triton_are_all() -> None:
    assert {op for op, *_ in KERNELS} == {*NAMED}


ELSEWHERE = ("triton_blocks", "triton_rounding", "triton_scaled")
"""Tested in on_triton_quantize.py, on_triton_inputs.py and on_triton_scaled.py."""
DTYPES = {"dyn_linear": "fp16", "dequantize": "fp32"}
"""Dtypes of samples, bf16 for the other ops; test_products_of_any_shape covers all."""
KINDS = {"triton_dense": ("strided",), "triton_gemv": ("vector", "row")}
"""Kinds of inputs, for kernels where not all of them matter."""
MET = {"triton_tokens": ("int8-row", "int4-rows", "int2-masked", "fp8-added", "nf4-dense", "int4-fresh")}
"""Each format and kind once, where a slow test takes all combinations of them."""


def sampled() -> Iterator[Any]:
    for op, name, run, refuses in KERNELS:
        if name in ELSEWHERE:
            continue
        every = KINDS.get(name, ("",))
        yield pytest.param(op, name, run, refuses, MET.get(name, every), id=f"{op}-{name}")
        if name in MET:
            yield from slow((op, name, run, refuses, every))


@pytest.mark.parametrize(("op", "name", "run", "refuses", "kinds"), sampled())
def test_samples(
    op: str, name: str, run: Callable[..., Tensor], refuses: Callable[..., str | None], kinds: tuple[str, ...]
) -> None:
    """Every scheme; the only reasons to refuse are no rows, or scales that differ along a row."""
    missed, taken = {}, 0
    for sample in OPS[op].samples(torch.device("cpu"), FLOATS[DTYPES.get(op, "bf16")]):
        if not sample.name.endswith(kinds) or "-large" in sample.name:
            continue  # for tiles see test_products_of_any_shape
        reason = refuses(*sample.args)
        assert reason is None or reason == NO_ROWS or "along a row" in reason
        if reason is None:
            taken += 1
            if (gap := misses(sample, run)) > 0:
                missed[sample.name] = gap
    assert missed == {}
    assert taken >= (17 if kinds != MET.get(name) else len(kinds))


SHAPES = ((17, 65, 264), (1, 20, 100), (1, 1, 1), (3, 33, 7), (2, 10, 1030), (5, 18, 520))
"""(rows, N, K)"""
WEIGHTS = ("int4-g32", "int4-g20-sym", "int3-g24", "int8", "int6-g32-fzero", "nf4", "fp8-wo", "mxfp4-wo")
ROUNDED = (
    *(
        "int8-dyn",
        "int8-static",
        "int4-int8-g32",
        "int8-dyn-g64-asym",
        "int4-int8-g24",
        "fp8",
        "fp8-row",
        "int4-fp8-g32",
    ),
    *("fp8-block", "mxfp8", "mxfp4", "nvfp4"),
)
PRODUCTS = {"gemv": linear.gemv, "tiles": linear.tiles}


@pytest.mark.parametrize(("scheme", "dtype"), turns([*WEIGHTS, *ROUNDED], FLOATS))
def test_products_of_any_shape(scheme: str, dtype: str) -> None:
    """Each product called directly, whatever the table would choose."""
    act, missed = preset(scheme).act, {}
    for (m, n, k), (name, product) in itertools.product(SHAPES, PRODUCTS.items()):
        if name == "gemv" and (act in rounding.SEPARATE or m > 5):
            continue
        (sample,) = products(scheme, FLOATS[dtype], "plain", n=n, k=k, m=m)
        x, *rest = here(sample.args)
        held = linear.prepared(x, *((rest[10], rest[11]) if act else ("", None)))
        y = product(held, Weight(*rest[:10]), rest[-1], x.dtype, configs.of(DEVICE))
        if (gap := shortfall(sample, y.cpu())) > 0:
            missed[name, m, n, k] = gap
    assert missed == {}


@pytest.mark.parametrize("name", PRODUCTS)
def test_budgets_can_fail(name: str) -> None:
    """One of 12,288 codes off by half the range is noticed."""
    (sample,) = products("int4-g32", FP32, "plain", n=48, k=256, m=5)
    x, data, *rest = here(sample.args)
    data = data.clone()
    data[0, 0] ^= 8
    held = linear.prepared(x, "", None)
    y = PRODUCTS[name](held, Weight(data, *rest[:9]), rest[-1], FP32, configs.of(DEVICE))
    assert shortfall(sample, y.cpu()) > 30


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_of_integers(bits: int) -> None:
    codes_of(f"int{bits}")


@pytest.mark.parametrize("dtype", [name for name in NUMBER_TYPES if not name.startswith("int") and "e8m0" not in name])
def test_every_code(dtype: str) -> None:
    codes_of(dtype)


def codes_of(dtype: str) -> None:
    """Check all codes of a type, special values too, at every position of a unit, in rows that are word-aligned and
    not."""
    number = NUMBER_TYPES[dtype]
    for k in (256 + 8, 256 + 7):
        codes = torch.arange(k) % (number.qmax + 1)
        codes = torch.stack([codes.roll(turn) for turn in range(3)]).to(torch.uint8)
        stored = to_storage(codes, number)
        weight = Weight(stored.to(DEVICE), torch.ones(3, 1, device=DEVICE), None, None, dtype, 3, k, 1, k, "plain")
        got, want = rows.dense(weight, FP32).cpu(), weight.dense(FP32).cpu()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def weight(scheme: str, n: int = 48, k: int = 256, layout: str = "plain", m: int = 5) -> tuple[Sample, list[Any]]:
    (sample,) = products(scheme, BF16, layout, n=n, k=k, m=m)
    return sample, here(sample.args)


@pytest.mark.parametrize(
    ("scheme", "layout"), [("int8", "signed_int8"), ("int4", "plain_int32"), ("int4-g32-sym", "plain_int32")]
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_layouts_of_the_same_bytes(name: str, scheme: str, layout: str) -> None:
    sample, (x, *rest) = weight(scheme, layout=layout)
    y = PRODUCTS[name](linear.prepared(x, "", None), Weight(*rest[:10]), rest[-1], x.dtype, configs.of(DEVICE))
    assert shortfall(sample, y.cpu()) <= 0


def test_parts_that_do_not_start_at_a_word_or_are_strided() -> None:
    _, (x, data, scale, zero, *rest) = weight("int4-g32")
    moved = torch.empty(data.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(data.shape).copy_(data)
    run = kernels.run_linear(linear.tiles)
    expected = run(x, data, scale, zero, *rest)
    assert torch.equal(run(x, moved, scale, zero, *rest), expected)
    assert torch.equal(run(x, data, scale.t().contiguous().t(), zero.t().contiguous().t(), *rest), expected)


def with_gaps(part: Tensor) -> Tensor:
    """The same elements with other data in between."""
    raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    return torch.stack([raw, torch.full_like(raw, 3)], -1)[..., 0].view(part.dtype)


@pytest.mark.parametrize("scheme", ["int4-g32", "nvfp4-wo"])
def test_gaps_between_entries_are_seen(scheme: str) -> None:
    """For every operand: a bias may be a column of a matrix, ids the last column of a batch of tokens."""
    _, (x, *rest) = weight(scheme)
    experts = [part if part is None else part.expand(3, *part.shape).contiguous() for part in rest[:4]]
    ends, ids = torch.tensor([1, 3, 5], dtype=torch.int32, device=DEVICE), torch.tensor([3, 40, 7], device=DEVICE)
    for run, args in (
        *((kernels.run_linear(product), [x, *rest]) for product in PRODUCTS.values()),
        (kernels.grouped, [x, ends, *experts, *rest[4:10]]),
        (kernels.embedding, [ids, *rest[:10], FP32]),
    ):
        apart = [with_gaps(arg) if isinstance(arg, Tensor) else arg for arg in args]
        assert torch.equal(run(*apart), run(*args))


def test_a_batch_may_be_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA starts up to 2^31 - 1 programs along the first axis, and 65535 along the others."""
    asked: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            asked.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(rows, "_rows", Kernel())
    many = 70_000  # keys of 2048 sequences with 32 heads are as many
    data, scale = torch.zeros(many, 9, 8, dtype=torch.uint8, device=DEVICE), torch.ones(many, 9, 1, device=DEVICE)
    rows.dense(Weight(data, scale, None, None, "int8", 9, 8, 1, 8, "plain"), FP32)
    assert asked == [(many * 2, 1)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_splits_of_k(name: str) -> None:
    """One program in all, or as many as there are steps, stay within the budget."""
    sample, (x, *rest) = weight("int4-g32", n=24, k=2056, m=2)
    for programs in (1, 3, 1000):
        content = configs.of(DEVICE).content
        tiles = [{**each, "programs": programs} for each in content["tiles"]]
        config = configs.Config({**content, "tiles": tiles, "gemv": {**content["gemv"], "programs": programs}})
        y = PRODUCTS[name](linear.prepared(x, "", None), Weight(*rest[:10]), rest[-1], x.dtype, config)
        assert shortfall(sample, y.cpu()) <= 0


@pytest.mark.parametrize("name", ["native", "folded"])
def test_sums_of_integers_are_exact(name: str) -> None:
    """Products like -128 x 127 with power-of-two scales: nothing may be rounded."""
    n, k, m = 16, 1056, 20
    codes = torch.randint(0, 2, (n, k)) * 255
    codes[0] = 0
    x = torch.where(torch.rand(m, k) < 0.5, -127.0, 127.0)
    x[0] = -127.0
    parts = (codes.to(torch.uint8), torch.full((n, 1 if name == "native" else k // 24), 0.5), None, None, "int8", n, k)
    args = (x, *parts, 1, k if name == "native" else 24, "plain", "int8-tensor", torch.ones(1, 1), None)
    y = kernels.run_dyn(linear.tiles)(*here(args)).cpu()
    assert torch.equal(y.double(), x.double() @ (codes - 128).double().t() / 2)


@pytest.mark.parametrize("scheme", ["int8-dyn", "int8-dyn-g64", "int4-int8-g32-sym"])
def test_without_products_of_int8(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are then multiplied in another type that represents them exactly."""
    monkeypatch.setattr(configs, "of", lambda device: configs.Config(DEFAULT, int8=False))
    (sample,) = products(scheme, BF16, "plain", n=33, k=264, m=17)
    x, *rest = here(sample.args)
    held = linear.prepared(x, rest[10], rest[11])
    x_traits, w_traits = linear.rounded_traits(held), operand.weight_traits(Weight(*rest[:10]))
    types = [linear.dot_of(x_traits, w_traits, "end", BF16, int8) for int8 in (True, False)]
    assert types == [tl.int8, tl.bfloat16]
    assert misses(sample, kernels.run_dyn(linear.tiles)) <= 0


@pytest.mark.parametrize("scheme", ["fp8", "fp8-row", "fp8-block", "fp8-g64"])
@pytest.mark.usefixtures("float8")
def test_float8_as_such(scheme: str) -> None:
    for m, n, k in SHAPES:
        (sample,) = products(scheme, BF16, "plain", n=n, k=k, m=m)
        assert misses(sample, kernels.run_dyn(linear.tiles)) <= 0


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cpu" and not configs.of(DEVICE).float8:
        pytest.skip("this device does not multiply float8")
    monkeypatch.setattr(configs, "of", lambda device: configs.Config(DEFAULT, float8=True))


@pytest.mark.parametrize("bounds", [(0, 0, 0), (0, 40, 40), (40, 40, 40), (17, 18, 40), (1, 2, 3)])
@pytest.mark.parametrize("op", ["grouped_linear", "dyn_grouped_linear"])
def test_experts(op: str, bounds: tuple[int, ...]) -> None:
    sample = next(iter(OPS[op].samples(torch.device("cpu"), FP32)))
    x = torch.randn(40, sample.args[0].shape[1])
    ends = torch.tensor(bounds, dtype=torch.int32)
    args = (x, ends, *sample.args[2:])
    got, want = kernels.grouped(*here(args)).cpu(), OPS[op].generic(*args)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    assert not got[bounds[-1] :].any()


def test_ends_that_are_wrong_read_nothing_else() -> None:
    sample = next(iter(OPS["grouped_linear"].samples(torch.device("cpu"), FP32)))
    for bounds in ((5, 3, 7), (-1, 100, 2), (1000, 1000, 1000)):
        args = (sample.args[0], torch.tensor(bounds, dtype=torch.int32), *sample.args[2:])
        assert kernels.grouped(*here(args)).shape == (7, sample.args[7])


def test_ids_outside_the_table_are_nan() -> None:
    _, (_, *rest) = weight("int4-g32")
    ids = torch.tensor([3, -1, 48, 47, 1 << 40], device=DEVICE)
    got = kernels.embedding(ids, *rest[:10], FP32)
    assert got.isnan().all(1).tolist() == [False, True, True, False, True]
    assert torch.equal(got[[0, 3]], Weight(*rest[:10]).dense(FP32)[[3, 47]])


@pytest.mark.parametrize(
    ("scheme", "m", "kernel"),
    [
        ("int4", 1, "triton_gemv"),
        ("int4", 2, "triton_tiles"),
        ("int3", 128, "triton_tiles"),
        ("nf4", 129, "triton_dense"),
        ("mxfp4-wo", 4096, "triton_dense"),
        ("int8-dyn", 1, "triton_gemv"),
        ("int8-dyn", 4096, "triton_tiles"),
        ("fp8-block", 1, "triton_tiles"),
        ("int4", 0, "generic"),
    ],
)
def test_which_kernel_is_chosen(scheme: str, m: int, kernel: str) -> None:
    """By the default table, for meta tensors."""
    (sample,) = products(scheme, BF16, "plain", n=64, k=256, m=1)
    args = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in sample.args]
    args[0] = torch.empty(m, 256, dtype=BF16, device="meta")
    op = "dyn_linear" if preset(scheme).act else "linear"
    takers = [name for its, name, _, refuses in KERNELS if its == op and refuses(*args) is None]
    assert [*takers, "generic"][0] == kernel


def test_layouts_that_are_refused() -> None:
    (sample,) = products("int4", BF16, "plain", n=64, k=256, m=1)
    plain = Weight(*sample.args[1:11])
    for name in ("cpu_tiles", "tile_packed_8"):
        args = (sample.args[0], *plain.to_layout(name), None)
        assert f"plain_int32, not {name}" in str(kernels.refuses_linear("tiles")(*args))


@pytest.mark.usefixtures("own_tables")
def test_compiled_whole() -> None:
    """The op is one node of a graph without breaks, which runs the forced kernel."""
    ran: list[int] = []

    def counted(*args: Any) -> Tensor:
        ran.append(args[0].shape[0])
        return kernels.run_linear(linear.tiles)(*args)

    register_kernel(Impl("linear", "counted", DEVICE.type, counted, lambda *args: None))
    _, args = weight("int4-g32")
    compiled = torch.compile(lambda x: torch.ops.bitport.linear.default(x, *args[1:]), backend=GRAPHS, fullgraph=True)
    with use_kernel("linear=counted"):
        for x in (args[0], args[0][:3]):
            y = compiled(x)
    assert ran == [5, 3]
    assert torch.equal(y, kernels.run_linear(linear.tiles)(args[0][:3], *args[1:]))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="records a CUDA graph")
@pytest.mark.parametrize("scheme", ["int4", "int8-dyn", "fp8-row", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("m", [1, 5, 300])
def test_recorded_in_a_graph(scheme: str, m: int) -> None:
    """No call synchronizes, and replaying the graph with another input gives that input's result."""
    (sample,) = products(scheme, BF16, "plain", n=64, k=256, m=m)
    x, *rest = here(sample.args)
    op, still = OPS["dyn_linear" if preset(scheme).act else "linear"].overload, x.clone()
    op(still, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            y = op(still, *rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    still.copy_(x.flip(0) * 2)
    graph.replay()
    assert torch.equal(y, op(x.flip(0) * 2, *rest))
