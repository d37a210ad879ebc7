"""Generate docs/training-figures.md from the suite's records: ``python -m bench.training page``."""

from __future__ import annotations

from typing import Any

from bench.measure import RESULTS
from bench.page import DOCS
from bench.results import lines_of, runs_of
from bitport.report.text import markdown

Row = dict[str, Any]
PAGE = "training-figures.md"

INTRODUCTION = """# Training in figures

The cost and gain of `bitport.train` ([training.md](training.md)). `make bench-training` measures and writes this page;
nothing in it is typed by hand.
"""
STEPS = """## A step

Forward and backward pass of an MLP (1024 x 4096 and back) in bfloat16, relative to bfloat16 without quantization,
median over rounds in which every candidate takes its turn, none of them compiled: below 1 is faster. With *gradients*
both passes are in low precision. *torchao*: its quantization-aware training, and its float8 training emulated, since
a CPU has no float8 products.
"""
SCHEMES = """## For a scheme

Perplexity of `models/tinylm` as in [accuracy.md](accuracy.md), {float:.4f} in bf16: as an algorithm quantizes it, and
behind the arrow after training from there, `prepare_(model, scheme, algorithm=..)`: {steps} steps, {tokens} tokens that
the model has not seen, towards the logits of the float model. Steps, tokens and learning rate are the same for all.
"""
SCALES = """## Scales alone

The same for `learn_scales_` of the quantized model: codes, norms and all else stay. Steps, tokens and what is learned
from are those of the table above.
"""
GRADIENTS = """## Gradients in low precision

How far the gradients of the weights of `models/tinylm` are from float32's, on one batch of new text: SQNR in dB, the
median over its matrices and the least. bf16 is autocast without quantization.
"""
OPTIMIZERS = """## A step of an optimizer

AdamW (and Lion) of `bitport.train.optim` ([optimizers.md](optimizers.md)) with moments in few bits, as a part of the
time of torch's fused AdamW with moments in float32, on the parameters of one block of a model of a billion (*layers*)
and of a whole small one (*small*): below 1 is faster. In the last column: bytes of moments per parameter.
"""


def newest(lines: list[Row], what: str) -> tuple[Row, list[Row]] | None:
    """The header and rows of the last run among those with the most rows, to skip incomplete ones."""
    runs = [
        (head, [row for row in lines if row["run"] == head["run"] and "machine" not in row])
        for head in runs_of(lines).values()
        if head["what"] == what
    ]
    return max(reversed(runs), key=lambda run: len(run[1]), default=None)


def where(head: Row) -> str:
    machine = head["machine"]
    return (
        f"Run {head['run']}, commit {head['commit']}: {machine['cpu']}, {machine['threads']} threads; other processes "
        f"used {head['busy']} cores.\n"
    )


def of_steps(head: Row, rows: list[Row]) -> str:
    sizes = sorted({row["rows"] for row in rows})
    found = {(row["candidate"], row["rows"]): row for row in rows}
    names = list(dict.fromkeys(row["candidate"] for row in rows))
    cells = [
        [name, *(f"{found[name, size]['x bf16']:.2f} ({found[name, size]['ms']:.1f} ms)" for size in sizes)]
        for name in names
    ]
    return "\n".join([STEPS, where(head), markdown(["", *(f"{size} rows" for size in sizes)], cells), ""])


def of_schemes(head: Row, rows: list[Row]) -> str:
    return _trained(SCHEMES, head, rows)


def of_scales(head: Row, rows: list[Row]) -> str:
    return _trained(SCALES, head, rows)


def _trained(text: str, head: Row, rows: list[Row]) -> str:
    found = {(row["scheme"], row["algorithm"]): f"{row['alone']:.4f} → {row['trained']:.4f}" for row in rows}
    schemes, algorithms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("scheme", "algorithm"))
    cells = [[scheme, *(found.get((scheme, name), "") for name in algorithms)] for scheme in schemes]
    return "\n".join([text.format(**rows[0]), where(head), markdown(["scheme", *algorithms], cells), ""])


def of_gradients(head: Row, rows: list[Row]) -> str:
    cells = [[row["candidate"], f"{row['median']:.1f}", f"{row['least']:.1f}"] for row in rows]
    return "\n".join([GRADIENTS, where(head), markdown(["", "median", "least"], cells), ""])


def of_optimizers(head: Row, rows: list[Row]) -> str:
    shapes = list(dict.fromkeys(row["shapes"] for row in rows))
    found = {(row["optimizer"], row["shapes"]): row for row in rows}
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    cells = []
    for name in names:
        here = [found[name, shape] for shape in shapes]
        ratios = [f"{each['to_fused']:.2f} ({each['ms']:.1f} ms)" for each in here]
        cells.append([name, *ratios, f"{here[0]['state_bytes_per_parameter']:.2f}"])
    return "\n".join([OPTIMIZERS, where(head), markdown(["", *shapes, "bytes"], cells), ""])


def write() -> None:
    lines = lines_of(RESULTS / "training.jsonl")
    parts = [INTRODUCTION]
    sections = {"steps": of_steps, "schemes": of_schemes, "scales": of_scales, "gradients": of_gradients}
    for what, section in sections.items():
        if found := newest(lines, what):
            parts.append(section(*found))
    measured = lines_of(RESULTS / "optim.jsonl")
    timed = [row for row in measured if "optimizer" in row]
    if timed:
        run = timed[-1]["run"]
        parts.append(of_optimizers(runs_of(measured)[run], [row for row in timed if row["run"] == run]))
    (DOCS / PAGE).write_text("\n".join(parts).rstrip() + "\n")
