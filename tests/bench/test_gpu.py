"""The GPU suites, with a stand-in for the device module: what is recorded, rotated and written. No real
measurements."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure, workers
from bench.gpu import child, limits, methods, page, peers, products
from bench.gpu.accelerator import Accelerator
from bench.gpu.child import GpuChild, copies_of
from bench.gpu.limits import GpuLimits
from bench.peers.base import Prepared
from bench.suites import SUITES, Shape
from bench.voxtral.build import sizes_of
from bench.voxtral.program import Sizes, program
from bench.workers import Worker
from tests.bench import stand_in

TINY = Sizes(
    frames=16, audio=32, audio_heads=2, audio_inner=64, audio_layers=2, width=64, heads=4, groups=2, head=16,
    inner=96, layers=2, words=40, length=8,
)  # fmt: skip
FOUND = GpuLimits(1e12, {"bf16": 1e14, "int8": 2e14}, float8=4e14)
ABOUT = {"device": "stand-in", "capability": "sm90", "toolkit": "12.9"}
Row = dict[str, Any]


def test_a_recording_plays_into_the_same_memory() -> None:
    x, runs = torch.zeros(3), []

    def run() -> torch.Tensor:
        runs.append(1)
        return x * 2 + 1

    play, y = stand_in.gpu().recorded(run)
    x.fill_(5)
    play()
    assert y.tolist() == [11.0] * 3
    assert len(runs) == 4, "three times to warm up, once recorded; never again"


def test_the_device_is_busy_when_the_clock_starts() -> None:
    """Otherwise the time would include the launch latency: a fifth of that of a graph of 50 microseconds."""
    seen: list[str] = []

    class Event(stand_in.Event):
        def record(self) -> None:
            super().record()
            seen.append("event")

    gpu = stand_in.gpu()
    gpu.module.Event = Event
    assert gpu.seconds(lambda: seen.append("run")) > 0
    assert seen == ["run", "event", "run", "event"]


def test_graphs_go_by_two_names() -> None:
    gpu = Accelerator(torch.device("cpu"), stand_in.module("XPUGraph"))
    play, y = gpu.recorded(lambda: torch.ones(2))
    play()
    assert y.tolist() == [1.0, 1.0]


def test_what_the_device_is() -> None:
    about = stand_in.gpu().about()
    assert (about["device"], about["capability"], about["cache"]) == ("stand-in", "sm90", stand_in.CACHE)


@pytest.mark.parametrize("shape", [shape for suite in SUITES.values() for shape in suite], ids=str)
@pytest.mark.parametrize("cache", [50 << 20, 6 << 20], ids=["50MB", "6MB"])
def test_copies_overflow_the_cache(shape: Shape, cache: int) -> None:
    """Four bits per weight: the copies used between two reads of one exceed the cache, and bf16 does not take all
    memory."""
    copies = copies_of(shape, cache)
    assert (copies - 1) * shape.n * shape.k / 2 > 2 * cache
    assert copies * shape.n * shape.k * 2 < 2 * max(16 * cache, 3 * shape.n * shape.k * 2)


class Counting:
    """A peer whose calls record which copy they use."""

    PACKAGES = ("torch",)
    VARIANTS = {"good": "bf16", "waits": "4-bit"}  # noqa: RUF012

    def __init__(self) -> None:
        self.called: list[int] = []

    def prepare(self, variant: str, weight: torch.Tensor, group: int, copies: int) -> Prepared:
        def call(copy: int, x: torch.Tensor) -> torch.Tensor:
            self.called.append(copy)
            if variant == "waits":
                assert x.sum().item() != 0
            return x @ weight.t()

        calls = [lambda x, copy=copy: call(copy, x) for copy in range(copies)]
        return Prepared(calls, weight.double, weight.nbytes, note=lambda x: "a kernel")


@pytest.fixture
def answering() -> tuple[GpuChild, Counting]:
    made, peer = GpuChild("", stand_in.gpu), Counting()
    made.__dict__["peer"] = peer
    made.shape(Shape(64, 32), (1, 8), 32)
    return made, peer


def test_every_copy_once_in_a_play(answering: tuple[GpuChild, Counting]) -> None:
    made, peer = answering
    assert made.prepare("good") == ""
    found = made.judge("good", 8, turn=1e-3)
    copies = copies_of(Shape(64, 32), stand_in.CACHE)
    assert peer.called[1 : 1 + 4 * copies] == 4 * list(range(copies)), "three times to warm up, and what was recorded"
    assert found["sqnr_db"] > 45
    assert found["note"] == "a kernel"
    before = len(peer.called)
    times = made.time("good", 8, 5)
    assert len(peer.called) == before, "played, not called"
    assert len(times) == 5
    assert all(seconds > 0 for seconds in times)


def test_what_cannot_be_recorded_is_called_and_says_so(answering: tuple[GpuChild, Counting]) -> None:
    made, peer = answering
    made.prepare("waits")
    found = made.judge("waits", 1, turn=1e-3)
    assert found["note"] == "a kernel, not in a graph (operation not permitted when stream is capturing)"
    before = len(peer.called)
    made.time("waits", 1, 1)
    assert len(peer.called) == before + 2 * copies_of(Shape(64, 32), stand_in.CACHE)


def test_after_a_bad_access_the_process_ends(
    answering: tuple[GpuChild, Counting], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After one such error every later product would fail too; a new process starts clean."""
    made, _ = answering

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered\nand more")

    class Pipe:
        def recv(self) -> tuple[str, tuple[Any, ...]]:
            return "prepare", ("good",)

        def send(self, answer: Any) -> None:
            raise AssertionError(f"{answer} is none")

    said = tmp_path / "said"
    monkeypatch.setattr(made, "prepare", lambda variant: broken())
    monkeypatch.setattr(made._gpu.module, "synchronize", broken)
    monkeypatch.setattr(workers.os, "dup2", lambda file, number: None)
    monkeypatch.setattr(workers.os, "_exit", lambda status: said.write_text(sys.stderr.getvalue()) and sys.exit(status))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit):
        workers.serve(Pipe(), str(said), 1, lambda: made, ())  # type: ignore[arg-type]
    assert said.read_text() == "RuntimeError: an illegal memory access was encountered\n"


