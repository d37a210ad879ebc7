"""The HTML page of a report of quantize_, to read and to share."""

from __future__ import annotations

import json
import re
import statistics

import torch

from bitport.report.bars import largest_errors, size_bars
from bitport.report.html import Html, code, document, el, folded, rows, section, tiles
from bitport.report.layer_map import Scale, error_of, heat_maps, legend
from bitport.report.quantized import LayerReport, Report, count
from bitport.report.text import decibels, size
from bitport.report.versions import library_version
from bitport.schemes import Recipe, Rule
from bitport.schemes.recipe import DEFAULT_KINDS

OUTPUT_NOTE = (
    "Signal to noise of each layer's output over the data it was shown, in dB: how large the output is against what "
    "quantization changes in it. 20 dB is a tenth, 40 dB a hundredth. Hover over a cell for its figures."
)
WEIGHT_NOTE = (
    "Signal to noise of each weight, in dB: how large it is against what rounding changes in it. 20 dB is a tenth, "
    "40 dB a hundredth. Hover over a cell for its figures."
)
LARGEST_NOTE = (
    "Where a few more bits help most: the norm of the error as a part of the norm of the {what}. Pale: rounding to "
    "nearest, where another algorithm was used."
)

WORDS = ("why", "note", "weight", "weights", "scheme", "algorithm")
"""Columns of text, not numbers."""
CLASSES = re.compile(r"\b(\w+)\(")
"""Class names in the Python expression of an algorithm."""


def page(report: Report, title: str = "", command: str = "", perplexity: tuple[float, float] | None = None) -> str:
    schemes = list(dict.fromkeys(layer.scheme for layer in report.quantized if layer.scheme))
    how = f" by {report.algorithm}" if report.algorithm not in ("", "rtn") else ""
    shown = f"{', '.join(schemes) or 'nothing quantized'}{how}"
    return document(
        title or "Quantization report",
        heading(title or "Quantization report", shown),
        tiles(figures(report, perplexity)),
        *sizes(report),
        *errors(report),
        *left(report),
        *again(report, command),
        every_weight(report),
        footer(),
    )


def heading(title: str, below: str) -> Html:
    return el("header", el("div", "bitport", class_="brand"), el("h1", title), el("p", below))


def footer() -> Html:
    return el(
        "footer", f"bitport {library_version()}, PyTorch {torch.__version__}. SQNR: signal to quantization noise."
    )


def figures(report: Report, perplexity: tuple[float, float] | None = None) -> list[tuple[str, str, str]]:
    ratio = report.bytes_before / max(report.bytes_after, 1)
    found = [
        ("Size", size(report.bytes_after), f"from {size(report.bytes_before)}, {ratio:.2f} times smaller"),
        ("Quantized", f"{count(report.quantized)}", f"weights; {count(report.skipped)} left as they are"),
    ]
    if perplexity is not None:
        before, after = perplexity
        found.append(("Perplexity", f"{after:.4f}", f"from {before:.4f}, {100 * (after / before - 1):+.2f} %"))
    for what, errors in (("weights", _measured(report, False)), ("outputs", _measured(report, True))):
        if errors:
            middle = statistics.median(errors)
            found.append((f"SQNR of {what}", f"{middle:.1f} dB", f"median; the lowest {min(errors):.1f} dB"))
    both = [(layer.output_sqnr, layer.output_sqnr_rtn) for layer in report.quantized]
    gains = [
        0.0 if ours == nearest else ours - nearest  # also if both are exact, i.e. infinite
        for ours, nearest in both
        if ours is not None and nearest is not None
    ]
    if gains:
        found.append(("Gain", f"{statistics.median(gains):+.1f} dB", "over rounding to nearest; outputs, median"))
    return found


def sizes(report: Report) -> list[Html]:
    return [section("Where the bytes are", *size_bars(report))]


def errors(report: Report) -> list[Html]:
    """Heat maps of outputs and of weights, if measured, and the largest errors of the first of these."""
    made = []
    for output in (True, False):
        if _measured(report, output):
            made.append(error_map(report, output, Scale.of(report.quantized, output)))
    if made:
        by_output = bool(_measured(report, True))
        note = LARGEST_NOTE.format(what="output" if by_output else "weight")
        made.insert(1, section("The largest errors", largest_errors(report.quantized, by_output), note=note))
    return made


def error_map(report: Report, output: bool, scale: Scale, title: str = "") -> Html:
    kept = any(not layer.scheme for layer in report.layers)
    unknown = any(error_of(layer, output) is None for layer in report.quantized)
    maps = heat_maps(report.layers, output, scale)
    what = title or f"Error of {'outputs' if output else 'weights'}, layer by layer"
    return section(what, legend(scale, kept, unknown), *maps, note=OUTPUT_NOTE if output else WEIGHT_NOTE)


