"""Progress bar on standard error, by default only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from bitport.report.text import duration

T = TypeVar("T")

WATCHED_AFTER = 1.0
"""Seconds before the bar appears."""


def progress(items: Iterable[T], total: int, what: str, show: bool | None = None) -> Iterator[T]:
    """Yield ``items`` while drawing a bar. ``show`` None: only on a terminal, and only if the work takes long."""
    visible = sys.stderr.isatty() if show is None else show
    start = drawn = time.monotonic()
    shown = False
    for done, item in enumerate(items):
        yield item
        now = time.monotonic()
        if visible and (show or now - start > WATCHED_AFTER) and (now - drawn > 0.1 or done + 1 == total):
            left = (now - start) / (done + 1) * (total - done - 1)
            filled = "#" * (24 * (done + 1) // max(total, 1))
            line = f"{what} [{filled:<24}] {done + 1}/{total}, {duration(left)} left"
            print(f"\r{line:<72}", end="", file=sys.stderr, flush=True)
            drawn, shown = now, True
    if shown:
        print(file=sys.stderr)
