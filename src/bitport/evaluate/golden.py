"""The accuracy table of the documentation: ``python -m bitport.evaluate.golden MODEL_DIR docs/accuracy``.

It writes ``docs/accuracy.json``, against which tests compare, and the same as a table in ``docs/accuracy.md``. Weights
are quantized from the model's files as ``quantize_`` does it, in the dtype of the files; then the model computes in
float32, so that a figure is a property of the scheme and not of a kernel's rounding. What a kernel can contribute all
the same is measured and recorded as the row's ``noise``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitport.evaluate.compare import BASELINE, change_percent, quantized
from bitport.evaluate.measure import size_of
from bitport.evaluate.noise import noise
from bitport.evaluate.yardstick import WINDOW, Yardstick
from bitport.report.text import markdown
from bitport.schemes import PRESETS

INTRODUCTION = """# Accuracy

Perplexity of `{model}` under each scheme, on the first {tokens} tokens of its `eval.txt` in windows of {window} tokens
(definition: `bitport.evaluate.perplexity`). Lower is better; the change is against the model as it is, in bf16. Bits
per weight count every parameter with its scales, also those that stay in bf16: the embedding, which is the output
head too, and the norms. It is a small model of an easy language, which rounding hurts little: the order of schemes
is what it shows, and [a published model](accuracy-real.md) loses many times as much. Measure your own model with
`bitport eval`. Changes of a few hundredths of a percent are chance.

Weights are rounded to the nearest number of the scheme, without any calibration but for int8-static. Everything else
is computed in float32. `make accuracy` writes this page.
"""

SCHEMES = (BASELINE, *PRESETS, "int2-g32", "int3-g32", "int4-g32", "int4-sym")


@dataclasses.dataclass(frozen=True)
class Golden:
    scheme: str
    bits_per_weight: float
    perplexity: float
    change_percent: float
    noise: float
    """Bound on how much a kernel within its error budget changes log(perplexity)."""


def rows(yardstick: Yardstick, schemes: Iterable[str], *, with_noise: bool = True) -> Iterator[Golden]:
    """Measure ``schemes``, of which the first must be the baseline."""
    base = None
    for scheme in schemes:
        model = quantized(yardstick.base, scheme, yardstick.batches)
        bits = size_of(model).bits_per_weight
        losses = yardstick.losses(model)
        nll = float(losses.double().mean())
        base = nll if base is None else base
        extra = noise(model, yardstick.tokens, WINDOW, losses) if with_noise else 0.0
        yield Golden(scheme, bits, math.exp(nll), change_percent(nll, base), extra)


def as_markdown(data: dict[str, Any]) -> str:
    header = ("scheme", "bits/weight", "perplexity", "change")
    cells = [
        (row["scheme"], f"{row['bits_per_weight']:.2f}", f"{row['perplexity']:.4f}", f"{row['change_percent']:+.2f} %")
        for row in data["rows"]
    ]
    return f"{INTRODUCTION.format(**data)}\n{markdown(header, cells, words=range(len(header)))}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory with eval.txt and calibration.txt")
    parser.add_argument("output", type=Path, help="where to write, without .json and .md")
    args = parser.parse_args()
    yardstick = Yardstick(args.model)
    made = []
    for row in rows(yardstick, SCHEMES):
        print(f"{row.scheme}: {row.perplexity:.4f} ({row.change_percent:+.2f} %)", file=sys.stderr)
        made.append(dataclasses.asdict(row))
    data = {"model": args.model.as_posix(), "tokens": len(yardstick.tokens), "window": WINDOW, "rows": made}
    args.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    args.output.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")


if __name__ == "__main__":
    main()
