"""Performance goals, and what the newest records of each processor say about them: ``python -m bench.goals``.

A figure is a ratio within one run. If a goal covers several points, the worst one decides, and is named. A goal that
was not measured is neither met nor missed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

from bench import reached
from bench.measure import RESULTS
from bench.reached import Found, Records
from bench.results import lines_of, processors
from bitport.report.text import markdown, table


@dataclasses.dataclass(frozen=True)
class Goal:
    what: str
    goal: str
    measure: Callable[[Records], Found | None]
    reason: str = ""
    """Why it is missed."""
    command: str = ""
    """The command that shows this reason; a profile only counts on a processor that has one on record."""
    gpu: str = ""
    """Substring of the GPU's name for a goal of a GPU; "" for a CPU."""


STARTING = (
    "at one row a quarter of the time goes to threads that start and wait for each other and a tenth to torch and "
    "Python; while the codes are read, two thirds of the time, the rate is near the limit"
)
TILES = (
    "nine tenths of the time tile registers multiply or wait: for x, which comes from L2 again for every 32 outputs, "
    "for codes, which come from beyond it for every 128 rows, and for sums, which wait in memory between panels of 256 "
    "columns. Larger parts of x would save codes but do not stay in L2, of which a virtual machine has a part"
)
INTEGERS = (
    "an int8 product halves the time of the tiles and none of what they wait for; another tenth of the time rounds x"
)
ONE_ROW_OF_INT8 = (
    "at one row, where kernels of ggml reach 0.8 of the bandwidth limit, threads that start and wait take a fifth of "
    "our time and torch and Python a tenth; at more rows what lies behind does so by no more than about the noise"
)
BLOCKS = (
    "no unit multiplies float8; with a scale per 128 columns of x, sums of every 128 columns leave the tile registers "
    "and are scaled by themselves"
)
PROFILE = "python -m bench.profile"

INT4, INT8_INPUT = ("int4",), ("int4-int8", "int8-dyn")
WEIGHT_ONLY = ("int8", "fp8-wo", "mxfp8-wo", "mxfp4-wo")
FLOAT_INPUT = ("fp8-row", "fp8-block", "mxfp8", "mxfp4")
FEW, SOME, MANY = (1, 1), (64, 4096), (375, 4096)
"""Minimum and maximum number of rows."""

