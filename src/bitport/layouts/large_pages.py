"""Huge-page memory for weights, which every matmul reads from end to end.

With 4 KiB pages the processor translates an address every 4 KiB, and its prefetchers stop at page boundaries: a
memory-bound matmul with one row takes about a fifth longer than with 2 MiB pages. In its usual setting Linux gives huge
pages only to memory that asks for them (``madvise``); asking affects no other memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
KEPT = 32 << 20
"""Size in bytes up to which glibc, with its default settings, reuses freed memory. Larger allocations come from the
system each time, with a page fault and zeroing for every page."""
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None if the system does not support huge pages."""


def empty(shape: Sequence[int], least: int = PAGE) -> Tensor:
    """Uninitialized uint8 tensor in huge pages. The remainder after the last full huge page is in small pages, and so
    is a whole tensor of less than ``least`` bytes."""
    count = math.prod(shape)
    if ADVICE is None or count < max(least, PAGE):
        return torch.empty(*shape, dtype=torch.uint8, device="cpu")
    # Pages that are never touched take no memory.
    memory = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(ADVICE, start, count // PAGE * PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start).view(*shape)