def test_recordings_of_other_rows_are_let_go(answering: tuple[GpuChild, Counting]) -> None:
    made, _ = answering
    made.prepare("good")
    for m in (1, 8):
        made.judge("good", m, turn=1e-3)
    assert list(made._plays) == [("good", 8)]


def test_limits_with_a_reason_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(device: torch.device, size: int) -> Any:
        raise RuntimeError("no such unit\nat all")

    monkeypatch.setitem(limits.PRODUCTS, "float8", lacking)
    found = limits.measure(stand_in.gpu(), nbytes=1 << 16, size=32, times=2)
    assert found.read > 0
    assert set(found.units) == {"bf16", "int8"}
    assert (found.float8, found.why) == (0.0, {"float8": "no such unit"})


@pytest.mark.parametrize(
    ("kind", "rate"),
    [("bf16", 1e14), ("4-bit", 1e14), ("8-bit x int8", 2e14), ("8-bit x fp8", 4e14), ("8-bit x mxfp8", 4e14)],
)
def test_the_floor_is_that_of_the_unit(kind: str, rate: float) -> None:
    row = {"class": kind, "rows": 4096, "n": 4096, "k": 4096, "nbytes": 1, "ms": 100.0}
    found = products.with_floor(row, FOUND)
    assert found["floor_ms"] == pytest.approx(2e3 * 4096**3 / rate, rel=1e-3)
    assert found["of_floor"] == pytest.approx(found["floor_ms"] / 100, abs=1e-3)


def test_without_a_float8_unit_the_floor_is_bf16s() -> None:
    row = {"class": "8-bit x fp8", "rows": 4096, "n": 4096, "k": 4096, "nbytes": 1, "ms": 1.0}
    assert products.with_floor(row, dataclasses.replace(FOUND, float8=0.0))["floor_ms"] == pytest.approx(
        1.374, rel=1e-3
    )


def test_a_refusal_has_no_floor() -> None:
    assert products.with_floor({"reason": "no"}, FOUND) == {"reason": "no"}


def test_a_run_leaves_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """In real processes, each with a stand-in for the device."""
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setitem(peers.PEERS, "absent", "tests.bench.not_there")
    monkeypatch.setattr("bench.products.Worker", lambda threads, made, peer: Worker(threads, made, peer, stand_in.gpu))
    chosen = products.Chosen((Shape(256, 64),), (1, 4), ("int4",), ("bitport", "tinygemm", "absent"), 3, 1, "")
    rows = products.run(chosen, ABOUT, FOUND, measure.header())
    head, *lines = (json.loads(line) for line in (tmp_path / "gpu-products.jsonl").read_text().splitlines())
    assert head["gpu"] == ABOUT
    assert head["limits"] == {"copy": 1e12, "bf16": 1e14, "int8": 2e14, "float8": 4e14, "why": {}}
    assert "tests.bench.not_there" in head["missing"]["absent"]
    assert lines == [{"run": head["run"], **row} for row in rows]
    timed = {(row["variant"], row["rows"]): row for row in rows if "ms" in row}
    assert set(timed) == {("bf16", 1), ("bf16", 4), ("int4", 1), ("int4", 4)}
    assert {timed["bf16", m]["speedup"] for m in (1, 4)} == {1.0}
    assert all(row["sqnr_db"] > 40 and row["floor_ms"] > 0 for row in timed.values())
    (refused,) = [row for row in rows if row["peer"] == "tinygemm"]
    assert "_convert_weight_to_int4pack" in refused["reason"], "the CPU has no such op"
    written = page.page([head, *lines], [])
    assert {name.rpartition(".")[2] for name in written} == {"md", "svg"}
    assert "## stand-in" in written["performance-gpu.md"]
    assert (
        f"| 4 | {timed['bf16', 4]['ms']:.3g} | - | {timed['int4', 4]['speedup']:.2f} (" in written["performance-gpu.md"]
    )


