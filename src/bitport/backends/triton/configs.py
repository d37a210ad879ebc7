"""Sizes of blocks, and from how many rows on which kernel runs: a table for each architecture.

``configs/<architecture>.json`` in the package holds one, for chips that are ``ALIKE`` too; ``default.json`` stands for
every other: sizes that fit the memory of each matrix unit that Triton compiles for. What ``bitport tune`` measured, in
the user's cache folder, comes before both. ::

    source      how the sizes were found: measured on what, or reasoned, and why so
    gemv        blocks of the kernel without matrix units, which takes rows one by one
    tiles       those of the kernel with them, by rows: the first entry that has as many (null: any number)
    scaled      those of the kernel whose matrix units take blocks with their scales
    most_rows   kernel -> kind of weight (* for the others) -> the most rows for which it runs (null: any number)
    least_rows  kernel that is asked before those here -> from how many rows on it runs (null: never; with experts, for
                each of them)
    unmeasured  what bitport tune had not come to when it was stopped; absent where it was done, or never begun

A block is BM rows of x by BN rows of the weight, in steps of BK columns; ``programs`` is how many of them keep the
device busy: K is split where a product has fewer.
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

VERSION = 3
FOLDER = Path(__file__).parent / "configs"
DEFAULT = "default"
ALIKE = dict.fromkeys(("sm101", "sm103", "sm110"), "sm100")
"""Chips with the units and the memory of another."""
Blocks: TypeAlias = dict[str, int]
SIZES = ("BN", "BK", "num_warps")
COUNTS = ("num_stages", "programs")


class Config:
    def __init__(
        self,
        content: dict[str, Any],
        float8: bool = False,
        scaled: tuple[str, ...] = (),
        mixed: bool = False,
        int8: bool = True,
        bfloat16: bool = True,
        halves: bool = False,
    ) -> None:
        """``float8``: the device multiplies float8_e4m3 as such; ``scaled``: short blocks of these activation formats
        with their scales; ``mixed``: with 4 bits on one side and 8 on the other; ``int8``, ``bfloat16``: these as
        such; ``halves``: it computes with two numbers of 16 bits at a time."""
        self.content, self.float8, self.scaled, self.mixed, self.int8 = content, float8, scaled, mixed, int8
        self.bfloat16, self.halves = bfloat16, halves
        self.source: str = content["source"]
        self.gemv: Blocks = content["gemv"]
        self._most_rows: dict[str, dict[str, int | None]] = content["most_rows"]

    def tiles(self, rows: int) -> Blocks:
        return _for(self.content["tiles"], rows)

    def scaled_tiles(self, rows: int) -> Blocks:
        return _for(self.content["scaled"], rows)

    def most_rows(self, kernel: str, weight: Weight) -> int | None:
        known = self._most_rows.get(kernel, {"*": None})
        return known.get(kind(weight), known["*"])

    def least_rows(self, kernel: str) -> int | None:
        rows: int | None = self.content["least_rows"].get(kernel, 1)
        return rows


def _for(entries: list[dict[str, Any]], rows: int) -> Blocks:
    return next(each for each in entries if each["rows"] is None or rows <= each["rows"])


def kind(weight: Weight) -> str:
    """What the speed depends on beside the size: the number type, and whether scales are per row."""
    return f"{weight.dtype}/{'row' if weight.block_k >= weight.k else 'group'}"


def architecture(device: torch.device) -> str:
    """sm90, gfx942, xpu; what stands for a device that is not in this machine is the default."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        return DEFAULT
    with torch.accelerator.device_index(device.index):
        target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else target.arch if target.backend == "hip" else device.type


def nvidia(architecture: str) -> int | None:
    """90 of sm90; None of another maker's."""
    return int(architecture[2:]) if architecture.startswith("sm") else None


def multiplies_float8(architecture: str) -> bool:
    """NVIDIA's from sm89 on. AMD's have another e4m3, or none; Intel's convert to float16."""
    return (nvidia(architecture) or 0) >= 89


def multiplies_int8(architecture: str) -> bool:
    """sm75 has units for it, but Triton has no product for them: there, and before, it is a failure of the compiler."""
    return (nvidia(architecture) or 80) >= 80