def left(report: Report) -> list[Html]:
    """Unquantized weights by reason, and quantized ones with a note because they were treated other than requested."""
    made = []
    skipped = [(layer.reason, layer) for layer in report.skipped]
    noted = [(layer.note, layer) for layer in report.quantized if layer.note]
    for title, column, told in (("Left as they are", "why", skipped), ("Notes", "note", noted)):
        groups: dict[str, list[LayerReport]] = {}
        for why, layer in told:
            groups.setdefault(why, []).append(layer)
        if groups:
            body = [(why, _names(layers), len(layers), size(_bytes(layers))) for why, layers in groups.items()]
            made.append(section(title, rows((column, "weights", "number", "size"), body, WORDS)))
    return made


def again(report: Report, command: str) -> list[Html]:
    """How to reproduce the result: the command line, the Python code, the recipe."""
    made = [code(command, "Command line")] if command else []
    if report.recipe:
        made += [code(python_of(report), "Python"), code(readable(report.recipe), "Recipe, a file for --recipe")]
    return [section("How to do it again", *made)] if made else []


def python_of(report: Report) -> str:
    """Python code that calls quantize_; only the calibration data must be filled in."""
    recipe, by = Recipe.from_json(report.recipe), report.algorithm
    rule = recipe.rules[0]
    single = len(recipe.rules) == 1 and rule == Rule("*", rule.scheme, DEFAULT_KINDS) and _named(rule) != "custom"
    given = f'"{rule.scheme}"' if single else 'bp.Recipe.from_json(Path("recipe.json").read_text())'
    lines = ["from pathlib import Path", ""] if not single else []
    lines.append("import bitport as bp")
    if "(" not in by:
        by = f'"{by}"'
    else:
        lines.append(f"from bitport.algorithms import {', '.join(sorted(set(CLASSES.findall(by))))}")
    by = "" if by in ('""', '"rtn"') else f", algorithm={by}"
    static = any(not isinstance(each.scheme, str) and each.scheme.static for each in recipe.rules)
    with_data = static or any(layer.output_sqnr is not None for layer in report.quantized)
    return "\n".join([*lines, "", f"bp.quantize_(model, {given}{by}{', calibrate=batches' if with_data else ''})"])


def readable(recipe: str) -> str:
    """The recipe as JSON, with schemes given by name where they have one; equivalent for Recipe.from_json."""
    rules = []
    for rule in Recipe.from_json(recipe).rules:
        scheme = rule.scheme if isinstance(rule.scheme, str) else rule.scheme.to_dict()
        named = _named(rule)
        said = scheme if named == "custom" else named
        rules.append({"match": rule.match, "scheme": said, "kinds": None if rule.kinds is None else [*rule.kinds]})
    lines = ",\n  ".join(json.dumps(rule) for rule in rules)
    return f'{{"version": {json.loads(recipe)["version"]}, "rules": [\n  {lines}\n]}}'


def every_weight(report: Report) -> Html:
    by = any(layer.algorithm not in (None, "rtn") for layer in report.layers)
    outputs = any(layer.output_sqnr is not None for layer in report.layers)
    columns = {
        "weight": [layer.name for layer in report.layers],
        "scheme": [layer.scheme or "-" for layer in report.layers],
        "algorithm": [layer.algorithm or "-" for layer in report.layers] if by else [],
        "before": [size(layer.bytes_before) for layer in report.layers],
        "after": [size(layer.bytes_after) for layer in report.layers],
        "SQNR": [decibels(layer.sqnr) for layer in report.layers],
        "to nearest": [decibels(layer.sqnr_rtn) for layer in report.layers] if by else [],
        "output": [decibels(layer.output_sqnr) for layer in report.layers] if outputs else [],
        "output to nearest": [decibels(layer.output_sqnr_rtn) for layer in report.layers] if outputs and by else [],
        "why": [layer.why for layer in report.layers],
    }
    kept = {name: cells for name, cells in columns.items() if cells}
    table = rows(list(kept), list(zip(*kept.values(), strict=True)), WORDS)
    return section("Every weight", folded(f"{len(report.layers)} weights", table))


def _measured(report: Report, output: bool) -> list[float]:
    found = [error_of(layer, output) for layer in report.quantized]
    return [error for error in found if error is not None]


def _names(layers: list[LayerReport], limit: int = 6) -> Html:
    names = [layer.name for layer in layers]
    if len(names) <= limit:
        return el("span", ", ".join(names))
    return folded(f"{names[0]} .. {names[-1]}", ", ".join(names))


def _bytes(layers: list[LayerReport]) -> int:
    return sum(layer.bytes_before for layer in layers if not layer.tied)


def _named(rule: Rule) -> str:
    return rule.scheme if isinstance(rule.scheme, str) else rule.scheme.name
