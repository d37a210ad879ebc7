"""Line charts with logarithmic axes as hand-written SVG: small, and deterministic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 34, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a6761d", "#7570b3", "#e6ab02", "#666666")


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), both greater than 0."""
    kind: str
    """How it is drawn: "ours" strong, "peer" light, "base" black, "limit" grey and dashed."""


STYLES = {"ours": (2.4, ""), "peer": (1.1, ""), "base": (2.4, ""), "limit": (1.6, "6 4")}


def chart(title: str, x_name: str, y_name: str, lines: Iterable[Line]) -> str:
    lines = [line for line in lines if line.points]
    xs = _Axis([x for line in lines for x, _ in line.points], LEFT, WIDTH - RIGHT)
    ys = _Axis([y for line in lines for _, y in line.points], HEIGHT - BOTTOM, TOP)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title, size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, anchor="middle"),
        _text(LEFT, TOP - 4, y_name, anchor="end"),
    ]
    for value in xs.ticks(base=2):
        at = xs(value)
        drawn += [_rule(at, TOP, at, HEIGHT - BOTTOM), _text(at, HEIGHT - BOTTOM + 14, f"{value:g}", anchor="middle")]
    for value in ys.ticks(base=10):
        at = ys(value)
        drawn += [_rule(LEFT, at, WIDTH - RIGHT, at), _text(LEFT - 6, at + 4, f"{value:g}", anchor="end")]
    for line, colour in zip(lines, _colours(lines), strict=True):
        drawn.append(_polyline([(xs(x), ys(y)) for x, y in line.points], line.kind, colour))
    for at, (line, colour) in enumerate(sorted(zip(lines, _colours(lines), strict=True), key=_height)):
        y = TOP + 8 + 16 * at
        drawn.append(_polyline([(WIDTH - RIGHT + 14, y), (WIDTH - RIGHT + 40, y)], line.kind, colour))
        drawn.append(_text(WIDTH - RIGHT + 46, y + 4, line.name))
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _height(pair: tuple[Line, str]) -> float:
    """Sort key that orders the legend like the ends of the lines, from top to bottom."""
    return -pair[0].points[-1][1]


def _colours(lines: Iterable[Line]) -> list[str]:
    fixed = {"base": "#000000", "limit": "#888888"}
    own = iter(colour for _ in range(9) for colour in COLOURS)
    return [fixed[line.kind] if line.kind in fixed else next(own) for line in lines]


class _Axis:
    """A logarithmic scale from values to positions."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self._low, self._high = min(values, default=1.0), max(values, default=10.0)
        if self._low == self._high:
            self._low, self._high = self._low / 2, self._high * 2
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        part = math.log(value / self._low) / math.log(self._high / self._low)
        return self._first + part * (self._last - self._first)

    def ticks(self, base: int) -> list[float]:
        low, high = math.ceil(math.log(self._low, base) - 1e-9), math.floor(math.log(self._high, base) + 1e-9)
        return [float(base) ** power for power in range(low, high + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#e4e4e4"/>'


def _polyline(points: Sequence[tuple[float, float]], kind: str, colour: str) -> str:
    width, dashes = STYLES[kind]
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'
