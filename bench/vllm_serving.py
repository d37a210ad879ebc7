"""Generation in vLLM: a model in bfloat16, in few bits by bitport's kernels, and with the same numbers by vLLM's own.

Measures the time to read a prompt, and of the steps after it with one text and with several at once, for a Llama of
random weights. Every candidate runs in its own process, in turns; a turn loads the model, warms up and measures. The
files for vLLM's own kernels are written by ``bitport convert``. ``--page`` writes docs/performance-vllm.md from the
records.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import RESULTS, busy, header, record
from bench.models import NAMES, model_of
from bench.results import lines_of, runs_of
from bitport.evaluate.timing import spread
from bitport.report.text import markdown, table

SUITE = "vllm"
PAGE = Path(__file__).parents[1] / "docs" / "performance-vllm.md"
FOLDER = Path("build") / "vllm"
PROMPT, TOKENS, TEXTS = 512, 32, (1, 8)
TIMES = ("prompt_ms", *(f"step_{texts}_ms" for texts in TEXTS), "load_ms")
MARK = "result: "

Row = dict[str, Any]


class Candidate(NamedTuple):
    """``format``: of the checkpoint that vLLM loads; "bitport" uses bitport's kernels."""

    scheme: str
    format: str

    def __str__(self) -> str:
        return f"{self.scheme}:{self.format}"


BASE = Candidate("bf16", "float")
CANDIDATES = (
    BASE,
    *(Candidate(scheme, "bitport") for scheme in ("int4", "int4-int8", "int8", "int8-dyn", "fp8-row", "mxfp4")),
    Candidate("int4", "awq"),
    Candidate("int8-dyn", "compressed-tensors"),
)


def prepared(name: str, layers: int | None, candidate: Candidate) -> Path:
    """The head and the embedding stay in float, as the other formats require."""
    from bitport.checkpoint import quantize_files
    from bitport.interop import convert

    root = FOLDER / (name if layers is None else f"{name}-{layers}")
    original = root / "bf16"
    if not original.exists():
        model_of(name, layers).save_pretrained(original)
    if candidate == BASE:
        return original
    own = root / candidate.scheme
    if not (own / "bitport.json").exists():
        recipe = {"lm_head": "skip", "model.embed_tokens": "skip", "*": candidate.scheme}
        quantize_files(original, own, recipe, progress=False)
    if candidate.format == "bitport":
        return own
    other = root / f"{candidate.scheme}-{candidate.format}"
    if not other.exists():
        convert(own, other, to=candidate.format, progress=False)
    return other