GOALS = (
    Goal(
        "int4, 1 row",
        ">= 0.85 of the bandwidth limit",
        reached.of_bandwidth("read", INT4, FEW, 0.85),
        STARTING,
        PROFILE,
    ),
    Goal("int4, 1 row", ">= 3.5x bf16", reached.over_bf16(INT4, FEW, 3.5), STARTING, PROFILE),
    Goal("int4, 1 row", ">= 50 dB", reached.exactness(INT4, FEW, 50.0)),
    Goal("int4, every shape and number of rows", "no point below bf16 eager", reached.checked(INT4, "bf16")),
    Goal("the same", "no point below bf16 frozen", reached.checked(INT4, "bf16 prepacked")),
    Goal("the same", ">= 1.0x the best peer of its class, as exact", reached.over_peers(INT4)),
    Goal(
        "int4, 375 rows and more",
        ">= 0.6 of the peak for bf16",
        reached.of_peak(INT4, MANY, 0.6),
        TILES,
        PROFILE,
    ),
    Goal("the same", ">= 2x bf16", reached.over_bf16(INT4, MANY, 2.0), TILES, PROFILE),
    Goal(
        "int8 input (int4-int8, int8-dyn), 64 rows and more",
        ">= 2x bf16",
        reached.over_bf16(INT8_INPUT, SOME, 2.0),
        INTEGERS,
        PROFILE,
    ),
    Goal(
        "the same, 375 and more",
        ">= 0.5 of the peak for int8",
        reached.of_peak(INT8_INPUT, MANY, 0.5, int8=True),
        INTEGERS,
        PROFILE,
    ),
    Goal("the same", ">= 4x bf16", reached.over_bf16(INT8_INPUT, MANY, 4.0), INTEGERS, PROFILE),
    Goal(
        "int8 input, every number of rows",
        ">= 1.0x the best peer as exact",
        reached.over_peers(INT8_INPUT),
        ONE_ROW_OF_INT8,
        PROFILE,
    ),
    *(
        goal
        for isa in ("avx512_vnni", "avx2")
        for goal in (
            Goal(f"int4, int4-int8, int8-dyn on {isa}", ">= 1.0x torch bf16 and f32", reached.over_torch(isa)),
            Goal("the same", ">= 1.0x the best peer as exact", reached.over_peers((*INT4, *INT8_INPUT), isa)),
        )
    ),
    Goal("int8, fp8, mx weights, 1 to 16 rows", ">= 1.0x bf16", reached.over_bf16(WEIGHT_ONLY, (1, 16), 1.0)),
    Goal("the same, more rows", ">= 0.9x bf16", reached.over_bf16(WEIGHT_ONLY, (17, 4096), 0.9)),
    Goal("fp8 and mx inputs too, 1 to 16 rows", ">= 1.0x bf16", reached.over_bf16(FLOAT_INPUT, (1, 16), 1.0)),
    Goal(
        "the same, more rows",
        ">= 0.9x bf16",
        reached.over_bf16(FLOAT_INPUT, (17, 4096), 0.9),
        BLOCKS,
        "python -m bench.products --schemes fp8-row fp8-block --rows 1500",
    ),
    Goal("eager overhead of a quantized linear", "<= 2x that of nn.Linear", reached.overhead),
    Goal(
        "quantizing, nearest",
        ">= 0.5 of the read bandwidth",
        reached.quantizing,
        "rounding reads the weight twice, for the range and for the codes, and packing is a pass of its own",
        "python -m bench.quantize",
    ),
    Goal("quantize_, errors measured", ">= 1.0x torchao", reached.quantizing_over_torchao),
    Goal(
        "HQQ, GPTQ, AWQ",
        "faster than the peers' own code, and as exact",
        reached.algorithms,
        "gptq also searches ranges and compares each row with rounding to nearest, for a smaller error than the peer's",
        "python -m bench.algorithms gptq",
    ),
    Goal(
        "load to first token, mmap",
        "<= 1.1x the bare read of the files",
        reached.loading,
        "nothing is copied, but the model is built in Python first, which is all there is for a model of 4 MB; a first "
        "token reads every weight once more than a bare read of warm files does",
        "python -m bench.load",
    ),
    Goal("growth with N * K, and with rows beyond the crossover", "no faster than linear", reached.growing),
    Goal(
        "H100: int4, 1 to 16 rows",
        ">= 0.85 of the copy bandwidth",
        reached.on_gpu("H100", reached.of_bandwidth("copy", INT4, (1, 16), 0.85)),
        gpu="H100",
    ),
    Goal(
        "H100: int4, 512 rows and more",
        ">= 0.95x cuBLAS bf16",
        reached.on_gpu("H100", reached.over_bf16(INT4, (512, 4096), 0.95)),
        gpu="H100",
    ),
    Goal(
        "H100: int4",
        "ahead of tinygemm, gemlite and bitsandbytes",
        reached.on_gpu("H100", reached.over_peers(INT4)),
        gpu="H100",
    ),
)

Told = tuple[str, str, str, str]
TITLES = ("what", "goal", "reached", "")


def told(goals: tuple[Goal, ...], records: Records) -> list[tuple[Goal, Told]]:
    """(goal, (what, goal, reached, met)) for each goal."""
    lines = []
    for goal in goals:
        found = goal.measure(records)
        words = ("not measured", "-") if found is None else (found.text, "met" if found.met else "missed")
        lines.append((goal, (goal.what, goal.goal, *words)))
    return lines


def of_device(gpu: str = "") -> tuple[Goal, ...]:
    """The goals for the GPU of that name, or for a CPU."""
    return tuple(goal for goal in GOALS if bool(goal.gpu) == bool(gpu) and goal.gpu in gpu)


def section(records: Records, gpu: str = "") -> str:
    """The section for the page of a CPU, or of the GPU of that name."""
    lines = told(of_device(gpu), records)
    rows = markdown(TITLES, [cells for _, cells in lines], words=range(4))
    why: dict[tuple[str, str], list[str]] = {}
    for goal, cells in lines:
        known = goal.command != PROFILE or records.lines("profile")
        if goal.reason and known and cells[3] == "missed":
            why.setdefault((goal.reason, goal.command), []).append(f"{cells[0]}, {cells[1]}")
    reasons = [f"- {'; '.join(names)}: {reason} (`{command}`)" for (reason, command), names in why.items()]
    return "\n".join(["## Goals\n", rows, "", *reasons, *([""] if reasons else [])])


def main(folder: Path = RESULTS) -> None:
    for cpu in processors(lines_of(folder / "products.jsonl")):
        print(f"{cpu}\n{table(TITLES, [cells for _, cells in told(GOALS, Records(folder, cpu))])}\n")


if __name__ == "__main__":
    sys.exit(main())
