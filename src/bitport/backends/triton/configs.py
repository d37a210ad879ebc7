"""Sizes of blocks, and from how many rows on which kernel runs: a table for each architecture.

``configs/<architecture>.json`` in the package holds one, ``default.json`` stands for every other: sizes that fit the
memory of each matrix unit that Triton compiles for, not measured on any. What ``bitport tune`` measured, in the user's
cache folder, comes before both. ::

    programs    how many programs keep the device busy: K is split where a product has fewer
    gemv        blocks of the kernel without matrix units
    tiles       blocks by rows: the first entry that has as many (null: any number)
    most_rows   kernel -> kind of weight (* for the others) -> the most rows for which it runs (null: any number)
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton

from bitport.backends import measured
from bitport.ops import Weight

VERSION = 1
FOLDER = Path(__file__).parent / "configs"
DEFAULT = "default"
Blocks: TypeAlias = dict[str, int]
FIELDS = ("BN", "BK", "num_warps", "num_stages")


class Config:
    def __init__(self, content: dict[str, Any], float8: bool = False) -> None:
        """``float8``: the device multiplies float8_e4m3 as such."""
        self.content, self.float8 = content, float8
        self.programs: int = content["programs"]
        self.gemv: Blocks = content["gemv"]
        self._tiles: list[dict[str, Any]] = content["tiles"]
        self._most_rows: dict[str, dict[str, int | None]] = content["most_rows"]

    def tiles(self, rows: int) -> Blocks:
        return next(each for each in self._tiles if each["rows"] is None or rows <= each["rows"])

    def most_rows(self, kernel: str, weight: Weight) -> int | None:
        known = self._most_rows.get(kernel, {"*": None})
        return known.get(kind(weight), known["*"])


def kind(weight: Weight) -> str:
    """What the speed depends on beside the size: the number type, and whether scales are per row."""
    return f"{weight.dtype}/{'row' if weight.block_k >= weight.k else 'group'}"


def architecture(device: torch.device) -> str:
    """sm90, gfx942, xpu; what stands for a device that is not in this machine is the default."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        return DEFAULT
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else target.arch if target.backend == "hip" else device.type


def multiplies_float8(architecture: str) -> bool:
    """NVIDIA's from sm89 on. AMD's have another e4m3, or none; Intel's convert to float16."""
    return architecture.startswith("sm") and int(architecture[2:]) >= 89


def path(architecture: str) -> Path:
    return measured.folder() / f"triton-{architecture}.json"


@functools.cache
def of(device: torch.device) -> Config:
    name = architecture(device)
    own = None if name == DEFAULT else measured.read(path(name), fault)
    if own is None:
        shipped = FOLDER / f"{name}.json"
        file = shipped if shipped.exists() else FOLDER / f"{DEFAULT}.json"
        own = json.loads(file.read_text(encoding="utf-8"))
    return Config(own, multiplies_float8(name))


def fault(content: Any) -> str | None:
    """Why a table cannot be used."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return f"it is not of version {VERSION}"
    if not _is_size(content.get("programs")):
        return "programs must be a whole number from 1"
    tiles, most = content.get("tiles"), content.get("most_rows")
    if not isinstance(tiles, list) or not all(_are_blocks(each, {"BM"}) and "rows" in each for each in tiles):
        return f"tiles must be a list of rows, BM, {', '.join(FIELDS)}; the sizes powers of two"
    rows = [each["rows"] for each in tiles]
    if rows[-1:] != [None] or not all(_is_size(each) for each in rows[:-1]):
        return "tiles must have rows that are whole numbers, and at the end an entry for any number of rows (null)"
    if not _are_blocks(content.get("gemv"), set()):
        return f"gemv must have {', '.join(FIELDS)}; the sizes powers of two"
    if not isinstance(most, dict) or not all(isinstance(kinds, dict) and "*" in kinds for kinds in most.values()):
        return "most_rows must name, for each kernel, the rows of each kind of weight and of *"
    if not all(rows is None or rows == 0 or _is_size(rows) for kinds in most.values() for rows in kinds.values()):
        return "most_rows must be whole numbers or null"
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_blocks(value: Any, more: set[str]) -> bool:
    """num_stages is the one size that need be no power of two."""
    if not isinstance(value, dict) or set(value) - {"rows"} != set(FIELDS) | more:
        return False
    sizes = {name: size for name, size in value.items() if name != "rows"}
    return all(_is_size(size) and (name == "num_stages" or not size & (size - 1)) for name, size in sizes.items())
