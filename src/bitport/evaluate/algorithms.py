"""The table of algorithms: ``python -m bitport.evaluate.algorithms MODEL_DIR docs/algorithms [SCHEME ...]``.

Measured as the accuracy table is (:mod:`bitport.evaluate.golden`), on the same text; algorithms that look at inputs see
the model's ``calibration.txt``, which shares nothing with it. With schemes given only their rows are made anew.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bitport.algorithms.mixed import Costs, costs
from bitport.algorithms.solving import uses_data
from bitport.api import quantize_
from bitport.evaluate.compare import change_percent
from bitport.evaluate.yardstick import CALIBRATION_TOKENS, Yardstick
from bitport.report.text import markdown
from bitport.schemes import Recipe

INTRODUCTION = """# Algorithms

Perplexity of `{model}` in each scheme by each algorithm, on the text and in the way of [accuracy.md](accuracy.md); in
brackets the change against bf16, {baseline:.4f}.

- `rtn` rounds to nearest.
- `clip` takes the best of several ranges for each block.
- `hqq` fits scale and zero point so that most errors become small, without letting the large ones grow.
- `gptq` lets the columns that are not yet rounded make up for those that are.
- `awq` multiplies the columns of weights and divides the channels before them, by what keeps the outputs of rounded
  weights closest, and then takes the best of several ranges, as `clip` does, with each column weighted by its inputs.
- `signround` starts from what `gptq` found, and learns to which side each weight is rounded, and the ranges.
  Both trust less in what channels have in common than the calibration data suggest: rare tokens would be lost. The
  fewer the bits, the more a published model gains by that; at two bits this small one loses by it.
- `awq+signround`, `awq+gptq`: the scales of the first, then the second instead of clipping.
- `smooth` scales channels as `awq` does, so that rounding the inputs hurts less, and rounds to nearest.
- `mixed` gives each weight a scheme of its own, out of {candidates},
  so that all together are no larger than in the row's scheme: what each costs was estimated, and the weights are
  quantized, by `gptq`.

