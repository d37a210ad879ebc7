"""int4 and int8 weights by 1 to 8 rows of x, as in decoding: launches kernels/few_rows.cu with a fitting block size.

From sm90 on the kernel uses programmatic dependent launch: it begins, and prefetches its weight, before the previous
kernel in the stream has ended. The weight must then have been written before that kernel began. This holds if an
earlier call in the same stream multiplied by the same tensors at the same version counts: that call waited for the
writers, all later ones of the stream begin after it, and it writes only its result, which is not a weight. The first
call with a weight, the first after a write to it, and the first after one in another stream (this one may itself have
written the weight) are therefore launched without overlap. x and the bias are read, and y is written, only after all
previous kernels have ended.

A call that a graph captures runs when the graph does, after all that was in the stream before. So it says nothing about
calls outside; but those before the capture, in any stream, show that no write of this version is in the graph.

Where PyTorch does not count writes to a weight (bitport.tensor.versions) no call overlaps. Writes through ``.data``,
and those of a graph that is replayed, go unnoticed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from bitport.backends import aten
from bitport.backends.cuda import capability, compiled, operand
from bitport.backends.cuda.compiled import Function, address, missing
from bitport.numerics import NUMBER_TYPES
from bitport.ops import Weight
from bitport.tensor import versions

MOST_ROWS = 8
"""A tensor core instruction takes 8 rows of x."""
STEP_BYTES = 64
"""Bytes of a row of the weight that a warp multiplies at a time; a lane holds a quarter of them."""


def step_of(bits: int) -> int:
    """Columns in STEP_BYTES."""
    return STEP_BYTES * 8 // bits


class Form(NamedTuple):
    """What the source is compiled for besides the size."""

    bits: int
    flip: int
    group: int
    """Columns per scale; 0: the whole row."""
    dtype: torch.dtype
    clusters: bool

    @property
    def step(self) -> int:
        return step_of(self.bits)

    def entries(self, steps: int) -> int:
        """Number of scales kept per row: one per step, or one per lane and step where groups are not whole steps."""
        return steps * (4 if self.group % self.step else 1) if self.group else 1


class Size(NamedTuple):
    """Size of a block; the .cu file explains the fields."""

    tiles: int
    across: int
    along: int
    steps: int
    stages: int
    splits: int = 1

    @property
    def columns(self) -> int:
        """Columns of y."""
        return 16 * self.tiles * self.across

    @property
    def warps(self) -> int:
        return self.across * self.along

    def blocks(self, n: int) -> int:
        return -(-n // self.columns) * self.splits

    def shared(self, m: int, k: int, form: Form) -> int:
        """Bytes of shared memory: the prefetched stages, or the sums; scales and zeros; and the sums of other
        blocks."""
        steps, per_stage = -(-k // (form.step * self.splits)), self.along * self.steps
        slots = min(self.stages, -(-steps // per_stage))
        codes = slots * 2 * self.tiles * self.steps * 32 * self.warps
        x = slots * m * (form.step // 8 * per_stage + 4)
        sums = self.along * m * (self.columns + 4) * 4
        entries = self.columns * (form.entries(steps) | 1) * 4
        others = -(-m * self.columns // 16 // self.splits) * self.splits * 64 if self.splits > 1 else 0
        return max(16 * (codes + x), sums) + entries + others


WIDE, DEEP = Size(2, 2, 4, 1, 4), Size(1, 4, 4, 2, 3)
MIDDLE, NARROW = Size(1, 2, 4, 2, 3), Size(1, 1, 8, 2, 3)
SPLITS = (1, 2, 4, 8)
AHEAD = 80 << 10
"""Bytes of weight per multiprocessor up to which WIDE was the fastest on an H100: two of its blocks prefetch nearly all
of them. It was at 62 KiB; at 93 KiB DEEP was, one block of which has as many warps."""
BUSY = 0.9 * 16
"""Warps per multiprocessor that keep it busy; splitting K further only adds more sums to reduce."""
OCCUPIED = 0.6
"""Blocks per multiprocessor, where K is not split, from which fewer and wider blocks were the fastest."""


def refuses(number: str, x: Tensor, *rest: Any) -> str | None:
    """``number``: int4 or int8."""
    weight = Weight(*rest[:10])
    step = step_of(NUMBER_TYPES[number].bits)
    if reason := operand.refuses(number, x, weight, step):
        return reason
    if weight.block_k % (step // 4):
        return f"blocks of the scale must have a multiple of {step // 4} columns, not {weight.block_k}"
    m = x.numel() // weight.k
    if m > MOST_ROWS:
        return f"it multiplies 1 to {MOST_ROWS} rows; x has {m}"
    return capability.below(x.device, 8, 0) or missing() or _too_new(x.device) or _too_large(x, weight)


def _too_new(device: torch.device) -> str | None:
    if _architecture(device) is None:
        major, minor = capability.of(device)
        return f"CUDA {torch.version.cuda}, PyTorch's, compiles nothing for {device}, which is sm{major}{minor}"
    return None


def _architecture(device: torch.device) -> str | None:
    found = capability.of(device)
    return "90a" if found == (9, 0) else compiled.architecture(*found)


def _too_large(x: Tensor, weight: Weight) -> str | None:
    if _size_on(x, weight) is None:
        return f"a block of {x.device} has too little shared memory for K = {weight.k}"
    return None


def run(x: Tensor, *rest: Any) -> Tensor:
    weight = Weight(*rest[:10])
    size = _size_on(x, weight)
    assert size is not None, "it was asked before"
    return product(x, weight, rest[10], size)


def _form(x: Tensor, weight: Weight) -> Form:
    bits, group = NUMBER_TYPES[weight.dtype].bits, 0 if weight.block_k == weight.k else weight.block_k
    return Form(bits, operand.FLIPPED[weight.layout], group, x.dtype, _clusters(x.device))


def _clusters(device: torch.device) -> bool:
    return capability.of(device) >= (9, 0)


def _size_on(x: Tensor, weight: Weight) -> Size | None:
    device = capability.multiprocessors(x.device), capability.shared_memory(x.device)
    return size_of(x.numel() // weight.k, weight.n, weight.k, _form(x, weight), *device)


@functools.cache
def size_of(m: int, n: int, k: int, form: Form, multiprocessors: int, memory: int) -> Size | None:
    """Return the first size that fits into ``memory`` bytes per block: as measured the fastest, or with less
    prefetch."""
    for size in _clustered(n, k, form, multiprocessors) if form.clusters else _alone(n, multiprocessors):
        for each in (size, size._replace(steps=1, stages=3), size._replace(steps=1, stages=2)):
            if each.shared(m, k, form) <= memory:
                return each
    return None


def _clustered(n: int, k: int, form: Form, multiprocessors: int) -> Iterator[Size]:
    """Split K until the multiprocessors are busy, but leave no split without steps."""
    size, steps = WIDE if n * k * form.bits // 8 <= AHEAD * multiprocessors else DEEP, k // form.step
    splits = [each for each in SPLITS if -(-steps // each) * (each - 1) < steps]
    sizes = [size._replace(splits=each) for each in splits]
    enough = [each for each in sizes if each.blocks(n) * each.warps >= BUSY * multiprocessors]
    yield from enough or sizes[-1:]
    for narrower in (MIDDLE, NARROW):
        yield narrower._replace(splits=splits[-1])


def _alone(n: int, multiprocessors: int) -> Iterator[Size]:
    enough = (each for each in (WIDE, MIDDLE) if each.blocks(n) >= OCCUPIED * multiprocessors)
    yield from enough
    yield NARROW


def product(x: Tensor, weight: Weight, bias: Tensor | None, size: Size) -> Tensor:
    n, k, form = weight.n, weight.k, _form(x, weight)
    rows, y = aten.rows(x), x.new_empty(*x.shape[:-1], n)
    given = (weight.data, weight.scale, weight.zero)
    held = [None if part is None else part.contiguous() for part in given]
    held[0] = aten.aligned(weight.data)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    as_given = all(part is own for part, own in zip(held, given, strict=True))
    may_overlap = form.clusters and as_given
    with torch.cuda.device(x.device):
        dependent = may_overlap and unchanged(*given)
        _function(size, form, x.device)(
            *map(address, (rows, *held, bias, y)),
            *map(ctypes.c_int, (rows.shape[0], n, k)),
            grid=(size.blocks(n), 1, 1),
            threads=32 * size.warps,
            shared=size.shared(rows.shape[0], k, form),
            cluster=size.splits if size.splits > 1 else 0,
            dependent=dependent,
        )
        if may_overlap and not dependent:
            waited_for(*given)
    return y


class _Line(NamedTuple):
    """What runs in the order in which it is launched."""

    stream: int
    captured: bool


def _line() -> _Line:
    return _Line(torch.cuda.current_stream().cuda_stream, torch.cuda.is_current_stream_capturing())


_multiplied = WeakTensorKeyDictionary()
"""Part of a weight -> (its version count, the line) when a call last waited for what wrote it."""


def unchanged(*parts: Tensor | None) -> bool:
    """Whether each part was written before whatever the current stream runs next begins."""
    line = _line()
    return all(_unchanged(part, line) for part in parts if part is not None)


def _unchanged(part: Tensor, line: _Line) -> bool:
    if not versions.counts(part) or (known := _multiplied.get(part)) is None:
        return False
    version, before = known
    return version == part._version and (before == line or (line.captured and not before.captured))


def waited_for(*parts: Tensor | None) -> None:
    """Record that a call without overlap was launched, which comes after all that has written these parts."""
    line = _line()
    for part in parts:
        if part is not None and versions.counts(part):
            _multiplied[part] = part._version, line


@functools.cache
def _function(size: Size, form: Form, device: torch.device) -> Function:
    architecture = _architecture(device)
    assert architecture is not None, "it was asked before"
    return Function(compiled.binary(source(size, form), architecture), "few_rows", capability.shared_memory(device))


def source(size: Size, form: Form) -> str:
    values = {
        **{"TILES": size.tiles, "ACROSS": size.across, "ALONG": size.along, "STEPS": size.steps},
        **{"STAGES": size.stages, "SPLITS": size.splits, "BITS": form.bits, "FLIP": form.flip},
        **{"GROUP": form.group, "HALF": int(form.dtype == torch.float16), "CLUSTERS": int(form.clusters)},
    }
    return compiled.source("few_rows", values)
