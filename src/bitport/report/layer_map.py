"""Heat map of a model's errors: one column per block, one row per kind of weight in it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from bitport.report.html import WIDTH, Html, el, svg
from bitport.report.quantized import LayerReport

SHADES = 10
"""Number of shades in the style sheet: shade-0 is the best, shade-9 the worst."""
LEAST_SPAN = 6.0
"""Minimum range of the scale in dB, so that layers with similar errors look similar."""
LABELS, TALL = 210, 26
WIDEST, WITH_FIGURE, NARROWEST = 62, 29, 7


def error_of(layer: LayerReport, output: bool) -> float | None:
    return layer.output_sqnr if output else layer.sqnr


@dataclasses.dataclass(frozen=True)
class Scale:
    low: float
    high: float

    @classmethod
    def of(cls, layers: Iterable[LayerReport], output: bool) -> Scale:
        """The range of the errors of weights in blocks, if there are any: an embedding with more bits would use up all
        the shades. Values outside the range are clamped to the first or last shade."""
        known = [(place_of(layer.name).block, error_of(layer, output)) for layer in layers]
        finite = [(block, error) for block, error in known if error is not None and math.isfinite(error)]
        inside = [error for block, error in finite if block is not None] or [error for _, error in finite] or [0.0]
        low, high = min(inside), max(inside)
        spare = max(0.0, LEAST_SPAN - (high - low)) / 2
        return cls(low - spare, high + spare)

    def shade(self, value: float) -> int:
        if not math.isfinite(value):
            return 0 if value > 0 else SHADES - 1
        part = (self.high - value) / (self.high - self.low)
        return min(SHADES - 1, max(0, int(part * SHADES)))


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a weight: ``model.layers.3.mlp.up_proj.weight`` is row ``mlp.up_proj`` of block 3 in
    ``model.layers``. Numbers after the first are experts, which share a cell. A name without numbers has block None."""

    stack: str
    block: int | None
    kind: str


def place_of(name: str) -> Place:
    parts = name.removesuffix(".weight").split(".")
    at = next((at for at, part in enumerate(parts) if re.fullmatch(r"[0-9]{1,6}", part)), None)
    if at is None:
        return Place("", None, ".".join(parts))
    kind = ".".join("*" if re.fullmatch(r"[0-9]+", part) else part for part in parts[at + 1 :])
    return Place(".".join(parts[:at]), int(parts[at]), kind or "weight")


def heat_maps(layers: Sequence[LayerReport], output: bool, scale: Scale) -> list[Html]:
    """One heat map per stack of blocks; weights outside of blocks come last, one row each."""
    stacks: dict[str | None, list[tuple[Place, LayerReport]]] = {}
    for layer in layers:
        place = place_of(layer.name)
        stacks.setdefault(None if place.block is None else place.stack, []).append((place, layer))
    single = stacks.pop(None, [])
    maps = [_stack(stack or "", placed, output, scale) for stack, placed in stacks.items()]
    return [*maps, *([_single(single, output, scale)] if single else [])]


def _stack(stack: str, placed: list[tuple[Place, LayerReport]], output: bool, scale: Scale) -> Html:
    cells: dict[tuple[str, int | None], list[LayerReport]] = {}
    for place, layer in placed:
        cells.setdefault((place.kind, place.block), []).append(layer)
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    blocks = sorted({block for _, block in cells if block is not None})
    wide = max(NARROWEST, min(WIDEST, (WIDTH - LABELS) / len(blocks)))
    drawn: list[Html] = []
    every = math.ceil(24 / wide)
    for at, block in enumerate(blocks):
        if at % every == 0:
            drawn.append(_label(LABELS + (at + 0.5) * wide, 14, str(block), "middle", class_="axis"))
    for row, kind in enumerate(kinds):
        y = 22 + row * TALL
        drawn.append(_label(LABELS - 10, y + TALL / 2 + 4, kind, "end"))
        for at, block in enumerate(blocks):
            if here := cells.get((kind, block)):
                drawn.append(_cell(LABELS + at * wide, y, wide, here, output, scale))
    caption = el("h3", stack or "blocks")
    width = LABELS + wide * len(blocks)
    return el("div", caption, svg(width, 26 + TALL * len(kinds), *drawn, label=f"error by block and kind, {stack}"))


def _single(placed: list[tuple[Place, LayerReport]], output: bool, scale: Scale) -> Html:
    drawn = []
    for row, (place, layer) in enumerate(placed):
        y = row * TALL
        drawn.append(_label(LABELS - 10, y + TALL / 2 + 4, place.kind, "end"))
        drawn.append(_cell(LABELS, y, WIDEST, [layer], output, scale))
    drawing = svg(LABELS + WIDEST, TALL * len(placed) + 4, *drawn, label="error of weights outside of blocks")
    return el("div", el("h3", "outside of blocks"), drawing)


def _cell(x: float, y: float, wide: float, layers: list[LayerReport], output: bool, scale: Scale) -> Html:
    """A cell, shaded by the worst of ``layers``."""
    known = [(found, layer) for layer in layers if (found := error_of(layer, output)) is not None]
    if known:
        worst = min(known, key=lambda pair: pair[0])
        kind, told, figure = f"shade-{scale.shade(worst[0])}", worst[1], _figure(worst[0])
    else:
        kind, told, figure = "unknown" if layers[0].scheme else "kept", layers[0], ""
    more = f"\nthe worst of {len(layers)}" if len(layers) > 1 else ""
    gap = 1.0 if wide > 12 else 0.4
    box = el("rect", x=x + gap, y=y + 1.0, width=wide - 2 * gap, height=TALL - 2.0, rx=min(4.0, wide / 6))
    drawn = [el("title", f"{about(told)}{more}"), box]
    if figure and wide >= WITH_FIGURE:
        drawn.append(_label(x + wide / 2, y + TALL / 2 + 4, figure, "middle"))
    return el("g", *drawn, class_=f"cell {kind}")


def about(layer: LayerReport) -> str:
    """All known facts about a layer, one per line."""
    lines = [layer.name, f"{layer.scheme or 'not quantized'}{f' by {layer.algorithm}' if layer.algorithm else ''}"]
    for what, error, nearest in (
        ("weight", layer.sqnr, layer.sqnr_rtn),
        ("output", layer.output_sqnr, layer.output_sqnr_rtn),
    ):
        if error is not None:
            beside = "" if nearest is None else f", to nearest {_figure(nearest)}"
            lines.append(f"SQNR of the {what}: {_figure(error)} dB{beside}")
    return "\n".join([*lines, *([layer.why] if layer.why else [])])


def legend(scale: Scale, kept: bool, unknown: bool) -> Html:
    """The shades from worst to best, with the ends of the scale in dB."""
    boxes = [el("span", class_=f"swatch shade-{shade}") for shade in reversed(range(SHADES))]
    ends = (f"{scale.low:.1f} dB", f"{scale.high:.1f} dB: closer to the original")
    extra = [el("span", el("i", class_="swatch kept"), "not quantized", class_="key")] if kept else []
    extra += [el("span", el("i", class_="swatch unknown"), "not measured", class_="key")] if unknown else []
    return el("p", ends[0], " ", el("span", *boxes, class_="ramp"), " ", ends[1], *extra, class_="legend")


def _figure(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "lost"


def _label(x: float, y: float, content: str, anchor: str, **more: object) -> Html:
    shown = content if len(content) <= 30 else f"{content[:8]}…{content[-20:]}"
    title = [el("title", content)] if shown != content else []
    return el("text", *title, shown, x=x, y=y, text_anchor=anchor, **more)