def test_the_children_of_a_run_have_a_gpu() -> None:
    """Without the stand-in they report that there is no device."""
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    with pytest.raises(SystemExit, match="finds none here"):
        child.GpuChild("bench.gpu.peers.cublas")


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_is_there_or_says_what_is_missing(name: str) -> None:
    made = GpuChild(peers.PEERS[name], stand_in.gpu)
    try:
        assert made.start()["variants"]
    except ModuleNotFoundError as error:
        assert error.name in ("torchao", "gemlite", "bitsandbytes")  # noqa: PT017


# -- the program -----------------------------------------------------------------------------------------------------


def test_the_program_reads_its_cache() -> None:
    """Position by position gives the same as all at once: cache, mask and rotation agree."""
    made = program(TINY, torch.device("cpu")).float()
    cache = made.text_decoder.cache()
    x = torch.randn(1, 6, TINY.width)
    whole = made.text_decoder(x, torch.arange(6), cache)
    for at in range(6):
        last = made.text_decoder(x[:, at : at + 1], torch.tensor([at]), cache)
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)


def test_the_shapes_are_those_of_the_suites() -> None:
    """The program has all the shapes that the suites time."""
    made = program(dataclasses.replace(Sizes(), audio_layers=1, layers=1), torch.device("meta"))
    linear = {
        Shape(each.in_features, each.out_features) for each in made.modules() if isinstance(each, torch.nn.Linear)
    }
    assert {*SUITES["voxtral"], *SUITES["whisper"]} <= linear


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    parts = list(methods.measure(stand_in.gpu(), TINY, ("int4-g32", "int8+int4-g32+bf16", "nope"), 3))
    assert [len({row.get("method") for row in part}) for part in parts] == [1] * 5, "each method by itself: a stop"
    return [row for part in parts for row in part]


def test_every_method_of_every_candidate(rows: list[Row]) -> None:
    timed = {(row["method"], row["candidate"]) for row in rows if "ms" in row}
    assert timed == {
        (method, name) for method in methods.METHODS for name in ("bf16", "int4-g32", "int8+int4-g32+bf16")
    }
    assert all(row["ms"] > 0 and row["speedup"] > 0 for row in rows if "ms" in row)
    assert {row["speedup"] for row in rows if row["candidate"] == "bf16"} == {1.0}


def test_the_program_on_the_page(rows: list[Row]) -> None:
    head = {**measure.header(), "gpu": ABOUT}
    text = page.page([], [head, *({"run": head["run"], **row} for row in rows)])["performance-gpu.md"]
    assert "## A program like Voxtral on stand-in" in text
    assert text.count("| text_decode |") == 3
    assert "- not measured: nope: unknown scheme" in text


def test_a_scheme_that_is_none_is_a_reason(rows: list[Row]) -> None:
    (lost,) = [row for row in rows if "reason" in row]
    assert lost["candidate"] == "nope"
    assert "unknown scheme 'nope'" in lost["reason"]
    assert "not measured: nope: unknown scheme" in methods.as_table(rows)


def test_parts_have_their_own_schemes(rows: list[Row]) -> None:
    nbytes = {(row["method"], row["candidate"]): row["nbytes"] for row in rows if "ms" in row}
    for method, (least, most) in {
        "audio_encoder": (0.5, 0.7),
        "token_embedding": (0.25, 0.35),
        "text_prefill": (1.0, 1.0),
        "text_decode": (1.0, 1.0),
    }.items():
        assert least <= nbytes[method, "int8+int4-g32+bf16"] / nbytes[method, "bf16"] <= most


def test_a_part_too_many_is_refused() -> None:
    with pytest.raises(SystemExit, match="one for each of audio_encoder, token_embedding, text_decoder"):
        list(methods.measure(stand_in.gpu(), TINY, ("int4+int8",), 3))


def test_sizes_from_the_command_line() -> None:
    sizes = sizes_of(methods.parser().parse_args(["--layers", "2", "--audio-layers", "3"]))
    assert (sizes.layers, sizes.audio_layers, sizes.width) == (2, 3, 3072)
