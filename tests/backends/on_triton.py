"""Triton's kernels against the generic ones and float64: in its interpreter on CPU tensors, or on the device that
TRITON_DEVICE names. Run by test_triton.py in a process of its own, since triton is told at import to interpret."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.results import lines_of
from bitport import layouts
from bitport.backends import measured
from bitport.backends.aten import LEAST_ROWS, from_rows
from bitport.backends.triton import configs, kernels, linear, measure, rounding, rows
from bitport.backends.triton.kernels import KERNELS
from bitport.numerics import NUMBER_TYPES, Quantized, to_storage
from bitport.ops import OPS, Impl, Sample, Weight, register_kernel, use_kernel
from bitport.schemes import preset
from tests.backends.products import products, shortfall

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
NO_ROWS = "x has no rows"
GRAPHS = "eager" if DEVICE.type == "cpu" else "inductor"
RECORDS = Path(__file__).parents[2] / "bench" / "results"
DEFAULT = json.loads((configs.FOLDER / "default.json").read_text())

if DEVICE.type == "cpu":
    from tests.backends.interpreter import correct_bfloat16

    correct_bfloat16()


def here(args: tuple[Any, ...]) -> list[Any]:
    return [arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args]


def misses(sample: Sample, run: Callable[..., Tensor]) -> float:
    return shortfall(sample, run(*here(sample.args)).cpu())


ELSEWHERE = ("triton_rounding", "triton_scaled")
"""Tried in on_triton_inputs.py and on_triton_scaled.py."""
DTYPES = {"dyn_linear": "fp16", "dequantize": "fp32"}
"""Of samples, bf16 for the other ops; test_products_of_any_shape tries every one."""
KINDS = {"triton_dense": ("strided",), "triton_gemv": ("vector", "row")}
"""Kinds of inputs where not all of them make a difference."""


@pytest.mark.parametrize(
    ("op", "name", "run", "refuses"),
    [pytest.param(*kernel, id=f"{kernel[0]}-{kernel[1]}") for kernel in KERNELS if kernel[1] not in ELSEWHERE],
)
def test_samples(op: str, name: str, run: Callable[..., Tensor], refuses: Callable[..., str | None]) -> None:
    """Every scheme; what is refused is refused for having no rows, or scales that differ along a row."""
    missed, taken = {}, 0
    for sample in OPS[op].samples(torch.device("cpu"), FLOATS[DTYPES.get(op, "bf16")]):
        if not sample.name.endswith(KINDS.get(name, "")):
            continue
        reason = refuses(*sample.args)
        assert reason is None or reason == NO_ROWS or "along a row" in reason
        if reason is None:
            taken += 1
            if (gap := misses(sample, run)) > 0:
                missed[sample.name] = gap
    assert missed == {}
    assert taken >= 17


SHAPES = ((17, 65, 264), (1, 20, 100), (1, 1, 1), (3, 33, 7), (2, 10, 1030), (5, 18, 520))
"""Rows, N, K; all for bf16, the first two for the others."""
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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scheme", [*WEIGHTS, *ROUNDED])
def test_products_of_any_shape(scheme: str, dtype: str) -> None:
    """Each product, asked directly, whatever the table would choose."""
    act, missed = preset(scheme).act, {}
    for (m, n, k), (name, product) in itertools.product(SHAPES if dtype == "bf16" else SHAPES[:2], PRODUCTS.items()):
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
    """One code of 12,288 that is off by half the range is seen."""
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
    """All codes of a type, the specials too, at every place of a unit, in rows that start at words and that do not."""
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


@pytest.mark.parametrize("name", PRODUCTS)
def test_splits_of_k(name: str) -> None:
    """One program for everything, and as many as there are steps, give the same within the budget."""
    sample, (x, *rest) = weight("int4-g32", n=24, k=2056, m=2)
    for programs in (1, 3, 1000):
        content = configs.of(DEVICE).content
        tiles = [{**each, "programs": programs} for each in content["tiles"]]
        config = configs.Config({**content, "tiles": tiles, "gemv": {**content["gemv"], "programs": programs}})
        y = PRODUCTS[name](linear.prepared(x, "", None), Weight(*rest[:10]), rest[-1], x.dtype, config)
        assert shortfall(sample, y.cpu()) <= 0


@pytest.mark.parametrize("name", ["native", "folded"])
def test_sums_of_integers_are_exact(name: str) -> None:
    """-128 x 127 and the like, with scales that are powers of two: nothing may be rounded."""
    n, k, m = 16, 1056, 20
    codes = torch.randint(0, 2, (n, k)) * 255
    codes[0] = 0
    x = torch.where(torch.rand(m, k) < 0.5, -127.0, 127.0)
    x[0] = -127.0
    parts = (codes.to(torch.uint8), torch.full((n, 1 if name == "native" else k // 24), 0.5), None, None, "int8", n, k)
    args = (x, *parts, 1, k if name == "native" else 24, "plain", "int8-tensor", torch.ones(1, 1), None)
    y = kernels.run_dyn(linear.tiles)(*here(args)).cpu()
    assert torch.equal(y.double(), x.double() @ (codes - 128).double().t() / 2)


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
    """By the default table, for tensors without data."""
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
        parts = layouts.repack(plain.matrix, Quantized(*plain[:4]), "plain", name)
        args = (sample.args[0], *plain._replace(**parts._asdict(), layout=name), None)
        assert f"plain_int32, not {name}" in str(kernels.refuses_linear("tiles")(*args))


@pytest.mark.parametrize("file", sorted(configs.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_tables_are_sound(file: Path) -> None:
    content = json.loads(file.read_text())
    assert configs.fault(content) is None
    if not content["source"].startswith("Reasoned, measured on no device. "):
        recorded = {line.get("source") for line in lines_of(RECORDS / "gpu-tune.jsonl")}
        assert content["source"] in recorded, "a figure needs the record of its run"
        assert "unmeasured" not in content


@pytest.mark.parametrize(("name", "source"), [("sm80", "sm80"), ("sm90", "sm90"), ("xpu", "xpu"), ("sm75", "default")])
def test_which_table_is_shipped(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(configs, "architecture", lambda device: name)
    configs.of.cache_clear()
    found = configs.of(DEVICE)
    configs.of.cache_clear()
    assert found.content == json.loads((configs.FOLDER / f"{source}.json").read_text())
    assert found.float8 == (name == "sm90")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, "not of version 3"),
        ({"source": None}, "source must say"),
        ({"scaled": []}, "scaled must have rows"),
        (
            {"tiles": DEFAULT["tiles"][:-1]},
            "tiles must have rows that are whole numbers, and at the end an entry for any",
        ),
        ({"tiles": [{**DEFAULT["tiles"][-1], "BM": 48}]}, "powers of two"),
        ({"tiles": [{**DEFAULT["tiles"][-1], "programs": 0}]}, "tiles must be a list of"),
        ({"gemv": {}}, "gemv must have BN, BK, num_warps (powers of two), num_stages, programs"),
        ({"most_rows": {"gemv": {}}}, "each kind of weight and of *"),
        ({"most_rows": {"gemv": {"*": -1}}}, "whole numbers or null"),
        ({"least_rows": {"int_mm": 0}}, "least_rows must be whole numbers from 1 on"),
        ({"unmeasured": "all"}, "unmeasured must be a list of names"),
    ],
)
def test_a_damaged_table_is_told(change: dict[str, Any], reason: str) -> None:
    assert reason in str(configs.fault({**DEFAULT, **change}))


def test_what_was_measured_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(configs, "architecture", lambda device: "sm90")
    configs.of.cache_clear()
    measured.write(
        configs.path("sm90"), {**DEFAULT, "most_rows": {"gemv": {"*": 7}, "tiles": {"int4/group": 9, "*": 8}}}
    )
    (sample,) = products("int4", BF16, "plain", n=64, k=256, m=1)
    config = configs.of(DEVICE)
    most = [config.most_rows(kernel, Weight(*sample.args[1:11])) for kernel in ("gemv", "tiles", "dense")]
    configs.of.cache_clear()
    assert most == [7, 9, None]


class StandIn:
    """A GPU whose cache holds one weight of 256 x 256 in 4 bits."""

    cache = 256 * 256 // 2

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def about(self) -> dict[str, str]:
        return {"device": "a stand-in"}


def weight_in(args: tuple[Any, ...]) -> Weight:
    """Of an op's arguments; those of a grouped one begin with x and the ends, of another with x."""
    at = 2 if len(args) == 12 else 1
    return Weight(*args[at : at + 10])


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Few sizes, rows and schemes on a stand-in; what is told of each trial, whose time is made up: gemv is the
    fastest at one row, tiles at four, of int8 a dense product. Each kernel runs once, at four rows."""
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(configs, "architecture", lambda device: "sm90")
    monkeypatch.setattr(measure, "SIZE", 256)
    monkeypatch.setattr(measure, "ROWS", (1, 4))
    monkeypatch.setattr(measure, "SCHEMES", ("int4", "int8"))
    monkeypatch.setattr(measure, "RIVALS", {"theirs": ("dyn_linear", "int8-dyn"), "many": ("grouped_linear", "int4")})
    monkeypatch.setattr(measure, "EXPERTS", 2)
    monkeypatch.setattr(measure, "Accelerator", StandIn)
    monkeypatch.setattr(layouts, "preferred", lambda *args: "plain")
    monkeypatch.setattr(measure, "PROGRAMS", (64,))
    monkeypatch.setattr(measure, "TILES", {16: {"BM": (16,), "BN": (32, 64)}, None: {"BM": (32,)}})
    monkeypatch.setattr(measure, "GEMV", {"BN": (8, 16), "BK": (256,), "num_warps": (2,), "num_stages": (2,)})
    found: list[dict[str, Any]] = []

    def timed(
        run: Callable[[Any], object], copies: list[Any], device: torch.device, note: measure.Note, **trial: Any
    ) -> float:
        weights = [each if isinstance(each, Weight) else weight_in(each) for each in copies]
        assert sum(each.data.nbytes for each in weights) >= 2 * StandIn.cache, "copies fill the cache twice"
        note(trial)
        found.append(trial)
        if trial["rows"] == 4:
            run(copies[-1])
        if "blocks" in trial:
            return 1.0 if trial["blocks"].get("BN", 32) in (8, 32) else 2.0
        few, dense = trial["rows"] == 1, 1.5 if weights[0].dtype == "int8" else 3.0
        known = {"gemv": 1.0 if few else 9.0, "tiles": 2.0, "dense": dense, "theirs": 9.0 if few else 4.0, "many": 6.0}
        return known.get(trial["kernel"], 5.0)

    monkeypatch.setattr(measure, "_time", timed)
    register_kernel(Impl("dyn_linear", "theirs", DEVICE.type, kernels.run_dyn(linear.tiles), lambda *args: None))
    register_kernel(Impl("grouped_linear", "many", DEVICE.type, kernels.grouped, from_rows("many", lambda *args: None)))
    configs.of.cache_clear()
    yield found
    configs.of.cache_clear()


STAGES = ["gemv", "tiles 16", "tiles any", "rows int4", "rows int8", "from theirs", "from many"]


@pytest.mark.usefixtures("own_tables")
def test_tune_measures_and_keeps(trials: list[dict[str, Any]]) -> None:
    noted: list[dict[str, Any]] = []
    lines = list(measure.tune(DEVICE, noted.append))
    kept = json.loads(configs.path("sm90").read_text())
    assert configs.fault(kept) is None
    assert "unmeasured" not in kept
    assert kept["source"].startswith("measured on a stand-in with torch 2")
    assert {name: kept["gemv"][name] for name in ("BN", "programs")} == {"BN": 8, "programs": 528}
    assert [(each["rows"], each["BN"]) for each in kept["tiles"]] == [(16, 32), (None, 128)]
    assert kept["most_rows"]["gemv"] == {"int4/group": 1, "int8/row": 1, "*": 1}
    assert kept["most_rows"]["tiles"] == {"int4/group": 4, "int8/row": 1, "*": 2}
    assert kept["least_rows"] == {"int_mm": 2, "grouped_mm": 257, "theirs": 2, "many": None}
    assert "linear int8/row: gemv up to 1 rows, tiles up to 1, then a dense product" in lines
    assert lines[-1] == f"written to {configs.path('sm90')}"
    assert list(dict.fromkeys(each["stage"] for each in noted)) == STAGES
    assert len(noted) == len(trials)


@pytest.mark.usefixtures("own_tables", "trials")
def test_tune_measures_what_the_table_in_use_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEAST_ROWS, DEVICE.type, lambda kernel, device: None)
    assert measure.begun(DEVICE)["unmeasured"] == STAGES
    assert LEAST_ROWS[DEVICE.type]("many", DEVICE) is None


@pytest.mark.usefixtures("own_tables", "trials")
def test_tune_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = measure.tune(DEVICE)
    for _ in range(3):  # the second stage is kept as the third is done
        next(stopped)
    stopped.close()
    assert configs.of(DEVICE).content["unmeasured"] == STAGES[2:]
    noted: list[dict[str, Any]] = []
    list(measure.tune(DEVICE, noted.append))
    assert list(dict.fromkeys(each["stage"] for each in noted)) == STAGES[2:]
    again: list[dict[str, Any]] = []
    list(measure.tune(DEVICE, again.append))
    assert list(dict.fromkeys(each["stage"] for each in again)) == STAGES, "done, so it begins anew"
    next(measure.tune(DEVICE))
    monkeypatch.setattr(StandIn, "about", lambda self: {"device": "another"})
    assert measure.begun(DEVICE)["unmeasured"] == STAGES, "of another device nothing is taken over"


def test_blocks_are_searched_size_by_size() -> None:
    tried: list[dict[str, int]] = []

    def time(blocks: dict[str, int]) -> float:
        tried.append(dict(blocks))
        return 1 + abs(blocks["BN"] - 64) / 64 + abs(blocks["BK"] - 128) / 128

    sizes = {"BN": (16, 32, 64), "BK": (64, 128)}
    assert measure.search(sizes, {"BN": 16, "BK": 64, "rows": 9}, time) == ({"BN": 64, "BK": 128}, 1.0)
    assert len(tried) == len({tuple(each.items()) for each in tried}) == 6
    assert measure.search(sizes, {"BN": 32, "BK": 64}, lambda blocks: 1 - blocks["BN"] / 1e4)[0]["BN"] == 32, (
        "a gain below the noise is none"
    )


@pytest.mark.parametrize("error", [OutOfResources(1 << 18, 1 << 16, "shared memory"), RuntimeError("no\nsuch")])
def test_what_cannot_run_takes_forever_and_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(StandIn):
        def recorded(self, run: Callable[[], object]) -> None:
            raise error

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(measure, "Accelerator", Failing)
    _, (_, *rest) = weight("int4-g32")
    noted: list[dict[str, Any]] = []
    assert measure._time(lambda each: None, [Weight(*rest[:10])], DEVICE, noted.append, rows=1) == float("inf")
    assert noted == [{"rows": 1, "us": None, "reason": str(error).splitlines()[0]}]


def test_time_is_of_a_graph_over_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three weights, called once each while recording; plays take 9, 3, 6, .. seconds, a call a third of the median."""
    called: list[int] = []
    plays = iter([9.0, 3.0, 6.0, 6.0, 6.0, 1.0, 7.0])

    class Recorder(StandIn):
        def recorded(self, run: Callable[[], object]) -> tuple[str, object]:
            return "play", run()

        def seconds(self, play: str) -> float:
            assert play == "play"
            return next(plays)

    monkeypatch.setattr(measure, "Accelerator", Recorder)
    _, (_, *rest) = weight("int4-g32")
    weights = [Weight(*rest[:10])._replace(n=n) for n in (1, 2, 3)]
    noted: list[dict[str, Any]] = []
    assert measure._time(lambda each: called.append(each.n), weights, DEVICE, noted.append, rows=1) == 2.0
    assert noted == [{"rows": 1, "us": 2e6}]
    assert called == [1, 2, 3]


@pytest.mark.usefixtures("own_tables")
def test_compiled_whole() -> None:
    """The op is one node of a graph without breaks, and what runs in it is the kernel that was forced."""
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
    """No call waits for the device, and a graph replayed with another input gives that input's result."""
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
