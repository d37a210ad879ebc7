"""Scatter plot of models: size on the x axis, distance from the original on the y axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bitport.report.bars import HUES
from bitport.report.html import WIDTH, Html, el, svg
from bitport.report.text import size

HEIGHT = 340
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 18, 44


def scatter(points: Sequence[tuple[str, int, float]], what: str) -> Html:
    """Plot ``points``: (name, bytes, value of at least 0). Both axes start at 0, so that half as high is half as
    far."""
    widest = max(nbytes for _, nbytes, _ in points) * 1.05
    highest = max(value for _, _, value in points) * 1.12 or 1.0
    drawn = []
    for tick in ticks(highest):
        y = _y(tick, highest)
        drawn.append(el("line", x1=LEFT, y1=y, x2=WIDTH - RIGHT, y2=y, class_="grid"))
        drawn.append(el("text", f"{tick:g}", x=LEFT - 8, y=y + 4, text_anchor="end", class_="axis"))
    for tick in ticks(widest):
        x = _x(tick, widest)
        drawn.append(el("text", size(round(tick)), x=x, y=HEIGHT - BOTTOM + 20, text_anchor="middle", class_="axis"))
    drawn.append(el("text", what, x=LEFT, y=TOP - 6, class_="axis"))
    drawn.append(el("text", "size", x=WIDTH - RIGHT, y=HEIGHT - 6, text_anchor="end", class_="axis"))
    for at, (name, nbytes, value) in enumerate(points):
        x, y = _x(nbytes, widest), _y(value, highest)
        dot = el("circle", cx=x, cy=y, r=7, class_=f"hue-{at % HUES}")
        label = name if len(name) <= 26 else f"…{name[-25:]}"
        drawn.append(
            el(
                "g",
                el("title", f"{name}\n{size(nbytes)}\n{what} {value:.5g}"),
                dot,
                el("text", label, x=x + 12, y=y + 4),
            )
        )
    return svg(WIDTH, HEIGHT, *drawn, label=f"{what} against size")


def ticks(high: float, wanted: int = 5) -> list[float]:
    """Return 0 and multiples of 1, 2 or 5 times a power of ten, up to ``high``."""
    step = 10 ** math.floor(math.log10(high / wanted))
    step *= next(factor for factor in (1, 2, 5, 10) if high / (step * factor) <= wanted)
    return [at * step for at in range(int(high / step) + 1)]


def _x(value: float, high: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / high


def _y(value: float, high: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / high
