"""The table of algorithms: ``python -m bitport.evaluate.algorithms MODEL_DIR docs/algorithms [SCHEME ...]``.

Measured as the accuracy table is (:mod:`bitport.evaluate.golden`), on the same text; algorithms that look at inputs see
the model's ``calibration.txt``, which shares nothing with it. With schemes given only their rows are made anew.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bitport.algorithms import ALGORITHMS
from bitport.api import quantize_
from bitport.evaluate.compare import change_percent
from bitport.evaluate.golden import CALIBRATION_TOKENS, WINDOW, Yardstick
from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import cast_parameters, logits_of

INTRODUCTION = """# Algorithms

Perplexity of `{model}` in each scheme by each algorithm, on the text and in the way of [accuracy.md](accuracy.md); in
brackets the change against bf16, {baseline:.4f}. `rtn` rounds to nearest; `clip` takes the best of several ranges for
each block; `hqq` fits scale and zero point to a norm that forgives outliers; `gptq` lets the columns that are not yet
rounded make up for those that are, on {calibration} tokens of `calibration.txt`. The first three need no data. All
give ordinary weights of the scheme, as large and as fast as any other. A dash: the algorithm refuses this format.
`make algorithms` writes this page.
"""

SCHEMES = ("int4", "int3", "int2", "int2-g32")


@dataclasses.dataclass(frozen=True)
class Row:
    scheme: str
    algorithm: str
    perplexity: float | None
    """None: refused."""
    change_percent: float | None


def rows(
    yardstick: Yardstick, scheme: str, baseline: float, names: tuple[str, ...] = tuple(ALGORITHMS)
) -> Iterator[Row]:
    """``baseline``: :func:`nll` of the model as it is."""
    batches = [ids[None] for ids in yardstick.calibration.split(WINDOW)]
    for name in names:
        model = copy.deepcopy(yardstick.base)
        report = quantize_(model, scheme, algorithm=name, calibrate=batches, measure=False, progress=False)
        used = {layer.algorithm for layer in report.quantized}
        if used != {name}:
            yield Row(scheme, name, None, None)
            continue
        value = nll(yardstick, model)
        yield Row(scheme, name, math.exp(value), change_percent(value, baseline))


def nll(yardstick: Yardstick, model: Any) -> float:
    """Mean negative log likelihood of the text, computed in float32."""
    cast_parameters(model, torch.float32)
    return float(token_losses(logits_of(model), yardstick.tokens, window=WINDOW, batch=4).double().mean())


def as_markdown(data: dict[str, Any]) -> str:
    cells = {(row["scheme"], row["algorithm"]): _cell(row) for row in data["rows"]}
    lines = [("scheme", *ALGORITHMS), ("---",) * (1 + len(ALGORITHMS))]
    lines += [(scheme, *(cells[scheme, name] for name in ALGORITHMS)) for scheme in SCHEMES]
    return INTRODUCTION.format(**data) + "\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    return "-" if row["perplexity"] is None else f"{row['perplexity']:.4f} ({row['change_percent']:+.2f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory with eval.txt and calibration.txt")
    parser.add_argument("output", type=Path, help="where to write, without .json and .md")
    parser.add_argument("schemes", nargs="*", default=SCHEMES, help=f"default: {' '.join(SCHEMES)}")
    args = parser.parse_args()
    yardstick, record = Yardstick(args.model), args.output.with_suffix(".json")
    baseline = nll(yardstick, copy.deepcopy(yardstick.base))
    made = [dataclasses.asdict(row) for scheme in args.schemes for row in _told(rows(yardstick, scheme, baseline))]
    kept = json.loads(record.read_text(encoding="utf-8"))["rows"] if record.exists() else []
    kept = [row for row in kept if row["scheme"] in SCHEMES and row["scheme"] not in args.schemes]
    data = {
        "model": args.model.as_posix(),
        "baseline": math.exp(baseline),
        "calibration": min(CALIBRATION_TOKENS, len(yardstick.calibration)),
        "rows": sorted(kept + made, key=lambda row: SCHEMES.index(row["scheme"])),
    }
    record.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if {row["scheme"] for row in data["rows"]} == set(SCHEMES):
        args.output.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")


def _told(made: Iterator[Row]) -> Iterator[Row]:
    for row in made:
        print(row, file=sys.stderr)
        yield row


if __name__ == "__main__":
    main()
