"""What to measure: shapes of models, numbers of rows, schemes. One table each; the command line picks from them."""

from __future__ import annotations

from typing import NamedTuple

from bitport.numerics import NUMBER_TYPES
from bitport.schemes import PRESETS, preset


class Shape(NamedTuple):
    """A linear layer from k features to n; written KxN."""

    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.k}x{self.n}"


SUITES: dict[str, tuple[Shape, ...]] = {
    "voxtral": (Shape(3072, 4096), Shape(3072, 1024), Shape(3072, 8192), Shape(8192, 3072)),
    "whisper": (Shape(1280, 1280), Shape(1280, 5120), Shape(5120, 1280)),
    "llama": (Shape(4096, 4096), Shape(4096, 1024), Shape(4096, 14336), Shape(14336, 4096)),
    "odd": (Shape(4096, 4097), Shape(1000, 3072), Shape(2056, 1027)),
}
"""The decoder of Voxtral mini, an encoder like Whisper's, Llama 3 8B; then N or K not divisible by any tile or
group."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 375, 512, 1024, 1500, 2048, 4096)
"""One token, a few sequences, prompts, the 375 and 1500 positions of half a minute of speech."""

SCHEMES = (
    *("int4", "int4-g32", "nf4", "mxfp4-wo", "nvfp4-wo", "int8", "fp8-wo", "mxfp8-wo"),
    *("int2", "int3", "int5", "int6", "int8-dyn", "int4-int8", "fp8-row", "fp8-block", "mxfp8", "mxfp4"),
)

QUICK_SHAPES = (Shape(3072, 8192), Shape(1280, 5120), Shape(4096, 4096), Shape(2056, 1027))
QUICK_ROWS = (1, 4, 16, 64, 375, 1500)
QUICK_SCHEMES = ("int4", "nf4", "int8", "int8-dyn", "int4-int8")

GROUP = 128
"""Columns per scale for peers that allow a choice: the group of bitport's int4."""


def suite_of(shape: Shape) -> str:
    return next((name for name, shapes in SUITES.items() if shape in shapes), "other")


def class_of(scheme: str) -> str:
    """The comparison class of a scheme: bits per weight, and whether inputs are unchanged or rounded, e.g. to int8."""
    found = preset(scheme)
    return f"{NUMBER_TYPES[found.weight.dtype].bits}-bit" + (f" x {found.act.partition('-')[0]}" if found.act else "")


CLASSES = ("bf16", "f32", *dict.fromkeys(map(class_of, PRESETS)))
"""Those that a peer can name: rows of one class are compared with each other."""
