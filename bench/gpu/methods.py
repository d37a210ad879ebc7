"""The Voxtral-shaped program on a GPU, bf16 against quantized, method by method, each as a graph.

Encoder, embedding and decoder can have different schemes: ``int4`` for all, or ``int8+int4+int4``. Candidates take
turns; a speedup is the median over repetitions of bf16's time over the candidate's in the same one.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.accelerator import Accelerator, present, tables
from bench.measure import append, header
from bench.products import figures_of
from bench.voxtral.build import BASE, PARTS, SIZES, built, sizes_of
from bench.voxtral.program import VOXTRAL, Sizes, methods
from bitport.report.text import table

SUITE = "gpu-methods"
METHODS = {
    "audio_encoder": "audio_encoder",
    "token_embedding": "token_embedding",
    "text_prefill": "text_decoder",
    "text_decode": "text_decoder",
}
"""Method -> the part whose weights it reads."""
SCHEMES = ("int4", "int4-sym", "int8", "fp8-row")

Row = dict[str, Any]


def measure(gpu: Accelerator, sizes: Sizes, schemes: tuple[str, ...], repetitions: int) -> Iterator[list[Row]]:
    """Yield failed candidates with the reason, then for each method one row per candidate."""
    plays: dict[str, dict[str, Callable[[], Any]]] = {}
    nbytes: dict[str, dict[str, int]] = {}
    lost: list[Row] = []
    for name in dict.fromkeys((BASE, *schemes)):
        try:
            plays[name], nbytes[name] = prepared(gpu, sizes, name)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if name == BASE:
                raise
            lost.append({"candidate": name, "reason": str(error).strip().splitlines()[0][:300]})
    yield lost
    for method, part in METHODS.items():
        times = take_turns(gpu, {name: mine[method] for name, mine in plays.items()}, repetitions)
        yield [
            {"method": method, "candidate": name, "nbytes": nbytes[name][part], **figures_of(mine, times[BASE])}
            for name, mine in times.items()
        ]


def prepared(gpu: Accelerator, sizes: Sizes, scheme: str) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """(method -> a replay of it, part -> bytes). As in ordinary use, weights are created outside inference_mode:
    PyTorch does not track writes to tensors created in it, so kernels could not prefetch them."""
    with torch.no_grad():
        made = built(sizes, scheme, "rtn", gpu.device)
    with torch.inference_mode():
        plays = {method: gpu.recorded(run)[0] for method, run in methods(made, gpu.device).items()}
    return plays, {part: bytes_of(made.get_submodule(part)) for part in PARTS}


def take_turns(gpu: Accelerator, plays: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, dict[int, float]]:
    """For each candidate: repetition -> seconds."""
    times: dict[str, dict[int, float]] = {name: {} for name in plays}
    for repetition in range(repetitions):
        for name, play in plays.items():
            times[name][repetition] = gpu.seconds(play)
    return times


def bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def as_table(rows: list[Row]) -> str:
    cells = [
        (row["method"], row["candidate"], f"{row['ms']:.3f}", _number(row["speedup"]), f"{row['nbytes'] / 1e6:.0f}")
        for row in rows
        if "reason" not in row
    ]
    lost = [f"not measured: {row['candidate']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([*([table(("method", "candidate", "ms", "x bf16", "MB"), cells)] if cells else []), *lost])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--schemes", nargs="+", default=list(SCHEMES), help=f"default: {' '.join(SCHEMES)}")
    made.add_argument("--repetitions", type=int, default=21)
    for name in SIZES:
        made.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {getattr(VOXTRAL, name)}")
    made.add_argument("--json", action="store_true", help=f"append the results to bench/results/{SUITE}.jsonl")
    return made


def main() -> None:
    options = parser().parse_args()
    gpu, sizes = present(), sizes_of(options)
    head = {**header(), "gpu": gpu.about(), "sizes": dataclasses.asdict(sizes), "tables": tables()}
    if options.json:
        append(SUITE, [head])
    for rows in measure(gpu, sizes, tuple(options.schemes), options.repetitions):
        print(as_table(rows), flush=True)
        if options.json:
            append(SUITE, [{"run": head["run"], **row} for row in rows])


if __name__ == "__main__":
    main()
