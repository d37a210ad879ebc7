"""Build HTML and SVG by function calls. Everything but markup made here is escaped, because names in checkpoints are
untrusted."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

STYLE = Path(__file__).with_name("style.css")
WIDTH = 950
"""Width of a picture in the style sheet's pixels, which fits a section."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: whatever a page contains, no script runs and nothing is fetched."""


class Html(str):
    """Markup; any other str is text and is escaped."""


def el(name: str, *content: object, **attributes: object) -> Html:
    """Make the element ``name``. In attribute names a trailing underscore is dropped and others become dashes
    (``class_``, ``text_anchor``); attributes that are None are omitted, floats are rounded to hundredths."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(content: Sequence[object]) -> Html:
    return Html("".join(item if isinstance(item, Html) else text(_plain(item)) for item in content))


def text(value: str) -> Html:
    """Escape ``value``. Unprintable characters (control characters, bidirectional marks, lone surrogates) are shown as
    Python escapes."""
    seen = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in value)
    return Html(html.escape(seen))


def document(title: str, *body: object) -> str:
    """A self-contained page: no script, no other file, no network; light or dark following the reader's system."""
    head = (
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="color-scheme" content="light dark">'),
        el("title", title),
        Html(f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"),
    )
    page = el("html", el("head", *head), "\n", el("body", el("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(title: str, *content: object, note: str = "") -> Html:
    return el("section", el("h2", title), *([el("p", note, class_="note")] if note else []), *content)


def tiles(figures: Sequence[tuple[str, str, str]]) -> Html:
    """Tiles from (label, figure, line below)."""
    made = (
        el("div", el("dt", what), el("dd", figure), el("dd", below, class_="below"), class_="tile")
        for what, figure, below in figures
    )
    return el("dl", *made, class_="tiles")


def rows(header: Sequence[str], body: Sequence[Sequence[object]], words: Sequence[str]) -> Html:
    """A table; columns whose header is not among ``words`` hold numbers and are right-aligned."""
    kinds = [None if name in words else "number" for name in header]
    head = el("tr", *(el("th", name, class_=kind, scope="col") for name, kind in zip(header, kinds, strict=True)))
    lines = (
        el("tr", *(el("td", cell, class_=kind) for cell, kind in zip(line, kinds, strict=True))) + Html("\n")
        for line in body
    )
    table = el("table", el("thead", head), el("tbody", *map(Html, lines)))
    return el("div", table, class_="scroll")


def folded(summary: str, *content: object) -> Html:
    return el("details", el("summary", summary), *content)


def code(content: str, label: str = "") -> Html:
    return el("figure", *([el("figcaption", label)] if label else []), el("pre", el("code", content)))


def svg(width: float, height: float, *content: object, label: str) -> Html:
    """An SVG picture; ``label`` describes it for screen readers."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {width:g} {height:g}"}
    made = el("svg", *content, **size, role="img", aria_label=label)
    return el("div", made, class_="picture")


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
