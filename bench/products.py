"""Time and accuracy of quantized products on the CPU, compared with peers and the limits of the machine.

In every repetition each candidate for a point (shape, number of rows) takes a turn; a ratio is the median over
repetitions of the ratio to bf16 eager within one, and its noise half the interquartile range of these ratios. What a
peer cannot do is reported with the reason. Weights come from memory in every call.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from bench import limits, suites
from bench.child import Child
from bench.measure import append, busy, header
from bench.peers import BASE, PEERS
from bench.suites import Shape
from bench.workers import Flusher, Worker, ask
from bitport.evaluate.timing import spread
from bitport.report.text import table

TURN = 0.01
"""Seconds per turn of a candidate, if it has enough copies of its weight for that."""
BUDGET = 6.0
"""Seconds for one candidate at one point; slow ones get fewer repetitions, but at least LEAST."""
LEAST = 3
SINGLE = 10.0
"""A call that takes more seconds than this is timed only once; a candidate predicted to exceed it, judging by fewer
rows, is skipped: libraries without a kernel for the processor multiply numbers one by one."""

QUIET = 0.1
"""Cores that other processes may use before a run warns: a product on all cores waits for the slowest of them."""

ISA: dict[str, dict[str, str]] = {
    "avx512_vnni": {
        "BITPORT_CPU_ISA": "avx512_vnni",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
    },
    "avx2": {
        "BITPORT_CPU_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""Environment that keeps bitport, torch's own loops, oneDNN (products in bf16 and int8) and MKL (products in float32,
and in bf16 where oneDNN declines) from exceeding an instruction set. AVX512_E1 is MKL's name for AVX512 with VNNI."""
BOUND = ("torch", "bitport", "aten", "onednn", "torchao")
"""The peers that respect this, because they compute with torch. The others inspect the processor themselves."""

Row = dict[str, Any]
Result = TypeVar("Result")


class Candidate(NamedTuple):
    peer: str
    variant: str

    def __str__(self) -> str:
        return f"{self.peer} {self.variant}"


class Chosen(NamedTuple):
    """The selection that a run measures."""

    shapes: tuple[Shape, ...]
    rows: tuple[int, ...]
    schemes: tuple[str, ...]
    peers: tuple[str, ...]
    repetitions: int
    threads: int
    isa: str


class Field:
    """The workers, and what is known about them."""

    child: ClassVar[type[Child]] = Child
    peers: ClassVar[dict[str, str]] = PEERS
    side_by_side: ClassVar[bool] = False
    """Whether peers are prepared concurrently; only their turns are timed."""

    def __init__(self, chosen: Chosen, reading: limits.Reading | None = None) -> None:
        """``reading``: measures the memory that candidates read from; None unless that is the CPU's."""
        self.chosen, self.reading = chosen, reading
        self.workers: dict[str, Worker] = {}
        self.classes: dict[Candidate, str] = {}
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        every = dict.fromkeys((BASE[0], *chosen.peers))
        asked = {suites.class_of(scheme) for scheme in chosen.schemes}
        begun = {peer: Worker(chosen.threads, self.child, self.peers[peer]) for peer in every}  # all at once
        for peer, worker in begun.items():
            started, reason = ask(worker, "start")
            if reason:
                self.missing[peer] = reason.replace("ModuleNotFoundError:", "not installed:")
                worker.close()
                continue
            self.workers[peer] = worker
            self.versions |= started["versions"]
            for variant, kind in started["variants"].items():
                of_others = (kind == "f32" and not chosen.isa) or ("-bit" in kind and kind not in asked)
                unwanted = variant not in chosen.schemes if peer == "bitport" else of_others
                if not unwanted:
                    self.classes[Candidate(peer, variant)] = kind
        if BASE[0] in self.missing:
            raise SystemExit(f"nothing to compare with: {self.missing[BASE[0]]}")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.reading:
            self.reading.close()


