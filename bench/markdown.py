"""Markdown tables for the pages of figures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(header: Sequence[object], rows: Iterable[Sequence[object]], words: Collection[int] = (0,)) -> str:
    """``words``: the columns that hold text; all others hold numbers, which are right-aligned."""
    marks = ["---" if at in words else "---:" for at in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, marks, *rows))
