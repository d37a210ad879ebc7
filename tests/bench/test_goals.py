"""Goals against made-up records: which figure is used, and when a goal is met."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import check, goals, reached
from bench.goals import Goal
from bench.reached import Found, Records

Row = dict[str, Any]
Make = Callable[..., Records]
HEAD = {"run": "r1", "machine": {}, "isa": "", "limits": {"read": 1e10, "amx_bf16": 1e12, "amx_int8": 2e12}}


@pytest.fixture
def records(tmp_path: Path) -> Make:
    def make(**suites: list[Row]) -> Records:
        for suite, lines in suites.items():
            (tmp_path / f"{suite}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Records(tmp_path)

    return make


def product(variant: str, rows: int, ms: float, speedup: float, peer: str = "bitport", kind: str = "4-bit") -> Row:
    where = {"run": "r1", "suite": "llama", "k": 1000, "n": 1000, "rows": rows}
    figures = {"ms": ms, "speedup": speedup, "nbytes": 496_000, "sqnr_db": 55.0, "noise": 0.1}
    return {**where, "peer": peer, "variant": variant, "class": kind, **figures}


def test_without_records_nothing_is_met_or_missed(records: Make) -> None:
    assert {words[2:] for _, words in goals.told(goals.GOALS, records())} == {("not measured", "-")}


@pytest.mark.parametrize(("bound", "met"), [(2.0, True), (2.1, False)], ids=["met", "missed"])
def test_the_worst_point_decides(records: Make, bound: float, met: bool) -> None:
    lines = [HEAD, product("int4", 375, 1, 3.0), product("int4", 1500, 1, 2.0), product("int4", 1, 1, 0.5)]
    found = reached.over_bf16(("int4",), (375, 4096), bound)(records(products=lines))
    assert found == Found("2.00x (int4 1000x1000 at 1500); median 2.50x", met)


def test_a_ratio_that_is_mostly_noise_says_so(records: Make) -> None:
    lines = [HEAD, product("int4", 4, 1, 3.0), product("int4", 16, 1, 0.8) | {"noise": 0.4}]
    found = reached.over_bf16(("int4",), (1, 16), 1.0)(records(products=lines))
    assert found == Found("0.80x (int4 1000x1000 at 16, its noise 40 %); median 1.90x", False)


def test_a_part_of_a_limit(records: Make) -> None:
    """0.5 MB in 0.1 ms is 5 GB/s; 2 * 500 * 10**6 operations in 2 ms are 0.5 * 10**12 per second."""
    made = records(products=[HEAD, product("int4", 1, 0.1, 1.0), product("int4", 500, 2.0, 1.0)])
    read = reached.of_bandwidth("read", ("int4",), (1, 1), 0.5)(made)
    tile = reached.of_peak(("int4",), (375, 4096), 0.6)(made)
    assert read is not None
    assert read.text.startswith("0.50 ")
    assert read.met
    assert tile == Found("0.50 (int4 1000x1000 at 500); median 0.50", False)
    assert reached.of_bandwidth("copy", ("int4",), (1, 1), 0.5)(made) is None


def test_memory_beside_a_product_comes_before_that_before_the_run(records: Make) -> None:
    made = records(products=[HEAD, {**product("int4", 1, 0.1, 1.0), "read": 5e9}])
    found = reached.of_bandwidth("read", ("int4",), (1, 1), 0.9)(made)
    assert found is not None
    assert found.text.startswith("1.00 ")


def test_peers_count_within_their_class(records: Make) -> None:
    mine = product("int4", 1, 1, 3.0)
    slow, fast = (product("q4", 1, ms, 3 / ms, "aten") for ms in (1.5, 0.5))
    other = product("q8", 1, 0.1, 30.0, "ggml", "8-bit x int8")
    found = reached.over_peers(("int4",))(records(products=[HEAD, mine, slow, other]))
    assert found is not None
    assert found.met
    found = reached.over_peers(("int4",))(records(products=[HEAD, mine, slow, fast, other]))
    assert found == Found("1 of 1 points behind; 0.50x (int4 1000x1000 at 1, aten q4); median 0.50x", False)


def test_a_peer_that_is_less_exact_does_not_count(records: Make) -> None:
    mine = product("int4", 1, 1, 3.0)
    fast = {**product("q4", 1, 0.5, 6.0, "aten"), "sqnr_db": mine["sqnr_db"] - reached.AS_EXACT - 0.1}
    assert reached.over_peers(("int4",))(records(products=[HEAD, mine, fast])) is None
    fast["sqnr_db"] += 0.2
    found = reached.over_peers(("int4",))(records(products=[HEAD, mine, fast]))
    assert found is not None
    assert not found.met


def test_a_forced_instruction_set_is_compared_with_the_better_float(records: Make) -> None:
    head = {**HEAD, "isa": "avx2"}
    floats = [product("bf16", 1, 1, 1.0, "torch", "bf16"), product("f32", 1, 0.5, 2.0, "torch", "f32")]
    made = records(products=[head, product("int4", 1, 0.6, 1.6), *floats])
    assert reached.over_torch("avx2")(made) == Found("0.80x (int4 1000x1000 at 1); median 0.80x", False)
    assert reached.over_torch("avx512_vnni")(made) is None


H100 = {"run": "r1", "machine": {}, "gpu": {"device": "NVIDIA H100 80GB HBM3"}, "limits": {"copy": 1e10, "bf16": 1e14}}


def test_a_gpus_figures_are_those_on_that_gpu(records: Make) -> None:
    """0.5 MB in 0.1 ms is 5 GB/s. Measurements on a CPU or another GPU do not count."""
    other = {**H100, "run": "r2", "gpu": {"device": "NVIDIA A100"}}
    rows = [product("int4", 1, 0.1, 2.0), product("int4", 512, 1, 0.9), product("int4", 1, 0.2, 1.0, "tinygemm")]
    made = records(
        **{
            "products": [HEAD, product("int4", 1, 1e-3, 99.0)],
            "gpu-products": [H100, *rows, other, {**product("int4", 1, 1e-3, 99.0), "run": "r2"}],
        }
    )
    found = {words[:2]: words[2:] for goal, words in goals.told(goals.GOALS, made) if goal.what.startswith("H100")}
    (copied, over_bf16, ahead) = found.values()
    assert copied[0].startswith("0.50 (int4 1000x1000 at 1)")
    assert over_bf16 == ("0.90x (int4 1000x1000 at 512); median 0.90x", "missed")
    assert ahead == ("0 of 1 points behind; 2.00x (int4 1000x1000 at 1, tinygemm int4); median 2.00x", "met")


def test_a_page_has_the_goals_of_its_device(records: Make) -> None:
    assert "H100" not in goals.section(records())
    assert goals.section(records(), "NVIDIA H100 80GB HBM3").count("| H100") == 3
    assert goals.of_device("NVIDIA A100") == ()


def test_the_check_counts_its_failures(records: Make) -> None:
    point = {"run": "r1", "k": 8, "n": 8, "rows": 1, "variant": "int4", "note": ""}
    lines = [{**HEAD, "base": "bf16"}, {**point, **check.judged([2.0] * 5)}, {**point, **check.judged([0.5] * 21)}]
    found = reached.checked(("int4",), "bf16")(records(check=lines))
    assert found == Found("1 of 2 points; 0.50x (int4 8x8 at 1)", False)


@pytest.mark.parametrize(("ratio", "met"), [(1.05, True), (1.2, False)], ids=["met", "missed"])
def test_loading_should_be_small(records: Make, ratio: float, met: bool) -> None:
    row = {"run": "r1", "model": "m", "scheme": "int4", "cache": "cold", "nbytes": 1}
    lines = [HEAD, {**row, "mode": "mmap", "ratio": ratio}, {**row, "mode": "verify", "ratio": 9.0}]
    found = reached.loading(records(load=lines))
    assert found is not None
    assert found.met is met


@pytest.mark.parametrize(("error", "met"), [(0.1, True), (0.01, False)], ids=["reaches 1", "above 1"])
def test_growth_is_judged_with_its_error(records: Make, error: float, met: bool) -> None:
    row = {"run": "r1", "sweep": "rows", "candidate": "bitport int4", "exponent": 1.05, "error": error}
    found = reached.growing(records(growth=[HEAD, row, {**row, "candidate": "torch bf16", "exponent": 2.0}]))
    assert found is not None
    assert found.met is met


def test_quantizing_beside_torchao(records: Make) -> None:
    row = {"run": "r1", "scheme": "int4", "k": 8, "n": 8, "of_read": 0.4}
    times = {"bitport": 1.0, "bitport quantize_": 2.0, "torchao": 3.0}
    made = records(quantize=[HEAD, *({**row, "library": library, "ms": ms} for library, ms in times.items())])
    assert reached.quantizing(made) == Found("0.40 (int4 8x8); median 0.40", False)
    assert reached.quantizing_over_torchao(made) == Found("1.50x (int4 8x8); median 1.50x", True)


def test_a_reason_stands_where_a_goal_is_missed(records: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (True, False):
        made = Goal("this", "that", lambda _, met=value: Found("1", met), "the wire is slow", "make proof")
        monkeypatch.setattr(goals, "GOALS", (made,))
        assert ("- this, that: the wire is slow (`make proof`)" in goals.section(records())) is not value


def test_a_reason_comes_with_its_command() -> None:
    assert [goal for goal in goals.GOALS if bool(goal.reason) != bool(goal.command)] == []


@pytest.mark.parametrize(
    ("speedup", "error", "met"),
    [(1.1, 1.0, True), (0.9, 1.0, False), (1.1, 1.02, False)],
    ids=["met", "slow", "inexact"],
)
def test_algorithms_are_as_fast_and_as_exact(records: Make, speedup: float, error: float, met: bool) -> None:
    row = {"run": "r1", "k": 8, "n": 4, "reference_error": 1.0}
    lines = [
        row | {"algorithm": "gptq", "speedup": speedup, "error": error},
        row | {"algorithm": "hqq", "speedup": 2.0, "error": 0.5},
    ]
    lines.append(row | {"algorithm": "signround", "speedup": 0.1, "error": 9.0})
    found = reached.algorithms(records(algorithms=[HEAD, *lines]))
    assert found is not None
    assert found.met == met
    assert found.text == f"{speedup:.2f}x (gptq 8x4); median {(speedup + 2) / 2:.2f}x; error {error:.2f}x at most"
