"""Sizes of blocks, and from how many rows on which kernel runs: tables, one per architecture.

``configs/<architecture>.json`` in the package holds those that were measured, ``default.json`` stands for all others:
sizes that fit the memory of every matrix unit that Triton compiles for, without a claim to be the best on any. ::

    programs    how many programs keep the device busy: K is split where a product has fewer
    gemv        blocks of the kernel without matrix units
    tiles       blocks by rows: the first entry that has as many (null: any)
    most_rows   kernel -> kind of weight (* for the others) -> the most rows for which it runs, null for any number
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch

from bitport.ops import Weight

VERSION = 1
FOLDER = Path(__file__).parent / "configs"
Blocks: TypeAlias = dict[str, int]


class Config:
    def __init__(self, content: dict[str, Any]) -> None:
        self.programs: int = content["programs"]
        self.gemv: Blocks = content["gemv"]
        self._tiles: list[Blocks] = content["tiles"]
        self._most_rows: dict[str, dict[str, int | None]] = content["most_rows"]

    def tiles(self, rows: int) -> Blocks:
        return next(each for each in self._tiles if each["rows"] is None or rows <= each["rows"])

    def most_rows(self, kernel: str, weight: Weight) -> int | None:
        known = self._most_rows.get(kernel, {"*": None})
        return known.get(kind(weight), known["*"])


def kind(weight: Weight) -> str:
    """What the speed depends on beside the size: the number type, and whether scales are per row."""
    return f"{weight.dtype}/{'row' if weight.block_k >= weight.k else 'group'}"


def read(name: str) -> Config:
    return Config(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


@functools.cache
def of(device: torch.device) -> Config:
    return read("default")
