"""The page of the record; every figure is computed from it, and from the records of the small model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.real.plan import ALGORITHMS, GRIDS, MSE, NEAREST, OWN, PLAN, REFERENCE_ALGORITHMS, SCHEMES
from bench.real.sources import ARTICLES, GGUF, MANUAL, MODEL, NEWS
from bitport.evaluate.compare import BASELINE
from bitport.evaluate.stretches import STRETCH, Estimate, estimate
from bitport.report.text import markdown, size

DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = DOCS / "accuracy-real.json", DOCS / "accuracy-real.md"

SOURCES = (
    (f"the model, `{GGUF.rpartition('/')[2]}`", f"{MODEL.package} {MODEL.version}", MODEL.sha256),
    (f"news, `{ARTICLES.rpartition('/')[2]}`", f"{NEWS.package} {NEWS.version}", NEWS.sha256),
    ("documentation, in docstrings", f"{MANUAL.package} {MANUAL.version}", MANUAL.sha256),
)

INTRODUCTION = """# Accuracy of a published model

SmolLM2-135M-Instruct in each scheme and by each algorithm, on {tokens} tokens of news and of documentation in turn, in
windows of 512. The figures in [accuracy.md](accuracy.md) and [algorithms.md](algorithms.md) are those of tinylm, 6
million parameters trained on simple sentences. Here one sees how far they hold for a model of 135 million that was
trained on text of all kinds.

- **change** of the perplexity against bf16, **KL** divergence from it in nats per token, **top-1** agreement with it:
  [what they are](evaluation.md). KL has the smallest error, so rows are best compared by it.
- **±** is the standard error of what is before it. Models are compared on the same stretches of {stretch} tokens, which
  are taken as independent. It tells how far another text of these kinds could differ, not another model.
- **tinylm** is the change of the small model, on its own text.
- Size and bits per weight count all parameters, also those that stay in bf16: mostly the embedding, which is the output
  head too, and a larger part of this model than of large ones.

Everything is computed in float32. `make accuracy-real` writes this page. Model and texts are from wheels of PyPI, whose
versions and SHA-256 it checks:

{sources}

## A model that was rounded before

PyPI has this model only as a GGUF file in Q4_1: four bits in groups of 32, with a scale and a minimum in float16.
"bf16" is what that file holds, in bf16; what the model lost before does not count. A scheme with the same grid loses
nothing again, which says nothing about a model that was never rounded. So here is how much of the weights each scheme
keeps, rounded to nearest: the SQNR in dB, the median over the linear layers. Beside it the same of tinylm, whose
weights were not rounded before, and of normally distributed numbers.

{grid}

`{own}` is the grid of the file: that row checks the measurement and means nothing else. All other schemes have
other steps, and where the first column is near the last, the old grid does not help them. It may hurt `int4-g32`: its
groups and steps are those of the file, but its zero points are integers, so all weights of a group move alike, by up to
half a step. Such errors do not cancel each other in a product as those of single weights do. Judge that scheme by
other models.
"""

SCHEMES_HEADING = """## Schemes

Weights are rounded to nearest. From the smallest KL to the largest; the last column says by how much the KL is above
that of the row before, on the same stretches. Spearman's rank correlation of the KL with tinylm's changes:
{correlation}.
"""

ALGORITHMS_HEADING = """## Algorithms

`rtn` rounds to nearest, `clip` and `hqq` need no data, and the others see {calibration} tokens of the same kinds of
text, which share no passage with the evaluation; [what they do](algorithms.md). The last column is the difference of
the KL from that of rounding to nearest, on the same stretches. `mixed` is quantized by `gptq`, and no larger than the
scheme.
"""

REFERENCE_HEADING = """## Beside llm-compressor

Its own pipelines ({versions}) on the same model and the same {calibration} tokens, and what is closest to them here.
Groups of 64, as it refuses weights whose width is no multiple of the group. "mse" is its search for ranges before GPTQ,
which GPTQ has here. The last column is the KL here minus that of llm-compressor, on the same stretches.
`make accuracy-real-reference` measures this table.
"""

MISSING = """## Not measured yet