def turn(directory: Path, candidate: Candidate, threads: int) -> Row:
    """Run one turn in its own process; the row has "error" unless that produced a result."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USAGE_STATS": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", __spec__.name, "--child", str(directory), candidate.format]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    found = [line.removeprefix(MARK) for line in run.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(found[0]) if found else {"error": (run.stderr.strip().splitlines() or ["ended"])[-1]}


def child(directory: str, form: str) -> None:
    import torch
    import vllm

    how = {"quantization": "bitport", "load_format": "bitport"} if form == "bitport" else {}
    began = time.perf_counter()
    llm = vllm.LLM(
        directory,
        dtype="bfloat16",
        max_model_len=PROMPT + TOKENS,
        max_num_batched_tokens=PROMPT * TEXTS[-1],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **how,
    )
    loaded = time.perf_counter() - began
    ids = torch.randint(0, 30000, (TEXTS[-1], PROMPT), generator=torch.Generator().manual_seed(0)).tolist()

    def seconds(texts: int, prompt: int, tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": each[:prompt]} for each in ids[:texts]], sampling, use_tqdm=False)
        return time.perf_counter() - began

    seconds(1, PROMPT, 2)
    taken = {"load": loaded, "prompt": min(seconds(1, PROMPT, 1) for _ in range(2))}
    for texts in TEXTS:
        seconds(texts, 8, 4)
        taken[f"step_{texts}"] = (seconds(texts, 8, TOKENS + 1) - seconds(texts, 8, 1)) / TOKENS
    found = {f"{name}_ms": round(each * 1e3, 2) for name, each in taken.items()}
    print(MARK + json.dumps(found | {"threads": torch.get_num_threads(), "vllm": vllm.__version__}))


def measure(options: argparse.Namespace) -> list[Row]:
    chosen = [each for each in CANDIDATES if each == BASE or str(each) in options.candidates]
    directories = {each: prepared(options.model, options.layers, each) for each in chosen}
    turns: dict[Candidate, list[Row]] = {each: [] for each in chosen}
    for repetition in range(options.repetitions):
        for each in chosen:
            turns[each].append(turn(directories[each], each, options.threads))
            print(f"{repetition + 1}/{options.repetitions} {each}: {turns[each][-1]}", flush=True)
    asked = {"model": options.model, "layers": options.layers}
    return [asked | summed(each, turns, directories[each]) for each in chosen]


def summed(each: Candidate, turns: dict[Candidate, list[Row]], directory: Path) -> Row:
    """Medians over the turns; speedups relative to bf16 in the same turn."""
    row: Row = {"scheme": each.scheme, "format": each.format}
    row["bytes"] = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    pairs = [(own, base) for own, base in zip(turns[each], turns[BASE], strict=True) if not {"error"} & {*own, *base}]
    if not pairs:
        return row | {"error": next(own["error"] for own in turns[each] if "error" in own)}
    row |= {key: pairs[0][0][key] for key in ("threads", "vllm")}
    for key in TIMES:
        faster = [base[key] / own[key] for own, base in pairs]
        row |= {key: statistics.median(own[key] for own, _ in pairs), f"{key}_speedup": statistics.median(faster)}
        row[f"{key}_noise"] = spread(faster) if len(faster) > 1 else None
    return row | {"turns": len(pairs)}


def page(lines: list[Row]) -> str:
    """The page, from the newest run of each model."""
    runs = runs_of(lines)
    newest = {(row["model"], row["layers"]): row["run"] for row in lines if "machine" not in row}
    text = [INTRODUCTION]
    for (model, layers), run in newest.items():
        rows = [row for row in lines if row.get("run") == run and "machine" not in row and row["model"] == model]
        head, first = runs[run], rows[0]
        where = f"{head['machine']['cpu']}, {first.get('threads')} threads, vLLM {first.get('vllm')}"
        cut = "" if layers is None else f", {layers} layers of it"
        text.append(f"\n## {model}{cut}\n\n{_markdown(rows)}\n")
        text.append(
            f"Run {run}, commit {head['commit']}: {where}, {first.get('turns')} turns; other processes used "
            f"{head['busy']} cores.\n"
        )
    return "\n".join(text)


def _markdown(rows: list[Row]) -> str:
    titles = ("weights", "kernels", "size", "prompt", *(f"{texts} at once" for texts in TEXTS), "load")
    lines = []
    for row in rows:
        kernels = "bitport" if row["format"] == "bitport" else f"vLLM ({row['format']})"
        cells = [row["scheme"], kernels, f"{row['bytes'] / 1e9:.2f} GB"]
        if "error" in row:
            cells += [f"refused: {row['error']}", *("" for _ in titles[4:])]
        else:
            steps = [f"{texts * 1e3 / row[f'step_{texts}_ms']:.1f}/s" for texts in TEXTS]
            shown = (f"{row['prompt_ms']:.0f} ms", *steps, f"{row['load_ms'] / 1e3:.1f} s")
            times = zip(shown, TIMES, strict=True)
            cells += [f"{value} ({row[f'{key}_speedup']:.2f}x)" for value, key in times]
        lines.append(cells)
    return markdown(titles, lines, words=range(len(titles)))


INTRODUCTION = f"""# vLLM in figures

The speed of [vLLM with bitport's kernels](vllm.md) on a CPU, for a Llama with random weights: `make bench-vllm`
measures and writes this page; nothing in it is typed by hand.

*Prompt*: time to the first token after a prompt of {PROMPT} tokens. *At once*: tokens per second of that many texts
together. *Load*: until the model is ready, compiling included. In brackets: the speedup over bf16 in the same turn.
Rows with vLLM's kernels have exactly the weights of bitport's row, written by `bitport convert`. The head and the
embedding are bf16 everywhere."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="llama-1b")
    parser.add_argument("--layers", type=int, help="so many instead of all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    every = [str(each) for each in CANDIDATES[1:]]
    parser.add_argument("--candidates", nargs="+", choices=every, default=every)
    parser.add_argument("--json", action="store_true", help=f"append the rows to bench/results/{SUITE}.jsonl")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the page from the records")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    if options.page:
        PAGE.write_text(page(lines_of(RESULTS / f"{SUITE}.jsonl")), encoding="utf-8")
        return
    head = header() | {"busy": busy()}
    rows = measure(options)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    print(table(keys, [tuple(str(row.get(key, "-")) for key in keys) for row in rows]))
    if options.json:
        record(SUITE, head, rows)


if __name__ == "__main__":
    main()