The first three need no data, the others see {calibration} tokens of `calibration.txt`. All give ordinary weights of a
scheme, as large and as fast as any other. A dash: the algorithm refuses this format, or nothing smaller is left to
choose. It is a small model and a short text: a difference of a tenth of a percent is chance, and
[a published model](accuracy-real.md) loses many times as much. `make algorithms` writes this page.
"""


class Table(NamedTuple):
    title: str
    schemes: tuple[str, ...]
    algorithms: tuple[str, ...]


MIXED = "mixed"
CANDIDATES = ("int2", "int2-g32", "int3", "int3-g32", "int4", "int4-g32", "int5", "int6")
"""Candidate schemes for the column "mixed", in every row."""

TABLES = (
    Table(
        "Integers in groups",
        ("int4", "int4-g64", "int4-g32", "int3", "int3-g64", "int3-g32", "int2", "int2-g64", "int2-g32"),
        ("rtn", "clip", "hqq", "gptq", "awq", "signround", "awq+signround", MIXED),
    ),
    Table("Rounded inputs", ("int8-dyn", "mxfp4", "nvfp4"), ("rtn", "smooth", "gptq", "awq+gptq")),
)
"""To add an algorithm to a table, add its name here."""

SCHEMES = tuple(scheme for table in TABLES for scheme in table.schemes)


@dataclasses.dataclass(frozen=True)
class AlgorithmRow:
    scheme: str
    algorithm: str
    perplexity: float | None
    """None if the algorithm refused, or there was nothing to choose."""
    change_percent: float | None


def algorithms_of(scheme: str) -> tuple[str, ...]:
    return next(table.algorithms for table in TABLES if scheme in table.schemes)


class Measurer:
    def __init__(self, yardstick: Yardstick) -> None:
        self.yardstick = yardstick
        self.batches = yardstick.batches

    @functools.cached_property
    def baseline(self) -> float:
        return self.yardstick.nll(copy.deepcopy(self.yardstick.base))

    def rows(self, scheme: str, names: tuple[str, ...] | None = None) -> Iterator[AlgorithmRow]:
        """Measure ``scheme`` with the algorithms ``names`` (default: those of its table)."""
        for name in algorithms_of(scheme) if names is None else names:
            model = self.quantized(scheme, name)
            if model is None:
                yield AlgorithmRow(scheme, name, None, None)
                continue
            value = self.yardstick.nll(model)
            yield AlgorithmRow(scheme, name, math.exp(value), change_percent(value, self.baseline))

    def quantized(self, scheme: str, name: str) -> Any:
        """Return a copy of the model, quantized to ``scheme`` by the algorithm ``name`` or :data:`MIXED`; None if the
        algorithm refuses, or there is nothing to choose."""
        recipe, by = (self._mixed(scheme), "gptq") if name == MIXED else (scheme, name)
        if recipe is None:
            return None
        model = copy.deepcopy(self.yardstick.base)
        data = self.batches if uses_data(by, recipe) else None
        report = quantize_(model, recipe, algorithm=by, calibrate=data, measure=False, progress=False)
        return model if {layer.algorithm for layer in report.quantized} == {by} else None

    def _mixed(self, scheme: str) -> Recipe | None:
        """Return a recipe no larger than the whole model in ``scheme``; None if that is already the smallest
        possible."""
        model = copy.deepcopy(self.yardstick.base)
        nbytes = sum(layer.bytes_after for layer in quantize_(model, scheme, measure=False, progress=False).quantized)
        least = sum(min(option.nbytes for option in each) for each in self._costs.options)
        return self._costs.recipe(nbytes=nbytes) if nbytes > least else None

    @functools.cached_property
    def _costs(self) -> Costs:
        base, batches = self.yardstick.base, self.batches
        return costs(base, CANDIDATES, calibrate=batches, algorithm="gptq", progress=False)


def as_markdown(data: dict[str, Any]) -> str:
    cells = {(row["scheme"], row["algorithm"]): _cell(row) for row in data["rows"]}
    parts = [INTRODUCTION.format(**data, candidates=", ".join(f"`{name}`" for name in CANDIDATES))]
    for table in TABLES:
        header = ("scheme", *table.algorithms)
        lines = [(scheme, *(cells[scheme, name] for name in table.algorithms)) for scheme in table.schemes]
        parts.append(f"## {table.title}\n\n{markdown(header, lines, words=range(len(header)))}\n")
    return "\n".join(parts)


def _cell(row: dict[str, Any]) -> str:
    return "-" if row["perplexity"] is None else f"{row['perplexity']:.4f} ({row['change_percent']:+.2f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory with eval.txt and calibration.txt")
    parser.add_argument("output", type=Path, help="where to write, without .json and .md")
    parser.add_argument("schemes", nargs="*", default=SCHEMES, help=f"default: {' '.join(SCHEMES)}")
    args = parser.parse_args()
    yardstick, record = Yardstick(args.model), args.output.with_suffix(".json")
    measurer = Measurer(yardstick)
    for scheme in args.schemes:
        made = [dataclasses.asdict(row) for row in _told(measurer.rows(scheme))]
        kept = [row for row in _kept(record) if row["scheme"] != scheme] + made
        kept.sort(key=lambda row: SCHEMES.index(row["scheme"]))
        data = {
            "model": args.model.as_posix(),
            "baseline": math.exp(measurer.baseline),
            "calibration": min(CALIBRATION_TOKENS, len(yardstick.calibration)),
            "rows": kept,
        }
        record.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if {(row["scheme"], row["algorithm"]) for row in kept} == {(s, name) for s in SCHEMES for name in algorithms_of(s)}:
        args.output.with_suffix(".md").write_text(as_markdown(data), encoding="utf-8")


def _kept(record: Path) -> list[dict[str, Any]]:
    """Read the rows of the record, again before each write: two processes can share the work."""
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"] if record.exists() else []
    return [row for row in rows if row["scheme"] in SCHEMES and row["algorithm"] in algorithms_of(row["scheme"])]


def _told(made: Iterator[AlgorithmRow]) -> Iterator[AlgorithmRow]:
    for row in made:
        print(row, file=sys.stderr)
        yield row


if __name__ == "__main__":
    main()
