"""A Voxtral-shaped program without Python, bf16 against quantized: size, load and run time of each method.

In addition to plain bf16 there is bf16 with weights that torch has packed for oneDNN (freezing); only its runs are
compared, since each of its libraries holds its own weights.

Every candidate is built, quantized and exported in a separate process; `bitport-run` then runs its methods, checks each
against eager mode, and times it. Candidates take turns; one turn is one process per method. A ratio is the median over
turns of the candidate's time over bf16's in the same turn. Loads are measured in three ways: reading all weights after
the file was evicted from the page cache; with weights mapped and read on use, as by default; and reading all weights
again, from the page cache. The order ensures that all candidates entered the page cache in the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.measure import busy, header, record
from bench.voxtral.build import BASE, PREPACKED, PROGRAM, add_sizes, schemes_of, sizes_of
from bitport.evaluate.timing import spread
from bitport.export.load import VERSION
from bitport.report.text import size, table

SUITE = "voxtral"
ROOT = Path(__file__).parents[2]
METHODS = ("audio_encoder", "token_embedding", "text_prefill", "text_decode")
QUICK_LAYERS = 2
RUNS = {"cold": ["--resident", "--repeat", "0"], "mapped": [], "resident": ["--resident", "--repeat", "0"]}
"""Ways to load methods, in this order -> options of the runner; only mapped ones are timed."""
RUN_FIGURES = ("run", "run, p99")
SHORT = {"token_embedding": 100}
"""Methods of a tenth of a millisecond -> the factor for their number of timed runs."""
GOALS = {"size": 0.36, "load": 0.45, "run": 1.0, "text_decode": 0.4}
"""Maximum for int4, relative to bf16."""

Row = dict[str, Any]


def build(options: argparse.Namespace, name: str, folder: Path) -> Row:
    """Build the package unless the last build had the same settings."""
    wanted = {
        "name": name,
        "format": VERSION,
        "algorithm": options.algorithm,
        **dataclasses.asdict(sizes_of(options)),
    }
    made = folder / "built.json"
    if not options.rebuild and made.exists() and json.loads(made.read_text())["wanted"] == wanted:
        found: Row = json.loads(made.read_text())["seconds"]
        return found
    made.unlink(missing_ok=True)
    arguments = [f"--{key.replace('_', '-')}={wanted[key]}" for key in ("frames", "audio_layers", "layers", "words")]
    command = [sys.executable, "-m", "bench.voxtral.build", name, str(folder), f"--algorithm={options.algorithm}"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    seconds: Row = json.loads(done.stdout.splitlines()[-1])
    made.write_text(json.dumps({"wanted": wanted, "seconds": seconds}))
    return seconds


def run(options: argparse.Namespace, folder: Path, method: str, way: str) -> Row:
    package, recorded = folder / PROGRAM, folder / f"{method}.safetensors"
    if way == "cold":
        forget(package)
    command = [options.runner, package, method, "--inputs", recorded, "--json", "--torch", options.torch_lib]
    allowed = ["--atol", str(tolerance(recorded)), "--repeat", str(options.repeat * SHORT.get(method, 1))]
    done = subprocess.run(
        [*map(str, command), *allowed, *RUNS[way]], capture_output=True, text=True, env=environment(options)
    )
    if done.returncode:
        raise SystemExit(f"{folder.name}, {method}: {done.stderr or done.stdout}")
    report = json.loads(done.stdout)
    assert not [name for name in report["libraries"] if "libpython" in name]
    return {"program_ms": report["program_ms"], "own_memory": report["own_memory"], **report["methods"][0]}


def environment(options: argparse.Namespace) -> dict[str, str]:
    threads = str(options.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PATH": os.environ["PATH"]}


def tolerance(recorded: Path) -> float:
    """Half of the digits of bfloat16: eager mode rounds between operations where compiled code does not."""
    import torch
    from safetensors import safe_open

    with safe_open(recorded, "pt") as file:
        return float(file.get_tensor("output.0").abs().max()) * torch.finfo(torch.bfloat16).eps ** 0.5


def forget(path: Path) -> None:
    """Ask the system to evict the file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: argparse.Namespace, folders: dict[str, Path]) -> list[Row]:
    """One row per candidate with its size, and one per method, candidate and figure."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(options.turns):
        for method in METHODS:
            for way in RUNS:
                for name, folder in folders.items():
                    if name == PREPACKED and way != "mapped":
                        continue
                    taken = run(options, folder, method, way)
                    figures = {f"load, {way}": taken["load_ms"]}
                    if way == "mapped":
                        figures |= {"run": taken["median_ms"], "run, p99": taken["p99_ms"], "first": taken["first_ms"]}
                        figures["program"] = taken["program_ms"]
                    for figure in RUN_FIGURES if name == PREPACKED else figures:
                        found.setdefault((method, figure, name), []).append(figures[figure])
    sizes = {name: (folder / PROGRAM).stat().st_size for name, folder in folders.items() if name != PREPACKED}
    rows: list[Row] = [
        {"figure": "size", "candidate": name, "nbytes": nbytes, "ratio": round(nbytes / sizes[BASE], 4)}
        for name, nbytes in sizes.items()
    ]
    for (method, figure, name), times in found.items():
        ratios = [mine / theirs for mine, theirs in zip(times, found[method, figure, BASE], strict=True)]
        timed = {"ms": round(statistics.median(times), 4), "ratio": round(statistics.median(ratios), 4)}
        noise = round(spread(ratios), 4) if len(ratios) > 2 else None
        rows.append({"method": method, "figure": figure, "candidate": name, **timed, "noise": noise})
    return rows


def as_table(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        value = size(row["nbytes"]) if "nbytes" in row else f"{row['ms']:.3f} ms"
        cells.append((row.get("method", ""), row["figure"], row["candidate"], value, f"{row['ratio']:.3f}"))
    return table(("method", "figure", "weights", "value", "x bf16"), cells)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--schemes", nargs="+", default=["int4"], help="beside bf16; or one for each part: int8+int4+int4"
    )
    add_sizes(made)
    made.set_defaults(layers=QUICK_LAYERS, audio_layers=None)
    made.add_argument(
        "--full",
        action="store_true",
        help=f"all layers, without {PREPACKED}, which holds weights twice: 20 GB of disk, memory for those of bf16",
    )
    made.add_argument("--turns", type=int, default=5)
    made.add_argument("--repeat", type=int, default=5, help="timed runs of a method in one turn (default: 5)")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--runner", type=Path, default=ROOT / "build" / "runner" / "bitport-run")
    made.add_argument("--torch-lib", type=Path, help="the folder of libtorch_cpu.so (default: of this torch)")
    made.add_argument("--folder", type=Path, default=ROOT / "build" / "voxtral", help="where packages are made")
    made.add_argument("--rebuild", action="store_true")
    made.add_argument("--json", action="store_true", help=f"append the results to bench/results/{SUITE}.jsonl")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.full:
        options.layers = options.audio_layers = None
    elif options.audio_layers is None:
        options.audio_layers = options.layers
    if not options.runner.exists():
        raise SystemExit(f"{options.runner} is missing: make runner")
    if options.torch_lib is None:
        import torch

        options.torch_lib = Path(torch.__path__[0]) / "lib"
    beside = () if options.full else (PREPACKED,)
    names = dict.fromkeys((BASE, *beside, *options.schemes))
    for name in names:
        schemes_of(name)
    folders = {name: options.folder / name for name in names}
    built = {name: build(options, name, folder) for name, folder in folders.items()}
    about = {"sizes": dataclasses.asdict(sizes_of(options)), "algorithm": options.algorithm, "built": built}
    head = {**header(), **about, "runner_threads": options.threads, "turns": options.turns, "busy": busy()}
    rows = measure(options, folders)
    print(as_table(rows))
    if options.json:
        record(SUITE, head, rows)


if __name__ == "__main__":
    main()