def multiplies_bfloat16(architecture: str) -> bool:
    """NVIDIA's before sm80 have no units for it: it is widened to float32, which takes twice the memory."""
    return (nvidia(architecture) or 80) >= 80


def multiplies_scaled(architecture: str) -> tuple[str, ...]:
    """The activation formats whose blocks are multiplied with their scales: NVIDIA's from sm100 on, AMD's gfx950."""
    if (nvidia(architecture) or 0) >= 100:
        return ("mxfp8", "mxfp4", "nvfp4")
    return ("mxfp8", "mxfp4") if architecture == "gfx950" else ()


def multiplies_mixed(architecture: str) -> bool:
    """sm120 has units for it, but Triton decodes first there."""
    return architecture == "gfx950" or 100 <= (nvidia(architecture) or 0) < 120


def computes_halves(architecture: str) -> bool:
    """bfloat16 too: NVIDIA's from sm80 on. AMD's widen it to float32."""
    return (nvidia(architecture) or 0) >= 80


def for_architecture(content: dict[str, Any], architecture: str) -> Config:
    found = multiplies_float8(architecture), multiplies_scaled(architecture), multiplies_mixed(architecture)
    int8, bfloat16 = multiplies_int8(architecture), multiplies_bfloat16(architecture)
    return Config(content, *found, int8=int8, bfloat16=bfloat16, halves=computes_halves(architecture))


def path(architecture: str) -> Path:
    return measured.folder() / f"triton-{architecture}.json"


@functools.cache
def of(device: torch.device) -> Config:
    name = architecture(device)
    own = None if name == DEFAULT else measured.read(path(name), fault)
    if own is None:
        own = shipped(name)
    return for_architecture(own, name)


def shipped(architecture: str) -> dict[str, Any]:
    """The table in the package."""
    file = FOLDER / f"{ALIKE.get(architecture, architecture)}.json"
    file = file if file.exists() else FOLDER / f"{DEFAULT}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def fault(content: Any) -> str | None:
    """Why a table cannot be used."""
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return f"it is not of version {VERSION}"
    if not isinstance(content.get("source"), str):
        return "source must say how its sizes were found"
    if not _are_blocks(content.get("gemv"), ()):
        return f"gemv must have {', '.join(SIZES)} (powers of two), {', '.join(COUNTS)}"
    for name in ("tiles", "scaled"):
        if reason := _fault_of_tiles(content.get(name)):
            return f"{name} must {reason}"
    most = content.get("most_rows")
    if not isinstance(most, dict) or not all(isinstance(kinds, dict) and "*" in kinds for kinds in most.values()):
        return "most_rows must name, for each kernel, the rows of each kind of weight and of *"
    if not all(rows is None or rows == 0 or _is_size(rows) for kinds in most.values() for rows in kinds.values()):
        return "most_rows must be whole numbers or null"
    least = content.get("least_rows")
    if not isinstance(least, dict) or not all(rows is None or _is_size(rows) for rows in least.values()):
        return "least_rows must be whole numbers from 1 on, or null"
    if not _are_names(content.get("unmeasured", [])):
        return "unmeasured must be a list of names"
    return None


def _fault_of_tiles(entries: Any) -> str | None:
    if not isinstance(entries, list) or not all(_are_blocks(each, ("BM",)) and "rows" in each for each in entries):
        return f"be a list of rows, BM, {', '.join(SIZES)} (powers of two), {', '.join(COUNTS)}"
    rows = [each["rows"] for each in entries]
    if rows[-1:] != [None] or not all(_is_size(each) for each in rows[:-1]):
        return "have rows that are whole numbers, and at the end an entry for any number of rows (null)"
    return None


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_blocks(value: Any, more: tuple[str, ...]) -> bool:
    sizes = (*more, *SIZES)
    if not isinstance(value, dict) or set(value) - {"rows"} != {*sizes, *COUNTS}:
        return False
    powers = all(_is_size(value[name]) and not value[name] & (value[name] - 1) for name in sizes)
    return powers and all(_is_size(value[name]) for name in COUNTS)