{missing}. `make accuracy-real` measures them.
"""

PARTS = ("rows", "reference")
"""What is measured of bitport, and of llm-compressor."""

Row = dict[str, Any]
Name = tuple[str, str]


def as_markdown(data: dict[str, Any]) -> str:
    """The page, with the rows that the record has."""
    rows = {(row["scheme"], row["algorithm"]): row for row in data["rows"]}
    small = tinylm()
    sources = markdown(("from", "wheel", "SHA-256"), SOURCES, words=range(3))
    heading = INTRODUCTION.format(
        tokens=data["tokens"], stretch=STRETCH, sources=sources, grid=_grid(data["sqnr"]), own=OWN
    )
    names = sorted(((s, NEAREST) for s in SCHEMES if (s, NEAREST) in rows), key=lambda name: _kl(rows[name]).mean)
    both = [name for name in names if name in small and name[0] != BASELINE]
    correlation = spearman([_kl(rows[name]).mean for name in both], [small[name] for name in both])
    parts = [heading, SCHEMES_HEADING.format(correlation=f"{correlation:.2f} over {len(both)} schemes")]
    parts.append(_schemes(names, rows, small))
    parts.append(ALGORITHMS_HEADING.format(**data))
    for scheme, algorithms in ALGORITHMS.items():
        found = [(scheme, each) for each in (NEAREST, *algorithms) if (scheme, each) in rows]
        parts += [f"### {scheme}", _algorithms(found, rows, small)]
    if data["reference"]:
        versions = ", ".join(f"{package} {found}" for package, found in data["reference"][0]["versions"].items())
        parts += [REFERENCE_HEADING.format(**data, versions=versions), _reference(data["reference"], rows)]
    if missing := [f"`{scheme}` by `{algorithm}`" for scheme, algorithm in PLAN if (scheme, algorithm) not in rows]:
        parts.append(MISSING.format(missing=", ".join(missing)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def as_record(data: dict[str, Any]) -> str:
    """The record as JSON, one row per line."""
    text = json.dumps({**data, **dict.fromkeys(PARTS)}, indent=1)
    for part in PARTS:
        rows = ",\n".join(f"  {json.dumps(row)}" for row in data[part])
        text = text.replace(f'"{part}": null', f'"{part}": [\n{rows}\n ]')
    return text + "\n"


def tinylm() -> dict[Name, float]:
    """The changes in percent that the pages on the small model record, by scheme and algorithm."""
    found = {}
    for name in ("algorithms", "accuracy"):
        for row in json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
            if row["change_percent"] is not None:
                found[row["scheme"], row.get("algorithm", NEAREST)] = row["change_percent"]
    return found


def spearman(some: Sequence[float], others: Sequence[float]) -> float:
    """The correlation of the ranks, without ties."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort() for values in (some, others)]
    return float(torch.corrcoef(torch.stack(ranks).double())[0, 1])


def _schemes(names: Sequence[Name], rows: dict[Name, Row], small: dict[Name, float]) -> str:
    header = ("scheme", "size", "bits/weight", *FIGURES, "tinylm", "KL above the row before")
    base, before, lines = rows[BASELINE, NEAREST], None, []
    for name in names:
        row = rows[name]
        above = "" if before is None else _signed(estimate(row["kl"], before["kl"]), 5)
        bits = f"{8 * row['nbytes'] / row['weights']:.2f}"
        lines.append((name[0], size(row["nbytes"]), bits, *_figures(row, base), _percent(small.get(name)), above))
        before = None if name[0] == BASELINE else row
    return markdown(header, lines, words=range(len(header)))


def _algorithms(names: Sequence[Name], rows: dict[Name, Row], small: dict[Name, float]) -> str:
    header = ("algorithm", *FIGURES, "tinylm", "KL against rtn")
    base, lines = rows[BASELINE, NEAREST], []
    for name in names:
        scheme, algorithm = name
        less = "" if algorithm == NEAREST else _signed(estimate(rows[name]["kl"], rows[scheme, NEAREST]["kl"]), 4)
        lines.append((algorithm, *_figures(rows[name], base), _percent(small.get(name)), less))
    return markdown(header, lines, words=range(len(header)))


def _reference(references: Sequence[Row], rows: dict[Name, Row]) -> str:
    header = ("scheme", "here", "KL", "llm-compressor", "KL", "difference")
    lines = []
    for each in references:
        if not (own := rows.get((each["scheme"], REFERENCE_ALGORITHMS[each["algorithm"]]))):
            continue
        apart = _signed(estimate(own["kl"], each["kl"]), 4)
        names = (own["algorithm"], _size(_kl(own)), each["algorithm"].replace(MSE, "mse, "), _size(_kl(each)))
        lines.append((each["scheme"], *names, apart))
    return markdown(header, lines, words=range(len(header)))


FIGURES = ("perplexity", "change", "KL", "top-1")


def _figures(row: Row, base: Row) -> Iterator[str]:
    perplexity = math.exp(estimate(row["nll"]).mean)
    yield f"{perplexity:.{3 if perplexity < 1000 else 0}f}"
    if row is base:
        yield from ("", "", "")
        return
    apart = estimate(row["nll"], base["nll"])
    ratio = math.exp(apart.mean)
    change = Estimate(100 * (ratio - 1), 100 * ratio * apart.error)  # d exp(x) = exp(x) dx
    yield f"{_signed(change, 2 if ratio < 10 else 0)} %"
    kl, agree = _kl(row), estimate(row["top1"])
    yield _size(kl)
    yield f"{100 * agree.mean:.1f} ± {100 * agree.error:.1f} %"


def _kl(row: Row) -> Estimate:
    return estimate(row["kl"])


def _size(value: Estimate) -> str:
    return f"{value.mean:.5f} ± {value.error:.5f}"


def _signed(value: Estimate, digits: int) -> str:
    return f"{value.mean:+.{digits}f} ± {value.error:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f} %"


def _grid(sqnr: dict[str, Sequence[float]]) -> str:
    header = ("scheme", "this model", "tinylm", "normal numbers")
    lines = [(scheme, *(f"{each:.1f}" for each in sqnr[scheme])) for scheme in GRIDS]
    return markdown(header, lines, words=range(len(header)))
