"""A layout: how the bits of a quantized matrix are arranged in device memory.

``plain`` is the canonical layout, the only one that is written to disk or moved between devices. Every other layout is
derived from it: ``unpack(pack(parts)) == parts`` bit for bit, with standard torch ops, so that any device can write and
read any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from bitport import plugins
from bitport.errors import LayoutError
from bitport.missing import warn_of_missing
from bitport.numerics import Quantized


class Matrix(NamedTuple):
    """The logical matrix that the parts represent: ``n`` outputs by ``k`` inputs of ``dtype`` (the name of a number
    type), one scale per ``block_n`` x ``block_k`` block (whole axes resolved: block_k == k is one scale per row)."""

    dtype: str
    n: int
    k: int
    block_n: int
    block_k: int

    @property
    def grid(self) -> tuple[int, int]:
        """The shape of the canonical scale."""
        return -(-self.n // self.block_n), -(-self.k // self.block_k)


class Packed(NamedTuple):
    """The dtype and shapes of the parts of one packed matrix."""

    data_dtype: torch.dtype
    data_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    zero_shape: tuple[int, ...] | None = None
    """None: canonical, i.e. ``Matrix.grid``."""


class Layout(Protocol):
    """How codes and scales are arranged in memory for the kernels of a device."""

    name: str
    """The name that tensors, kernels and reports use."""
    devices: tuple[str, ...]
    """Device types on which a suitable tensor is converted to this layout on arrival; () means on request only."""
    data_ndim: int
    """Number of dimensions of ``data`` for one matrix; additional leading dimensions are batch (experts)."""
    weight_only: bool = False
    """Whether its kernels take only single matrices and unrounded inputs; other weights are then not converted to it on
    arrival. Defaults to False if the layout lacks this member."""

    def expects(self, matrix: Matrix) -> Packed:
        """Dtype and shapes of the parts of one packed matrix; checked before any kernel reads them."""

    def refuses(self, matrix: Matrix, parts: Quantized) -> str | None:
        """Why the layout cannot hold these parts, or None if it can."""

    def pack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        """Convert canonical parts to this layout; called only for parts that it does not refuse."""

    def unpack(self, matrix: Matrix, parts: Quantized) -> Quantized:
        """The inverse of ``pack``, bit for bit."""

    # A layout may also define ``rows(matrix, parts, start, stop)``, which returns the parts of these rows as views, or
    # None if there are no such views. Without it the whole matrix is unpacked and the rows are packed again.


WHOLE = ("name", "devices", "data_ndim", "expects", "refuses", "pack", "unpack")
"""The members a layout must have: all but ``weight_only``."""
LAYOUTS: dict[str, Layout] = {}
"""Every registered layout, by name."""


def register_layout(layout: Layout) -> None:
    """Register a layout. Where several name the same device, the last registered is preferred."""
    if missing := [name for name in WHOLE if not hasattr(layout, name)]:
        raise LayoutError(f"the layout {type(layout).__name__} lacks {', '.join(missing)}: see bitport.layouts.Layout")
    if isinstance(layout.devices, str):
        raise LayoutError(f"layout {layout.name!r}: devices is a tuple of names, ({layout.devices!r},), not a string")
    if numbered := [device for device in layout.devices if ":" in device]:
        raise LayoutError(
            f"layout {layout.name!r}: devices are types, as {numbered[0].partition(':')[0]!r}, not {numbered[0]!r}"
        )
    if layout.name in LAYOUTS and (first := type(LAYOUTS[layout.name])) is not type(layout):
        there = plugins.module_of(first)
        raise LayoutError(f"layout {layout.name!r} exists already, of {there}; choose another name")
    LAYOUTS[layout.name] = layout


def layout(name: str) -> Layout:
    """The layout called ``name``; LayoutError with the known names for any other."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise LayoutError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}") from None


def preferred(device: torch.device, matrix: Matrix, parts: Quantized, act: str = "") -> str:
    """The layout a tensor is converted to when it arrives on ``device``; ``act``: how inputs are rounded. Warns if the
    device lacks kernels that could be there."""
    plugins.load()
    warn_of_missing(device.type)
    for candidate, reason in asked(device, matrix, parts, act):
        if reason is None:
            return candidate.name
    return "plain"


def asked(device: torch.device, matrix: Matrix, parts: Quantized, act: str = "") -> Iterator[tuple[Layout, str | None]]:
    """The layouts of ``device``, the preferred ones first, each with the reason why it refuses the tensor, or None."""
    plugins.load()
    further = act != "" or parts.data.dim() > 2
    for candidate in reversed(LAYOUTS.values()):
        if device.type in candidate.devices:
            narrow = further and single(candidate)
            yield candidate, NARROW if narrow else refusal(candidate, matrix, parts)


def refusal(layout: Layout, matrix: Matrix, parts: Quantized) -> str | None:
    """Why ``layout`` cannot hold these parts, or None; LayoutError if its ``refuses`` answers anything else."""
    reason = layout.refuses(matrix, parts)
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise LayoutError(
        f"refuses of layout {layout.name!r} has answered {reason!r}, which counts as a refusal: it must return None "
        "where the layout can hold the weight, and otherwise a text that says why not"
    )


def single(layout: Layout) -> bool:
    """Whether the layout is for single matrices and unrounded inputs alone."""
    return getattr(layout, "weight_only", Layout.weight_only)


NARROW = "its kernels take only single matrices and inputs that are not rounded"


def repack(matrix: Matrix, parts: Quantized, source: str, target: str) -> Quantized:
    """Convert a matrix to another layout by way of ``plain``."""
    if source == target:
        return parts
    plain = layout(source).unpack(matrix, parts)
    if reason := refusal(layout(target), matrix, plain):
        raise LayoutError(f"layout {target!r} cannot hold this {matrix.dtype} {matrix.n}x{matrix.k} matrix: {reason}")
    return layout(target).pack(matrix, plain)