class Point:
    """One shape: the candidates that are ready for it, and their results for a number of rows."""

    def __init__(self, field: Field, shape: Shape) -> None:
        self.field, self.shape = field, shape
        self.last: dict[Candidate, tuple[int, float]] = {}
        self.reads: list[float] = []
        """Measured read bandwidth in bytes per second, once per repetition of the last turns."""
        self.ready: list[Candidate] = []
        self.refused: list[Row] = []
        self._each_peer(lambda peer: self._prepare(peer, [each for each in field.classes if each.peer == peer]))

    def _each_peer(self, run: Callable[[str], Result]) -> list[Result]:
        with ThreadPoolExecutor(len(self.field.workers) if self.field.side_by_side else 1) as pool:
            return list(pool.map(run, self.field.workers))

    def _prepare(self, peer: str, candidates: list[Candidate]) -> None:
        worker = self.field.workers[peer]
        if worker.lost:
            worker.restart()
        _, lost = ask(worker, "shape", self.shape, self.field.chosen.rows, suites.GROUP)
        for candidate in candidates:
            if candidate in self.ready:
                self.ready.remove(candidate)
            answer, reason = (None, lost) if lost else ask(worker, "prepare", candidate.variant)
            if reason := reason or answer:
                self.refuse(candidate, None, reason)
            else:
                self.ready.append(candidate)

    def refuse(self, candidate: Candidate, m: int | None, reason: str) -> None:
        self.refused.append(_row(self.shape, candidate, self.field.classes[candidate], rows=m, reason=reason))

    def judge(self, m: int) -> dict[Candidate, Row]:
        """The accuracy and approximate speed of each candidate with m rows. One that crashes its process is excluded
        from then on; the other candidates of that peer are restarted."""
        facts: dict[Candidate, Row] = {}
        for found in self._each_peer(lambda peer: self._judge(peer, m)):
            facts |= found
        return facts

    def _judge(self, peer: str, m: int) -> dict[Candidate, Row]:
        facts: dict[Candidate, Row] = {}
        worker, left = self.field.workers[peer], [each for each in self.ready if each.peer == peer]
        if worker.lost and left:
            self._prepare(peer, left)
        left = [each for each in left if not self.too_slow(each, m)]
        while left := [each for each in left if each in self.ready and each not in facts]:
            candidate = left.pop(0)
            answer, reason = ask(worker, "judge", candidate.variant, m, TURN)
            if not reason:
                facts[candidate] = answer
                self.last[candidate] = m, answer["seconds"]
                continue
            self.refuse(candidate, m, reason)
            if worker.lost:
                self.ready.remove(candidate)
                again = [each for each in self.ready if each.peer == peer]
                self._prepare(peer, again)
                left = [*(each for each in again if facts.pop(each, None)), *left]
        return facts

    def too_slow(self, candidate: Candidate, m: int) -> bool:
        """Whether m rows would take longer than SINGLE, which is recorded as a result. bf16 is always run."""
        rows, seconds = self.last.get(candidate, (m, 0.0))
        if candidate == Candidate(*BASE) or seconds * m / rows <= SINGLE:
            return False
        self.refuse(candidate, m, f"too slow: going by fewer rows, a call would take more than {SINGLE:.0f} s")
        return True

    def take_turns(self, m: int, facts: dict[Candidate, Row], flush: Flusher) -> dict[Candidate, dict[int, float]]:
        """For each candidate: repetition -> seconds per call."""
        times: dict[Candidate, dict[int, float]] = {candidate: {} for candidate in facts}
        self.reads = []
        for repetition in range(self.field.chosen.repetitions):
            for candidate, fact in facts.items():
                if repetition >= wanted(fact["seconds"], self.field.chosen.repetitions) or candidate not in self.ready:
                    continue
                worker = self.field.workers[candidate.peer]
                flush()
                taken, reason = ask(worker, "time", candidate.variant, m, fact["calls"])
                if not reason:
                    times[candidate][repetition] = statistics.median(taken)
                elif worker.lost:
                    self.ready.remove(candidate)
            if self.field.reading:
                flush()
                self.reads.append(self.field.reading())
        for candidate, fact in facts.items():
            if fact["seconds"] > SINGLE:
                times[candidate] = {0: fact["seconds"]}
        return times


