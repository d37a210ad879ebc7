"""Generation end to end: milliseconds to read a prompt, tokens per second after it; bf16, bitport and peers in turns.

One repetition lets each candidate read the prompt and write some tokens. What cannot run is said with its reason.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench.measure import append, busy, header
from bench.models import NAMES
from bench.speakers import Speakers
from bench.workers import Worker, ask
from bitport.evaluate.timing import spread
from bitport.report.text import table

SCHEMES = ("int4", "int8", "int8-dyn", "int4-int8")
PEERS = (("torchao", "int8"), ("torchao", "int8-dyn"), ("llama.cpp", "Q4_0"), ("llama.cpp", "Q8_0"))
MODES = ("eager", "compiled")
PROMPT, TOKENS = 128, 16

Row = dict[str, Any]


class Candidate(NamedTuple):
    library: str
    scheme: str
    mode: str

    def __str__(self) -> str:
        return " ".join(self).strip()


def candidates(model: str, schemes: list[str], modes: list[str], peers: bool) -> list[Candidate]:
    """The first is what the others are compared with. llama.cpp has no modes, and no file of tinylm."""
    pairs = [("torch", "bf16"), *(("bitport", scheme) for scheme in schemes), *(PEERS if peers else ())]
    made = [Candidate(*pair, mode) for pair in pairs if pair[0] != "llama.cpp" for mode in modes]
    return made + [Candidate(*pair, "") for pair in pairs if pair[0] == "llama.cpp" and model != "tinylm"]


def measure(model: str, chosen: list[Candidate], prompt: list[int], tokens: int, repetitions: int) -> Iterator[Row]:
    """Each candidate in a process of its library and scheme: one that crashes is a result."""
    length = len(prompt) + 2 * tokens + 8
    workers: dict[tuple[str, str], Worker] = {}
    reading: dict[Candidate, list[float]] = {}
    writing: dict[Candidate, list[float]] = {}
    for each in chosen:
        pair = (each.library, each.scheme)
        if pair not in workers:
            workers[pair] = Worker(torch.get_num_threads(), Speakers, each.library, model, each.scheme, length)
        if reason := _warm(workers[pair], each.mode, prompt):
            yield {"candidate": str(each), "reason": reason}
        else:
            reading[each], writing[each] = [], []
    for _ in range(repetitions):
        for each in reading:
            worker = workers[each.library, each.scheme]
            read, _ = ask(worker, "read", each.mode, prompt)
            ask(worker, "write", each.mode, 1)  # the first step after a prompt finds cold caches and sleeping threads
            written, _ = ask(worker, "write", each.mode, tokens)
            if read is not None and written is not None:
                reading[each].append(read)
                writing[each].append(written / tokens)
    base = next(iter(reading))
    for each in reading:
        if len(reading[each]) == len(reading[base]):
            yield {"candidate": str(each), **figures(reading, writing, each, base)}
        else:
            lost = workers[each.library, each.scheme].lost
            yield {"candidate": str(each), "reason": lost or "it failed while it was timed"}
    for worker in workers.values():
        worker.close()


def _warm(worker: Worker, mode: str, prompt: list[int]) -> str:
    """Run it once; compiled code is compiled again for what is seen to vary. Returns why it cannot run."""
    for request in (("read", mode, prompt), *((("write", mode, 2),) * 3)):
        _, reason = ask(worker, *request)
        if reason:
            return reason
    return ""


def figures(reading: dict[Any, list[float]], writing: dict[Any, list[float]], name: Any, base: Any) -> Row:
    """Medians; times as fast as the base within a repetition, and the noise of that."""
    ratios = {
        what: [theirs / mine for theirs, mine in zip(times[base], times[name], strict=True)]
        for what, times in (("read", reading), ("write", writing))
    }
    return {
        "prompt_ms": round(1e3 * statistics.median(reading[name]), 2),
        "prompt_speedup": round(statistics.median(ratios["read"]), 3),
        "tokens_per_second": round(1 / statistics.median(writing[name]), 2),
        "speedup": round(statistics.median(ratios["write"]), 3),
        "noise": round(spread(ratios["write"]), 4) if len(ratios["write"]) > 1 else None,
    }


def as_table(rows: list[Row]) -> str:
    titles = ("candidate", "prompt ms", "x bf16", "tokens/s", "x bf16", "noise")
    keys = ("prompt_ms", "prompt_speedup", "tokens_per_second", "speedup", "noise")
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
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/generate.jsonl")
    options = parser.parse_args()
    prompt = [1 + at % 100 for at in range(options.prompt)]
    for model in options.models:
        head = {**header(), "busy": busy(), "model": model, "prompt": options.prompt, "tokens": options.tokens}
        chosen = candidates(model, options.schemes, options.modes, not options.no_peers)
        rows = list(measure(model, chosen, prompt, options.tokens, options.repetitions))
        print(f"\n{model}: prompt of {options.prompt} tokens, then {options.tokens}\n{as_table(rows)}", flush=True)
        if options.json:
            append("generate", [head, *({"run": head["run"], **row} for row in rows)])


if __name__ == "__main__":
    main()
