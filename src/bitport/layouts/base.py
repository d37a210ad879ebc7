"""A layout: where the bits of a quantized matrix lie on a device.

``plain`` is the canonical one, the only one that is written to disk or moved between devices. Every other layout is
a cache derived from it: ``unpack(pack(parts)) == parts`` bit for bit, with standard torch ops, so that any device can
make and read any layout.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from bitport import plugins
from bitport.errors import LayoutError
from bitport.numerics import Quantized


class Matrix(NamedTuple):
    """The logical matrix behind the parts: ``n`` outputs by ``k`` inputs of ``dtype`` (the name of a number
    type), one scale per ``block_n`` x ``block_k`` block (whole axes resolved: block_k == k is one scale per row)."""

    dtype: str
    n: int
    k: int
    block_n: int
    block_k: int

    @property
    def grid(self) -> tuple[int, int]:
        """The shape of the scale."""
        return -(-self.n // self.block_n), -(-self.k // self.block_k)


class Packed(NamedTuple):
    data_dtype: torch.dtype
    data_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    zero_shape: tuple[int, ...] | None = None
    """None: canonical, as ``Matrix.grid``."""


class Layout(Protocol):
    name: str
    """What tensors, kernels and reports call it."""
    devices: tuple[str, ...]
    """Device types on which a tensor that fits is put into this layout when it arrives; () for on request only."""
    data_ndim: int
    """Number of dimensions of ``data`` for one matrix; further leading ones are batch (experts)."""
    weight_only: bool = False
    """Whether its kernels take only single matrices, and inputs that are not rounded: weights of other kinds are not
    put into it when they arrive on a device. A layout without this member is for all."""

    def expects(self, matrix: Matrix) -> Packed:
        """What the parts of one packed matrix look like; checked before any kernel touches them."""

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        """Why these parts cannot be held, or None."""

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        """Canonical parts in this layout; asked only for parts that it does not refuse."""

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        """The canonical parts again, bit for bit."""

    # ``rows(matrix, parts, start, stop)``, which a layout may have beside these, gives the parts of some rows as views,
    # or None where there are no such views. Without it the whole is unpacked and the rows are packed again.


WHOLE = ("name", "devices", "data_ndim", "expects", "refuses", "pack", "unpack")
"""What a layout must have: all members but ``weight_only``."""
LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> None:
    """Add a layout. Later ones are preferred to earlier ones on the devices that both name."""
    if missing := [name for name in WHOLE if not hasattr(layout, name)]:
        raise LayoutError(f"the layout {type(layout).__name__} lacks {', '.join(missing)}: see bitport.layouts.Layout")
    if isinstance(layout.devices, str):
        raise LayoutError(f"layout {layout.name!r}: devices is a tuple of names, ({layout.devices!r},), not a string")
    if numbered := [device for device in layout.devices if ":" in device]:
        raise LayoutError(
            f"layout {layout.name!r}: devices are types, as {numbered[0].partition(':')[0]!r}, not {numbered[0]!r}"
        )
    if layout.name in LAYOUTS and type(LAYOUTS[layout.name]) is not type(layout):
        raise LayoutError(f"layout {layout.name!r} exists already; choose another name")
    LAYOUTS[layout.name] = layout


def layout(name: str) -> Layout:
    """The layout of that name; LayoutError with the known ones for any other."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise LayoutError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}") from None


def preferred(device: torch.device, matrix: Matrix, parts: Quantized, act: str = "") -> str:
    """The layout a tensor takes when it arrives on ``device``; ``act``: how inputs are rounded for products with it."""
    plugins.load()
    further = act != "" or parts.data.dim() > 2
    for candidate in reversed(LAYOUTS.values()):
        narrow = further and getattr(candidate, "weight_only", Layout.weight_only)
        if device.type in candidate.devices and not narrow and candidate.refuses(matrix, parts) is None:
            return candidate.name
    return "plain"


def repack(matrix: Matrix, parts: Quantized, source: str, target: str) -> Quantized:
    """The same matrix in another layout, by way of plain."""
    if source == target:
        return parts
    plain = layout(source).unpack(matrix, parts)
    if reason := layout(target).refuses(matrix, plain):
        raise LayoutError(f"layout {target!r} cannot hold this {matrix.dtype} {matrix.n}x{matrix.k} matrix: {reason}")
    return layout(target).pack(matrix, plain)