def measure_shape(field: Field, shape: Shape, found: limits.Limits | str, flush: Flusher) -> list[Row]:
    """For each candidate and number of rows, one row of results, or one with the reason why there are none."""
    point, rows = Point(field, shape), []
    for m in field.chosen.rows:
        facts = point.judge(m)
        times = point.take_turns(m, facts, flush)
        for candidate, fact in facts.items():
            kind = field.classes[candidate]
            if not times[candidate]:
                point.refuse(candidate, m, field.workers[candidate.peer].lost or "it failed while it was timed")
                continue
            figures = figures_of(times[candidate], times.get(Candidate(*BASE), {}))
            nbytes = fact["nbytes"]
            if isinstance(found, limits.Limits):
                now = dataclasses.replace(found, read=statistics.median(point.reads or [found.read]))
                floor = now.floor(m, shape.n, shape.k, nbytes, kind.endswith("int8"))
                figures |= {"floor_ms": _ms(floor), "of_floor": round(floor * 1e3 / figures["ms"], 3), "read": now.read}
            exact = {key: fact[key] for key in ("sqnr_db", "end_db", "note")}
            rows.append(_row(shape, candidate, kind, rows=m, nbytes=nbytes, **figures, **exact))
    return rows + point.refused


def wanted(estimate: float, repetitions: int) -> int:
    """Repetitions for a candidate whose call takes about ``estimate`` seconds: a turn is at least two calls."""
    if estimate > SINGLE:
        return 0
    return min(repetitions, max(LEAST, int(BUDGET / max(2 * estimate, TURN))))


def figures_of(times: dict[int, float], base: dict[int, float]) -> Row:
    """ms: median; speedup: median of base's time over this one's in the same repetition; noise: half the interquartile
    range of these ratios relative to the median, None if there are too few of them."""
    ratios = [base[at] / seconds for at, seconds in times.items() if at in base]
    speedup = statistics.median(ratios) if ratios else None
    noise = round(spread(ratios), 4) if len(ratios) >= LEAST else None
    return {
        "ms": _ms(statistics.median(times.values())),
        "speedup": None if speedup is None else round(speedup, 3),
        "noise": noise,
        "repetitions": len(times),
    }


def _row(shape: Shape, candidate: Candidate, kind: str, rows: int | None, **rest: Any) -> Row:
    where = {"suite": suites.suite_of(shape), "k": shape.k, "n": shape.n, "rows": rows}
    return {**where, "peer": candidate.peer, "variant": candidate.variant, "class": kind, **rest}


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")


def measure(chosen: Chosen, found: limits.Limits | str, run: Row | None = None) -> list[Row]:
    """Measure all rows; append them to the results shape by shape if ``run`` is the header that they belong to."""
    others = busy()
    if others is not None and others > QUIET:
        print(f"careful: other processes use {others:.1f} cores, so these figures will be noise")
    field = Field(chosen, limits.Reading(chosen.threads) if isinstance(found, limits.Limits) else None)
    try:
        for peer, reason in field.missing.items():
            print(f"without {peer}: {reason}")
        if run is not None:
            run |= {"isa": chosen.isa, "busy": others, "limits": _as_data(found)}
            run |= {"versions": field.versions, "missing": field.missing}
            append("products", [run])
        rows, flush, said = [], Flusher(), set()
        for shape in chosen.shapes:
            fresh = measure_shape(field, shape, found, flush)
            print(f"\n{suites.suite_of(shape)}: {shape} (in x out)\n{as_table(fresh)}")
            for row in fresh:
                line = f"{row['peer']} {row['variant']}: {row.get('reason')}"
                if "reason" in row and (row["rows"], line) not in said:
                    said.add((row["rows"], line))
                    print(f"not measured at {row['rows'] or 'any number of'} rows: {line}")
            sys.stdout.flush()
            if run is not None:
                append("products", [{"run": run["run"], **row} for row in fresh])
            rows += fresh
        return rows
    finally:
        field.close()


