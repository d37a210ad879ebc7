"""A tiny run in real processes, with a peer that fails in every possible way."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench import measure, products
from bench.child import Child
from bench.limits import Limits
from bench.peers import PEERS
from bench.suites import Shape
from bench.workers import without_paths
from bitport.backends.cpu.native import load
from tests.scripts import printed

pytestmark = pytest.mark.xdist_group("products")  # measured once, by one worker
Row = dict[str, Any]
FOUND = Limits(read=1e10, units={"f32": 1e11})


class Reads:
    """Memory bandwidth measured between the products: lower each time."""

    def __init__(self, threads: int) -> None:
        self.left = 8e9

    def __call__(self) -> float:
        self.left -= 1e9
        return self.left

    def close(self) -> None:
        pass


BESIDE = {1: Limits(read=6e9, units=FOUND.units), 4: Limits(read=3e9, units=FOUND.units)}
"""By number of rows: the median memory bandwidth over three repetitions."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], list[Row]]:
    """Return (rows, lines of the record)."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("results")
        patch.setattr(measure, "RESULTS", folder)
        patch.setattr(products, "Flusher", lambda: lambda: None)
        patch.setattr(products, "SINGLE", 1.0)
        patch.setattr(products.limits, "Reading", Reads)
        patch.setitem(PEERS, "frail", "tests.bench.frail")
        patch.setitem(PEERS, "absent", "tests.bench.not_there")
        chosen = products.Chosen(
            shapes=(Shape(256, 48),),
            rows=(1, 4),
            schemes=("int4",),
            peers=("bitport", "frail", "absent"),
            repetitions=3,
            threads=1,
            isa="",
        )
        rows = products.measure(chosen, FOUND, measure.header())
        lines = (folder / "products.jsonl").read_text().splitlines()
    return rows, [json.loads(line) for line in lines]


def pick(rows: list[Row], variant: str) -> dict[int | None, Row]:
    return {row["rows"]: row for row in rows if row["variant"] == variant}


def test_bitport_is_timed_and_judged(run: tuple[list[Row], list[Row]]) -> None:
    found = pick(run[0], "int4")
    assert set(found) == {1, 4}
    for m, row in found.items():
        assert m is not None
        assert row["ms"] > 0
        assert row["speedup"] > 0
        assert row["sqnr_db"] > 45, "bfloat16 output: 8 bits"
        assert 10 < row["end_db"] < 30, "4 bits"
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["ms"], abs=1e-3, rel=1e-2)
        assert row["floor_ms"] / 1e3 == pytest.approx(BESIDE[m].floor(m, 48, 256, row["nbytes"], False), rel=1e-3)
        assert row["read"] == BESIDE[m].read


def test_bf16_is_its_own_measure(run: tuple[list[Row], list[Row]]) -> None:
    assert {row["speedup"] for row in pick(run[0], "bf16").values()} == {1.0}


def test_a_crash_is_a_result_and_leaves_the_others(run: tuple[list[Row], list[Row]]) -> None:
    crashed = pick(run[0], "crashes")
    assert "ms" in crashed[1], "one row went well"
    assert "ended with -9" in crashed[4]["reason"]
    assert "about to crash" in crashed[4]["reason"]
    assert all("ms" in row for row in pick(run[0], "good").values())
    assert set(pick(run[0], "good")) == {1, 4}


def test_reasons_are_told(run: tuple[list[Row], list[Row]]) -> None:
    assert pick(run[0], "refuses")[None]["reason"] == "it does not want to"
    assert pick(run[0], "raises")[1]["reason"] == "ValueError: no such product"


def test_what_would_take_too_long_is_not_asked_for_more_rows(run: tuple[list[Row], list[Row]]) -> None:
    slow = pick(run[0], "slow")
    assert slow[1]["ms"] >= 300
    assert slow[4]["reason"] == "too slow: going by fewer rows, a call would take more than 1 s"


def test_reasons_name_no_place_of_the_machine() -> None:
    found = without_paths("ImportError: /opt/x-1/lib/some.so: no symbol (see https://example.com/a/b), 3 / 4, a/b")
    assert found == "ImportError: some.so: no symbol (see https://example.com/a/b), 3 / 4, a/b"


def test_a_wrong_result_shows(run: tuple[list[Row], list[Row]]) -> None:
    assert pick(run[0], "wrong")[1]["sqnr_db"] == pytest.approx(0.0, abs=0.5)


def test_the_record_begins_with_its_header(run: tuple[list[Row], list[Row]]) -> None:
    rows, (head, *lines) = run
    assert head.keys() >= {"run", "commit", "machine", "limits", "versions", "missing"}
    assert "tests.bench.not_there" in head["missing"]["absent"]
    assert lines == [{"run": head["run"], **row} for row in rows]


@pytest.mark.parametrize("isa", products.ISA)
def test_an_instruction_set_binds_every_library_that_computes(isa: str) -> None:
    """oneDNN reports which one it uses; so do torch and bitport."""
    found = load()
    if isinstance(found, str) or isa not in found.available:
        pytest.skip(f"needs the native kernels, and a processor with {isa}")
    script = (
        "import torch; a = torch.ones(64, 64); torch.nn.functional.linear(a.bfloat16(), a.bfloat16()); a @ a;"
        "from bitport.backends.cpu.native import load;"
        "print('found', torch.backends.cpu.get_cpu_capability().lower(), load().isa_name)"
    )
    said = printed(script, **products.ISA[isa], ONEDNN_VERBOSE="1", MKL_VERBOSE="1")
    assert f"found {isa.partition('_')[0]} {isa}" in said
    assert "amx" not in said.lower()
    assert "bf16_" not in said.lower()


def test_peers_that_obey_no_instruction_set_are_refused() -> None:
    options = products.parser(None).parse_args(["--isa", "avx2", "--peers", "torch", "ggml"])
    with pytest.raises(SystemExit, match="ggml cannot be kept to avx2"):
        products.chosen_of(options)
    assert products.chosen_of(products.parser(None).parse_args(["--isa", "avx2"])).peers == products.BOUND


def test_a_class_that_no_other_candidate_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows would stand beside nothing, and on no page."""
    monkeypatch.setitem(sys.modules, "misnamed", SimpleNamespace(PACKAGES=(), VARIANTS={"int4": "4bit"}))
    with pytest.raises(ValueError, match="VARIANTS names 4bit; the classes are bf16, f32, 2-bit, "):
        Child("misnamed").start()
