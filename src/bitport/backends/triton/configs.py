"""Block sizes, and the numbers of rows for which each kernel runs: one table per architecture.

``configs/<architecture>.json`` in the package is used for that architecture and those that are ``ALIKE``;
``default.json`` is used for all others, with sizes that fit the memory of every matrix unit that Triton compiles for.
Measurements of ``bitport tune``, in the user's cache folder, take precedence over both. ::

    source      how the sizes were found: measured on what, or reasoned, and why
    gemv        blocks of the kernel without matrix units, which takes rows one by one
    tiles       blocks of the kernel with them, by rows: the first entry with at least as many (null: any number)
    scaled      blocks of the kernel whose matrix units apply block scales themselves
    most_rows   kernel -> kind of weight (* for all others) -> the most rows for which it runs (null: any number)
    least_rows  kernel asked before those here -> the least rows for which it runs (null: never; with experts: per
                expert)
    unmeasured  stages that bitport tune had not reached when it was stopped; absent if it finished or never ran

A block is BM rows of x by BN rows of the weight, in steps of BK columns. ``programs`` is the number of programs that
keeps the device busy: K is split if a product has fewer.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
import triton

from bitport.backends import measured, user_cache
from bitport.ops import Weight

VERSION = 3
FOLDER = Path(__file__).parent / "configs"
DEFAULT = "default"
ALIKE = dict.fromkeys(("sm101", "sm103", "sm110"), "sm100")
"""Architecture -> another one with the same matrix units and memory."""
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
        """What the device's matrix units multiply natively. ``float8``: float8_e4m3; ``scaled``: activation formats
        whose block scales they apply themselves; ``mixed``: these also with 4 bits on one side and 8 on the other;
        ``int8``, ``bfloat16``: these types. ``halves``: ordinary arithmetic is on two 16-bit numbers at a time."""
        self.content, self.float8, self.scaled, self.mixed, self.int8 = content, float8, scaled, mixed, int8
        self.bfloat16, self.halves = bfloat16, halves
        self.source: str = content["source"]
        self.gemv: Blocks = content["gemv"]
        self._most_rows: dict[str, dict[str, int | None]] = content["most_rows"]

    def tiles(self, rows: int) -> Blocks:
        return blocks_for(self.content["tiles"], rows)

    def scaled_tiles(self, rows: int) -> Blocks:
        return blocks_for(self.content["scaled"], rows)

    def most_rows(self, kernel: str, weight: Weight) -> int | None:
        known = self._most_rows.get(kernel, {"*": None})
        return known.get(measured.kind(weight), known["*"])

    def least_rows(self, kernel: str) -> int | None:
        rows: int | None = self.content["least_rows"].get(kernel, 1)
        return rows


def blocks_for(entries: list[dict[str, Any]], rows: float) -> Blocks:
    """Return the entry for so many rows; for infinitely many, the one for any number."""
    return next(each for each in entries if each["rows"] is None or rows <= each["rows"])


def architecture(device: torch.device) -> str:
    """Return the architecture, such as sm90, gfx942 or xpu; DEFAULT for a device that is not in this machine."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type:
        return DEFAULT
    with torch.accelerator.device_index(device.index):
        target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else target.arch if target.backend == "hip" else device.type


def nvidia(architecture: str) -> int | None:
    """Return 90 for sm90; None for other vendors."""
    return int(architecture[2:]) if architecture.startswith("sm") else None


def multiplies_float8(architecture: str) -> bool:
    """NVIDIA from sm89 on. AMD has another e4m3, or none; Intel converts to float16."""
    return (nvidia(architecture) or 0) >= 89


def multiplies_int8(architecture: str) -> bool:
    """sm75 has units for it, but Triton does not support them: on NVIDIA before sm80 compilation fails."""
    return (nvidia(architecture) or 80) >= 80


def multiplies_bfloat16(architecture: str) -> bool:
    """NVIDIA before sm80 has no units for it: it is widened to float32, which takes twice the memory."""
    return (nvidia(architecture) or 80) >= 80


def multiplies_scaled(architecture: str) -> tuple[str, ...]:
    """Return the activation formats whose block scales matrix units apply: NVIDIA from sm100 on, AMD gfx950."""
    if (nvidia(architecture) or 0) >= 100:
        return ("mxfp8", "mxfp4", "nvfp4")
    return ("mxfp8", "mxfp4") if architecture == "gfx950" else ()


def multiplies_mixed(architecture: str) -> bool:
    """sm120 has units for it, but there Triton decodes before multiplying."""
    return architecture == "gfx950" or 100 <= (nvidia(architecture) or 0) < 120


def computes_halves(architecture: str) -> bool:
    """Including bfloat16: NVIDIA from sm80 on. AMD widens bfloat16 to float32."""
    return (nvidia(architecture) or 0) >= 80


def for_architecture(content: dict[str, Any], architecture: str) -> Config:
    found = multiplies_float8(architecture), multiplies_scaled(architecture), multiplies_mixed(architecture)
    int8, bfloat16 = multiplies_int8(architecture), multiplies_bfloat16(architecture)
    return Config(content, *found, int8=int8, bfloat16=bfloat16, halves=computes_halves(architecture))


def path(architecture: str) -> Path:
    return user_cache.folder() / f"triton-{architecture}.json"


@functools.cache
def of(device: torch.device) -> Config:
    name = architecture(device)
    own = None if name == DEFAULT else measured.read(path(name), fault)
    if own is None:
        own = shipped(name)
    return for_architecture(own, name)


def shipped(architecture: str) -> dict[str, Any]:
    """Return the table in the package."""
    file = FOLDER / f"{ALIKE.get(architecture, architecture)}.json"
    file = file if file.exists() else FOLDER / f"{DEFAULT}.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def fault(content: Any) -> str | None:
    """Return why a table cannot be used, or None."""
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