def as_table(rows: Iterable[Row]) -> str:
    header = ("rows", "candidate", "kernel", "ms", "x bf16", "noise", "of floor", "SQNR dB", "end dB")
    cells = [
        (
            str(row["rows"]),
            f"{row['peer']} {row['variant']}",
            row["note"],
            f"{row['ms']:.3f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            "-" if row["noise"] is None else f"{100 * row['noise']:.0f} %",
            f"{row['of_floor']:.2f}" if "of_floor" in row else "-",
            f"{row['sqnr_db']:.1f}",
            f"{row['end_db']:.1f}",
        )
        for row in rows
        if "reason" not in row
    ]
    return table(header, cells) if cells else "nothing was measured"


def _as_data(found: limits.Limits | str) -> Any:
    return found if isinstance(found, str) else {"read": found.read, **found.units}


def parser(description: str | None) -> argparse.ArgumentParser:
    made = choosing(description, suites.SCHEMES, PEERS)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--isa", choices=ISA, default="", help="bitport, torch and what uses it: no more than this")
    return made


def choosing(description: str | None, schemes: Iterable[str], peers: Iterable[str]) -> argparse.ArgumentParser:
    """A parser for what to measure, given these schemes and peers; :func:`chosen_from` reads the options."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="few shapes, rows and schemes: minutes instead of hours")
    made.add_argument("--suites", nargs="+", choices=suites.SUITES, help="default: all")
    made.add_argument("--shapes", nargs="+", type=shape_of, help="KxN, in x out features, instead of suites")
    made.add_argument("--rows", nargs="+", type=int, help=f"default: {' '.join(map(str, suites.ROWS))}")
    made.add_argument("--schemes", nargs="+", help=f"of bitport; default: {' '.join(schemes)}")
    made.add_argument("--peers", nargs="*", choices=peers, help="default: all")
    made.add_argument("--repetitions", type=int, default=11)
    return made


def shape_of(text: str) -> Shape:
    k, _, n = text.partition("x")
    if not (k.isdecimal() and n.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write KxN, such as 4096x14336")
    return Shape(int(k), int(n))


def chosen_of(options: argparse.Namespace) -> Chosen:
    peers = options.peers if options.peers is not None else BOUND if options.isa else PEERS
    if options.isa and (unbound := [peer for peer in peers if peer not in BOUND]):
        raise SystemExit(f"{', '.join(unbound)} cannot be kept to {options.isa}; with --isa: {', '.join(BOUND)}")
    schemes = suites.QUICK_SCHEMES if options.quick else suites.SCHEMES
    return chosen_from(options, schemes, peers, options.threads, options.isa)


def chosen_from(
    options: argparse.Namespace, schemes: Iterable[str], peers: Iterable[str], threads: int, isa: str = ""
) -> Chosen:
    """``schemes``: the default if the options name none."""
    every = tuple(shape for name in options.suites or suites.SUITES for shape in suites.SUITES[name])
    if options.quick and not options.suites:
        every = suites.QUICK_SHAPES
    return Chosen(
        shapes=tuple(options.shapes or every),
        rows=tuple(options.rows or (suites.QUICK_ROWS if options.quick else suites.ROWS)),
        schemes=tuple(options.schemes or schemes),
        peers=tuple(peers),
        repetitions=options.repetitions,
        threads=threads,
        isa=isa,
    )


def restrict(chosen: Chosen) -> None:
    """Set threads and instruction set for this process and future workers."""
    os.environ |= {"OMP_NUM_THREADS": str(chosen.threads), **(ISA[chosen.isa] if chosen.isa else {})}
    torch.set_num_threads(chosen.threads)


def prepare_machine(chosen: Chosen) -> limits.Limits | str:
    """Apply the restrictions, then measure the limits of the machine."""
    restrict(chosen)
    found = limits.measure(chosen.threads, chosen.isa)
    if isinstance(found, str):
        print(f"without the limits of the machine: {found}")
    else:
        units = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in found.units.items())
        print(f"memory is read at {found.read / 1e9:.1f} GB/s; 10^9 operations per second: {units or 'not known'}")
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--json", action="store_true", help="append the results to bench/results/products.jsonl")
    options = made.parse_args()
    chosen = chosen_of(options)
    found = prepare_machine(chosen)
    measure(chosen, found, header() if options.json else None)


if __name__ == "__main__":
    main()
