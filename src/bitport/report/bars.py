"""Bar charts: the bytes of a model by scheme, before and after, and the layers with the largest error."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitport.report.html import WIDTH, Html, el, svg
from bitport.report.layer_map import about
from bitport.report.quantized import LayerReport, Report
from bitport.report.text import size

LABELS, TALL = 300, 26
SHOWN = 12
HUES = 8
"""Number of hues in the style sheet, hue-0 .. hue-7; "rest" is for bytes that no weight of the report accounts for."""
STAY = "not quantized"
REST = "all else"


def bytes_by_scheme(report: Report) -> dict[str, tuple[int, int]]:
    """Scheme, STAY or REST -> bytes (before, after), largest first, REST last."""
    found: dict[str, tuple[int, int]] = {}
    for layer in report.layers:
        if not layer.tied:
            before, after = found.get(layer.scheme or STAY, (0, 0))
            found[layer.scheme or STAY] = (before + layer.bytes_before, after + layer.bytes_after)
    ordered = dict(sorted(found.items(), key=lambda item: -item[1][0]))
    listed = [sum(both[at] for both in found.values()) for at in (0, 1)]
    rest = (max(0, report.bytes_before - listed[0]), max(0, report.bytes_after - listed[1]))
    return ordered | ({REST: rest} if any(rest) else {})


def size_bars(report: Report) -> list[Html]:
    """Two bars on one scale, divided by scheme, with a legend."""
    parts = bytes_by_scheme(report)
    hues = {name: f"hue-{at % HUES}" for at, name in enumerate(name for name in parts if name not in (STAY, REST))}
    hues |= {STAY: "stay", REST: "rest"}
    whole = max(report.bytes_before, report.bytes_after, 1)
    drawn = []
    for row, (what, total) in enumerate((("before", report.bytes_before), ("after", report.bytes_after))):
        y, x = 6 + row * 44, 70.0
        drawn.append(el("text", what, x=60, y=y + 21, text_anchor="end"))
        for name, both in parts.items():
            wide = (WIDTH - 190) * both[row] / whole
            title = el("title", f"{name} {what}: {size(both[row])}")
            if wide > 0:
                box = el("rect", x=x, y=y, width=max(wide, 1.0), height=32, class_=hues[name])
                drawn.append(el("g", title, box))
            x += wide
        drawn.append(el("text", size(total), x=x + 10, y=y + 21, class_="strong"))
    keys = [
        el("span", el("i", class_=f"swatch {hues[name]}"), f"{name}: {size(before)} → {size(after)}", class_="key")
        for name, (before, after) in parts.items()
    ]
    return [svg(WIDTH, 88, *drawn, label="bytes before and after"), el("p", *keys, class_="legend")]


def largest_errors(layers: Sequence[LayerReport], output: bool) -> Html:
    """Bars of the SHOWN layers with the largest error; a pale bar behind each shows that of rounding to nearest."""

    def errors(layer: LayerReport) -> tuple[float | None, float | None]:
        both = (layer.output_sqnr, layer.output_sqnr_rtn) if output else (layer.sqnr, layer.sqnr_rtn)
        return _part(both[0]), _part(both[1])

    worst = sorted((layer for layer in layers if errors(layer)[0]), key=lambda layer: -(errors(layer)[0] or 0))
    worst = worst[:SHOWN]
    per_part = (WIDTH - LABELS - 190) / max((each for layer in worst for each in errors(layer) if each), default=1.0)
    drawn = []
    for row, layer in enumerate(worst):
        error, nearest = errors(layer)
        y, wide, pale = row * TALL, (error or 0) * per_part, (nearest or 0) * per_part
        name = layer.name.removesuffix(".weight")
        shown = name if len(name) <= 42 else f"…{name[-41:]}"
        figure = f"{100 * (error or 0):.3g} %" + (f", to nearest {100 * nearest:.3g} %" if nearest else "")
        group = [
            el("title", about(layer)),
            *([el("rect", x=LABELS, y=y + 4, width=pale, height=TALL - 8, rx=3, class_="pale")] if nearest else []),
            el("text", shown, x=LABELS - 10, y=y + 17, text_anchor="end"),
            el("rect", x=LABELS, y=y + 4, width=wide, height=TALL - 8, rx=3, class_="bar"),
            el("text", figure, x=LABELS + max(wide, pale) + 10, y=y + 17),
        ]
        drawn.append(el("g", *group))
    return svg(WIDTH, TALL * len(worst) + 2, *drawn, label="the layers with the largest error")


def _part(sqnr: float | None) -> float | None:
    """An SQNR in dB as the norm of the error relative to the norm of the signal; None if unknown or infinite."""
    return None if sqnr is None or not math.isfinite(sqnr) else 10 ** (-sqnr / 20)
