"""Estimate the memory that a streamed run takes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from bitport.algorithms.preparation import Preparation
from bitport.calibrate.blocks import Walk
from bitport.calibrate.magnitudes import BINS
from bitport.calibrate.place import REST
from bitport.checkpoint.source import Source
from bitport.report.memory import ROUNDED, WORK, Memory, resident
from bitport.schemes import Target

GRAMS = 7
"""float32 matrices [K, K] besides the sums themselves: H shrunk, sorted, damped, its factor and inverse, and the
product of the batch being added."""
EXPERTS = 8
"""The assumed number of experts in a stacked tensor that each token is routed to."""
BATCHES = 4
"""The assumed number of batches that reach every expert."""
SIZES = 3
"""Copies of an input while its magnitudes are counted, at most float32 each: in its dtype, in float32, and in units of
bins."""


def estimate(
    walk: Walk,
    files: Source,
    dtype: torch.dtype | None,
    prepared: Preparation,
    device: torch.device,
    *,
    on_disk: bool,
) -> Memory:
    """The requirement of the most demanding block, or of the weights in no block if they need more. If blocks run on
    another ``device``, tensors pass through this machine's memory one at a time, in float and then as codes."""
    record = walk.record
    outputs = [[shapes[name] for name in walk.order] for shapes in record.shapes]
    sizes = [[shape.nbytes for shape in each] for each in outputs]
    given = sum(record.given)
    between = given + max((sum(step) for step in zip(*sizes, strict=True)), default=0)
    one = max(map(sum, zip(record.given, map(max, sizes), strict=True)), default=0) if sizes else 0
    output = max((shape for each in outputs for shape in each), key=lambda shape: shape.nbytes, default=None)
    steps = [(name, _bytes(files, [f"{name}."], dtype), walk.targets[name]) for name in walk.order]
    inner = tuple(f"{name}." for name in walk.order)
    steps += [(REST, _bytes(files, [name for name in files.tensors if not name.startswith(inner)], dtype), walk.rest)]
    static = prepared.static
    counts = len(static) * BINS * torch.int64.itemsize
    found = []
    for name, weights, targets in steps:
        grams = [_gram(target) for target in targets if target.name in walk.wanted]
        largest = max((WORK * _elements(target) for target in targets), default=0)
        hidden = min((_columns(target) for target in targets), default=1)
        widest = sum(_rows(target) for target in targets) / hidden
        run = int((2 + widest) * output.nbytes) if output else 0
        counted = max((_columns(target) for target in targets if target in static), default=0)
        run += int(SIZES * 4 * counted / hidden * output.numel) if output else 0
        work = max(largest + GRAMS * max(grams, default=0), run)
        if prepared.transforms and output and name != REST and targets:
            work = max(work, _trial(walk, name, output.numel, hidden))
        found.append((weights, max(sum(grams), counts), work))
    weights, grams_of, work = max(found, key=sum)
    kept, disk = (one, 2 * between) if on_disk else (between, 0)
    if device.type == "cpu":
        return Memory(resident(), weights, kept, grams_of, work, disk)
    largest = max((held.nbytes + _bytes(files, [name], dtype) for name, held in files.tensors.items()), default=0)
    codes = ROUNDED * max((_elements(target) for _, _, targets in steps for target in targets), default=0)
    return Memory(resident(), largest, kept, counts, codes, disk, weights + grams_of + work + one, device)


def _trial(walk: Walk, name: str, output: int, hidden: int) -> int:
    """Bytes for a trial of a block in float32: its weights twice, three copies of the largest while it is multiplied,
    and the inputs of each product and the outputs, before and after. Experts that are separate modules may need more
    batches until each has been reached."""
    params = [param for _, param in walk.model.get_submodule(name).named_parameters()]
    elements = [param.numel() for param in params]
    matrices = [param for param in params if param.dim() > 1]
    rows = sum(max(param.shape[-2:]) * (min(param.shape[0], EXPERTS) if param.dim() > 2 else 1) for param in matrices)
    inner = {target.name.removeprefix(f"{name}.") for target in walk.targets[name]}
    separate = any(part.isdecimal() for each in inner for part in each.split("."))
    batches = min(len(walk.batches), BATCHES) if separate else 1
    return 4 * (2 * sum(elements) + 3 * max(elements) + batches * (3 * rows * output // hidden + 5 * output))


def _bytes(files: Source, prefixes: Collection[str], dtype: torch.dtype | None) -> int:
    total = 0
    for name, held in files.tensors.items():
        if name.startswith(tuple(prefixes)) and name not in files.tied:
            kept = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
            total += held.nbytes // held.dtype.itemsize * kept.itemsize
    return total


def _elements(target: Target) -> int:
    """The number of elements. Experts are solved one by one, but stacked in the end."""
    return torch.Size(target.shape).numel()


def _rows(target: Target) -> int:
    return target.shape[-1] if target.transposed else target.shape[-2]


def _columns(target: Target) -> int:
    return target.shape[-2] if target.transposed else target.shape[-1]


def _gram(target: Target) -> int:
    return torch.Size(target.shape[:-2]).numel() * _columns(target) ** 2 * 4
