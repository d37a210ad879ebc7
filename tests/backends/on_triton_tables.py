"""Tables of blocks and crossovers: the shipped ones, and measuring them, on a fake GPU. Run by test_triton.py, like
on_triton.py."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources, PTXASError

from bench.results import lines_of
from bitport import layouts
from bitport.backends import measured
from bitport.backends.aten import LEAST_ROWS, from_rows
from bitport.backends.triton import configs, kernels, linear, measure
from bitport.ops import Impl, Weight, register_kernel
from tests.backends.products import products

DEVICE = torch.device(os.environ["TRITON_DEVICE"])
BF16 = torch.bfloat16
RECORDS = Path(__file__).parents[2] / "bench" / "results"
DEFAULT = json.loads((configs.FOLDER / "default.json").read_text())

if DEVICE.type == "cpu":
    from tests.backends import interpreter

    interpreter.correct()


def a_weight() -> Weight:
    (sample,) = products("int4-g32", BF16, "plain", n=48, k=256, m=5)
    return Weight(*(arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in sample.args[1:11]))


@pytest.mark.parametrize("file", sorted(configs.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_tables_are_sound(file: Path) -> None:
    content = json.loads(file.read_text())
    assert configs.fault(content) is None
    if not content["source"].startswith("Reasoned, measured on no device. "):
        recorded = {line.get("source") for line in lines_of(RECORDS / "gpu-tune.jsonl")}
        assert content["source"] in recorded, "a figure needs the record of its run"
        assert [stage for stage in content.get("unmeasured", []) if not stage.startswith("rows ")] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [("sm70", "default"), ("sm75", "default"), ("sm80", "sm80"), ("sm90", "sm90"), ("sm103", "sm100"), ("xpu", "xpu")],
)
def test_which_table_is_shipped(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(configs, "architecture", lambda device: name)
    configs.of.cache_clear()
    found = configs.of(DEVICE)
    configs.of.cache_clear()
    assert found.content == json.loads((configs.FOLDER / f"{source}.json").read_text())
    assert (found.float8, found.int8) == (name in ("sm90", "sm103"), name not in ("sm70", "sm75"))


def test_the_table_is_that_of_the_tensors_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two unlike GPUs; triton reports only the current one."""
    current = [0]

    @contextlib.contextmanager
    def device_index(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Two:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", (90, 80)[current[0]], 32)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(triton.runtime.driver, "_active", Two())
    assert [configs.architecture(torch.device("cuda", index)) for index in (0, 1)] == ["sm90", "sm80"]


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


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    measured.write(tmp_path / "table.json", {})
    (tmp_path / "other").touch()
    assert (tmp_path / "table.json").stat().st_mode == (tmp_path / "other").stat().st_mode, "a folder may be shared"
    (tmp_path / "taken.json" / "folder").mkdir(parents=True)
    with pytest.raises(OSError, match=r"taken\.json"):
        measured.write(tmp_path / "taken.json", {})
    assert {each.name for each in tmp_path.iterdir()} == {"table.json", "other", "taken.json"}


class StandIn:
    """A fake GPU whose cache holds one 4-bit weight of 256 x 256."""

    cache = 256 * 256 // 2

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def about(self) -> dict[str, str]:
        return {"device": "a stand-in"}


def weight_in(args: tuple[Any, ...]) -> Weight:
    """The weight among an op's arguments, which begin with x, or with x and the ends for a grouped op."""
    at = 2 if args[1].dtype == torch.int32 else 1
    return Weight(*args[at : at + 10])


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Measure few sizes, rows and schemes on a fake GPU; yields the record of each trial. Times are made up: gemv is
    the fastest at one row, tiles at four, and for int8 a dense product. Nothing is computed."""
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


@pytest.fixture
def computed(trials: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial at four rows runs its kernel once, which takes longer than all else in these tests."""
    told = measure._time

    def timed(run: Callable[[Any], object], copies: list[Any], *rest: Any, **trial: Any) -> float:
        if trial["rows"] == 4:
            run(copies[-1])
        return told(run, copies, *rest, **trial)

    monkeypatch.setattr(measure, "_time", timed)


STAGES = ["gemv", "tiles 16", "tiles any", "rows int4", "rows int8", "from theirs", "from many"]


@pytest.mark.usefixtures("own_tables", "computed")
def test_trials_compute_as_the_device_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is what will run: on the same units, taking as many codes at a time."""
    used: list[configs.Config] = []
    run = linear.tiles

    def noted(*args: Any) -> Tensor:
        used.append(args[4])
        return run(*args)

    monkeypatch.setattr(linear, "tiles", noted)
    list(measure.tune(DEVICE))
    here = configs.of(DEVICE)
    assert used
    for config in used:
        assert (config.halves, config.float8, config.int8) == (here.halves, here.float8, here.int8) == (True,) * 3


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
    assert kept["least_rows"] == {**configs.shipped("sm90")["least_rows"], "theirs": 2, "many": None}
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
    for _ in range(2):
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


@pytest.mark.usefixtures("own_tables")
def test_tune_measures_a_kernel_that_is_newer_than_the_table(
    trials: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the new kernel, and with as many rows as it takes."""
    list(measure.tune(DEVICE))
    trials.clear()
    monkeypatch.setitem(measure.RIVALS, "newer", ("linear", "int4"))
    one = Impl(
        "linear", "newer", DEVICE.type, kernels.run_linear(linear.gemv), lambda x, *rest: "" if len(x) > 1 else None
    )
    register_kernel(one)
    assert measure.begun(DEVICE)["unmeasured"] == ["from newer"]
    list(measure.tune(DEVICE))
    assert [(each["kernel"], each["rows"]) for each in trials] == [("newer", 1), ("triton_gemv", 1)]
    assert json.loads(configs.path("sm90").read_text())["least_rows"]["newer"] == 1


@pytest.mark.usefixtures("own_tables", "trials")
def test_a_stage_that_the_device_does_not_survive_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal memory access the process can compute nothing more; run again, tune measures the other
    stages."""
    measured_by = measure.measure

    def broken(stage: str, *args: Any) -> str:
        if stage == STAGES[1]:
            raise RuntimeError("an illegal memory access was encountered")
        return measured_by(stage, *args)

    monkeypatch.setattr(measure, "measure", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal"):
            list(measure.tune(DEVICE))
    assert configs.of(DEVICE).content["unmeasured"] == [STAGES[1]]


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


def test_what_a_step_of_the_search_times_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    told: list[str] = []

    def compile_all(trials: list[dict[str, int]]) -> None:
        measure._compile((functools.partial(compile_one, trial["BN"]) for trial in trials), DEVICE)

    def compile_one(size: int) -> None:
        told.append(f"compiled {size}")
        if size == 64:
            raise OutOfResources(1 << 18, 1 << 16, "shared memory")

    def time(blocks: dict[str, int]) -> float:
        told.append(f"timed {blocks['BN']}")
        return 1.0 / blocks["BN"]

    assert measure.search({"BN": (16, 32, 64)}, {"BN": 16}, time, compile_all) == ({"BN": 64}, 1 / 64)
    assert told[0] == "timed 16"
    assert set(told[1:3]) == {"compiled 32", "compiled 64"}
    assert told[3:] == ["timed 32", "timed 64"]


@pytest.mark.parametrize(
    "error",
    [
        *(OutOfResources(1 << 18, 1 << 16, "shared memory"), PTXASError("no assembly")),
        *(RuntimeError("no\nsuch"), ValueError("as TORCH_CHECK_VALUE says it")),
    ],
)
def test_what_cannot_run_takes_forever_and_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(StandIn):
        def recorded(self, run: Callable[[], object]) -> None:
            raise error

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(measure, "Accelerator", Failing)
    noted: list[dict[str, Any]] = []
    assert measure._time(lambda each: None, [a_weight()], DEVICE, noted.append, rows=1) == float("inf")
    assert noted == [{"rows": 1, "us": None, "reason": str(error).splitlines()[0]}]


def test_time_is_of_a_graph_over_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three weights, called once each during capture; replays take 9, 3, 6, .. seconds, and a call a third of the
    median."""
    called: list[int] = []
    plays = iter([9.0, 3.0, 6.0, 6.0, 6.0, 1.0, 7.0])

    class Recorder(StandIn):
        def recorded(self, run: Callable[[], object]) -> tuple[str, object]:
            return "play", run()

        def seconds(self, play: str) -> float:
            assert play == "play"
            return next(plays)

    monkeypatch.setattr(measure, "Accelerator", Recorder)
    weights = [a_weight()._replace(n=n) for n in (1, 2, 3)]
    noted: list[dict[str, Any]] = []
    assert measure._time(lambda each: called.append(each.n), weights, DEVICE, noted.append, rows=1) == 2.0
    assert noted == [{"rows": 1, "us": 2e6}]
    assert called == [1, 2, 3]
