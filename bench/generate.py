"""End-to-end generation: milliseconds to read a prompt, then tokens per second; bf16, bitport and peers in turns.

In each repetition every candidate reads the prompt and writes some tokens; slow ones write fewer and get fewer
repetitions, which bounds their share of a run. What cannot run is reported with its reason, as is anything that
computes something else: the logits are compared with those of bf16 eager.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure import busy, header, record
from bench.models import NAMES
from bench.speakers import Speakers
from bench.workers import Worker, ask
from bitport.evaluate.timing import spread
from bitport.report.text import table

SCHEMES = ("int4", "int8", "int8-dyn", "int4-int8")
PEERS = (
    ("torchao", "int4"),
    ("torchao", "int8"),
    ("torchao", "int8-dyn"),
    ("llama.cpp", "Q4_0"),
    ("llama.cpp", "Q8_0"),
)
MODES = ("eager", "compiled")
PROMPT, TOKENS = 128, 16

BUDGET = 40.0
"""Approximate seconds that a candidate is timed for, whatever its speed."""
LEAST = 2
"""Minimum repetitions, even so."""

Row = dict[str, Any]
Times = dict[Any, dict[int, float]]
"""Candidate -> repetition -> seconds."""


class Candidate(NamedTuple):
    library: str
    scheme: str
    mode: str

    def __str__(self) -> str:
        return " ".join(self).strip()


def candidates(model: str, schemes: list[str], modes: list[str], peers: bool) -> list[Candidate]:
    """The candidates; the first is the baseline. Only bf16 is also compiled with freezing. llama.cpp has no modes, and
    cannot run tinylm, for which there is no GGUF file."""
    pairs = [("torch", "bf16"), *(("bitport", scheme) for scheme in schemes), *(PEERS if peers else ())]
    made = [Candidate(*pair, mode) for pair in pairs if pair[0] != "llama.cpp" for mode in modes]
    frozen = [Candidate("torch", "bf16", "frozen")] if "compiled" in modes else []
    made[len(modes) : len(modes)] = frozen
    return made + [Candidate(*pair, "") for pair in pairs if pair[0] == "llama.cpp" and model != "tinylm"]


def measure(
    model: str, chosen: list[Candidate], prompt: list[int], tokens: int, repetitions: int, layers: int | None = None
) -> Iterator[Row]:
    """Measure each library and scheme in its own process, in which a crash is a result."""
    length = len(prompt) + tokens + 8
    workers: dict[tuple[str, str], Worker] = {}
    plans: dict[Candidate, tuple[int, int]] = {}
    exact: dict[Candidate, float | None] = {}
    right = None
    for each in chosen:
        pair = (each.library, each.scheme)
        if pair not in workers:
            workers[pair] = Worker(torch.get_num_threads(), Speakers, each.library, model, each.scheme, length, layers)
        seconds, reason = _warm(workers[pair], each.mode, prompt)
        logits, why = ask(workers[pair], "logits", each.mode, prompt)
        if reason := reason or why:
            if each == chosen[0]:
                raise SystemExit(f"nothing to compare with: {reason}")
            yield {"candidate": str(each), "reason": reason}
            continue
        right = logits if each == chosen[0] else right
        exact[each] = decibels(right, logits)
        if wrong(exact[each]):
            yield {"candidate": str(each), "reason": f"wrong: its logits are at {exact[each]} dB of those of bf16"}
        else:
            plans[each] = planned(*seconds, tokens, repetitions)
    reading, writing = _take_turns(workers, plans, prompt, repetitions)
    for each in plans:
        if reading[each].keys() & reading[chosen[0]].keys():
            timed = figures(reading, writing, each, chosen[0])
            yield {"candidate": str(each), **timed, "logits_db": exact[each]}
        else:
            lost = workers[each.library, each.scheme].lost
            yield {"candidate": str(each), "reason": lost or "it failed while it was timed"}
    for worker in workers.values():
        worker.close()


def _take_turns(
    workers: dict[tuple[str, str], Worker], plans: dict[Candidate, tuple[int, int]], prompt: list[int], repetitions: int
) -> tuple[Times, Times]:
    """(seconds to read the prompt, seconds per token written), of the turns in which both worked."""
    reading: Times = {each: {} for each in plans}
    writing: Times = {each: {} for each in plans}
    for repetition in range(repetitions):
        for each, (steps, times) in plans.items():
            if repetition >= times:
                continue
            worker = workers[each.library, each.scheme]
            ask(worker, "write", each.mode, 1)  # the first step of a turn has cold caches and sleeping threads
            read, _ = ask(worker, "read", each.mode, prompt)
            ask(worker, "write", each.mode, 1)
            written, _ = ask(worker, "write", each.mode, steps)
            if read is not None and written is not None:
                reading[each][repetition] = read
                writing[each][repetition] = written / steps
    return reading, writing


def decibels(right: Any, logits: Any) -> float | None:
    """SQNR of ``logits`` against those of bf16 eager: the total loss of quantization and computation. None if there are
    no meaningful logits."""
    if logits is None:
        return None
    if not np.isfinite(logits).all():
        return -999.0
    error = float(np.square(logits - right).sum())
    return round(10 * math.log10(float(np.square(right).sum()) / error), 1) if error else 999.0


def wrong(found: float | None) -> bool:
    """Whether the error is as large as the logits themselves."""
    return found is not None and found <= 0


def planned(read: float, step: float, tokens: int, repetitions: int) -> tuple[int, int]:
    """(tokens, repetitions) that fit the budget, if reading takes ``read`` seconds and a token ``step``."""
    each = BUDGET / LEAST
    steps = max(2, min(tokens, int((each - read) / step) - 2))
    return steps, max(LEAST, min(repetitions, int(BUDGET / (read + (steps + 2) * step))))


def _warm(worker: Worker, mode: str, prompt: list[int]) -> tuple[tuple[float, float], str]:
    """Seconds to read and to write a token, or why it fails. Compiled code is recompiled when something is found to
    vary, so everything runs until that has settled."""
    found: dict[str, float] = {}
    for what, amount in (("read", prompt), ("write", 2), ("read", prompt), ("write", 2), ("write", 2)):
        seconds, reason = ask(worker, what, mode, amount)
        if reason:
            return (0.0, 0.0), reason
        found[what] = seconds
    return (found["read"], found["write"] / 2), ""


def figures(reading: Times, writing: Times, name: Any, base: Any) -> Row:
    """Medians; speedups over the base within a repetition, and their noise."""
    ratios = {
        what: [times[base][at] / mine for at, mine in times[name].items() if at in times[base]]
        for what, times in (("read", reading), ("write", writing))
    }
    return {
        "prompt_ms": round(1e3 * statistics.median(reading[name].values()), 2),
        "prompt_speedup": round(statistics.median(ratios["read"]), 3),
        "tokens_per_second": round(1 / statistics.median(writing[name].values()), 2),
        "speedup": round(statistics.median(ratios["write"]), 3),
        "noise": round(spread(ratios["write"]), 4) if len(ratios["write"]) > 2 else None,
        "repetitions": len(reading[name]),
    }


def as_table(rows: list[Row]) -> str:
    titles = ("candidate", "prompt ms", "x bf16", "tokens/s", "x bf16", "noise", "logits dB")
    keys = ("prompt_ms", "prompt_speedup", "tokens_per_second", "speedup", "noise", "logits_db")
    timed = [(row["candidate"], *(str(row[key]) for key in keys)) for row in rows if "reason" not in row]
    lost = [f"{row['candidate']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([table(titles, timed), *lost])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["tinylm", "llama-1b"])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="of bitport")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--no-peers", action="store_true", help="without torchao and llama.cpp")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens to read (default: {PROMPT})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens to write each time (default: {TOKENS})")
    parser.add_argument("--layers", type=int, help="of the random models: so many, not all")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/generate.jsonl")
    options = parser.parse_args()
    prompt = [1 + at % 100 for at in range(options.prompt)]
    for model in options.models:
        head = {**header(), "busy": busy(), "model": model, "prompt": options.prompt, "tokens": options.tokens}
        head |= {"layers": options.layers}
        chosen = candidates(model, options.schemes, options.modes, not options.no_peers)
        rows = list(measure(model, chosen, prompt, options.tokens, options.repetitions, options.layers))
        print(f"\n{model}: prompt of {options.prompt} tokens, then {options.tokens}\n{as_table(rows)}", flush=True)
        if options.json:
            record("generate", head, rows)


if __name__ == "__main__":
    main()
