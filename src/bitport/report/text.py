"""Tables in plain text and in Markdown, and figures with their units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with columns padded to their widest cell and numbers right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(not isinstance(row[at], str) for row in rows) for at in range(len(header))]
    lines = [[*header], ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown(header: Sequence[object], rows: Iterable[Sequence[object]], words: Collection[int] = (0,)) -> str:
    """Format a Markdown table. ``words``: the columns that hold text; all others hold numbers, which are
    right-aligned."""
    marks = ["---" if at in words else "---:" for at in range(len(header))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (header, marks, *rows))


def size(nbytes: int) -> str:
    """Format a size in powers of 1000: 1234567 -> '1.2 MB'."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(amount, 1) < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """Format a duration in at most two units: 5400 -> '1 h 30 min'."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def decibels(error: float | None, nearest: float | None = None) -> str:
    """Format an SQNR, beside that of rounding to nearest if given; empty if it is not known."""
    if error is None:
        return ""
    return f"{error:.1f} dB" if nearest is None else f"{error:.1f} dB (rtn {nearest:.1f})"
