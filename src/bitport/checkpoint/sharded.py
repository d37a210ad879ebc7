"""Checkpoints of a model that is sharded over several processes as DTensors.

load(): each process reads its own shard of every tensor. save(): all gather one tensor after the other, and the first
process writes. If it fails, the others must not wait for it: it still takes part in gathering the rest, and then all
raise its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from bitport.calibrate.processes import Processes
from bitport.checkpoint.arranged import Arranged
from bitport.checkpoint.assemble import assembled
from bitport.checkpoint.manifest import NAME, Entry, Manifest
from bitport.checkpoint.parse import parse_manifest
from bitport.checkpoint.slots import Slot
from bitport.errors import ArgumentError, CheckpointError
from bitport.nn.fsdp import fsdp_modules
from bitport.tensor import QTensor
from bitport.tensor.sharded import is_sharded, own, shard_of, sharded_like, whole


def check_sharded(model: nn.Module, path: Path, pairs: Iterable[tuple[Entry, Tensor]], device: object) -> None:
    """Check, before anything is read, that the sharded tensors of ``model`` can hold those of the checkpoint."""
    managed = bool(fsdp_modules(model))
    for entry, there in pairs:
        if not is_sharded(there):
            continue
        if device is not None:
            raise ArgumentError(
                f"{entry.name} is sharded, its pieces are on the devices of its mesh: leave out device="
            )
        q = own(there)
        scheme = q.scheme if isinstance(q, QTensor) else None
        if managed and (scheme != entry.scheme or (scheme is None and there.dtype != entry.dtype)):
            raise CheckpointError(
                f"{entry.name} is {entry.scheme or entry.dtype} in the checkpoint, and fully_shard was applied to the "
                f"model when it was {scheme or there.dtype}. Build it on meta, quantize_ it with the recipe of the "
                f"checkpoint (or .to() its dtype), then fully_shard and load"
            )
        try:
            shard_of(_blank(path, entry), there)
        except ArgumentError as error:
            raise CheckpointError(f"{entry.name} cannot be sharded as the model is: {error}") from error


def _blank(path: Path, entry: Entry) -> Tensor:
    """The tensor of ``entry`` on meta."""
    if isinstance(entry, Arranged):
        return entry.made(lambda piece: _blank(path, piece))
    parts = entry.parts.items()
    return assembled(
        path, entry, {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in parts}
    )


def read_shard(value: Tensor, there: Tensor, device: torch.device, *, packed: bool) -> Tensor:
    """Return this process's shard of ``value`` (which may be in a mapped file) as a replacement for the DTensor
    ``there``; ``packed``: in the layout of its device."""
    piece = shard_of(value, there).clone().to(device)
    if isinstance(piece, QTensor):
        piece = piece.to_device_layout() if packed else piece.to_layout("plain")
    return sharded_like(there, piece)


def is_shared(slots: Iterable[Slot]) -> bool:
    return any(is_sharded(slot.tensor) for slot in slots)


def wholes(slots: Iterable[Slot]) -> Iterator[tuple[Slot, Tensor]]:
    """Yield each slot with its gathered tensor."""
    for slot in slots:
        yield slot, whole(slot.tensor)


def written_by_one(write: Callable[[], Manifest], stream: Iterator[object], directory: Path) -> Manifest:
    """Let the first process ``write`` the stream that all gather, and return the manifest in every process."""
    processes = Processes.joined()

    def text() -> str:
        try:
            return write().to_json()
        finally:
            _exhaust(stream)

    if not processes.first:
        _exhaust(stream)
    return parse_manifest(processes.shared(0, text).encode(), directory / NAME)


def _exhaust(stream: Iterator[object]) -> None:
    for _ in stream:
        pass
