"""Memory for weights, which every product reads from end to end.

Where memory lies in pages of 4 KiB, the processor looks up an address every 4 KiB and its prefetchers stop there: with
one row, when reading is all that takes time, a product takes about a fifth longer than with pages of 2 MiB. Linux gives
those to who asks for them (``madvise``), in its usual setting to nobody else; asking changes this memory alone.
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
"""Bytes of a tensor up to which glibc, as it is set usually, keeps its memory for the next one. What is larger comes
from the system each time: a page at a time, and zeroed."""
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None where the system has no such advice."""


def empty(shape: Sequence[int], least: int = PAGE) -> Tensor:
    """Bytes that say nothing yet. As many of them as fill whole pages lie in such, the rest, which would waste most of
    one, in small ones; and all of them, where they are fewer than ``least``."""
    count = math.prod(shape)
    if ADVICE is None or count < max(least, PAGE):
        return torch.empty(*shape, dtype=torch.uint8, device="cpu")
    # What nobody touches takes no memory.
    memory = mmap.mmap(-1, count + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(ADVICE, start, count // PAGE * PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start).view(*shape)
