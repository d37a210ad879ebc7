"""The weights of a model built on the meta device, loaded from files for as long as they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from bitport.calibrate.place import REST
from bitport.checkpoint.load import read_tensor
from bitport.checkpoint.manifest import Manifest
from bitport.checkpoint.output import Output
from bitport.checkpoint.shards import Shards
from bitport.checkpoint.slots import Slot, fill, identity, slots
from bitport.checkpoint.source import Source, cast_floats
from bitport.errors import ArgumentError, CheckpointError, shortened


class Streamed:
    """A Place that loads a block from ``files``, or from ``output`` if its step is done, to ``device``, and returns its
    slots to meta afterwards. Tied tensors are loaded and dropped together. Buffers that the model has computed are on
    ``device`` all the time."""

    must_stream = True

    def __init__(
        self, model: nn.Module, files: Source, output: Output, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.model, self.files, self.output, self.dtype, self.device = model, files, output, dtype, device
        self.slots = _fill(model, files)
        _move(model, device)
        self.name_of = {slot.name: name for name, group in self.slots.items() for slot in group}
        self.empty = {name: group[0].tensor for name, group in self.slots.items()}

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        """Load everything at once: modules may use weights of others without calling them, which cannot be
        predicted."""
        inner = tuple(f"{block}." for block in blocks)
        return self._loaded([slot for slot in self.name_of if not slot.startswith(inner)])

    def inside(self, name: str) -> AbstractContextManager[None]:
        return self._loaded([slot for slot in self.name_of if f"{slot}.".startswith(f"{name}.")])

    @contextlib.contextmanager
    def _loaded(self, slots: list[str]) -> Iterator[None]:
        loaded = self._load(slots)
        try:
            yield
        finally:
            for name in loaded:
                for slot in self.slots[name]:
                    slot.put(self.empty[name])

    def done(self, step: str) -> bool:
        return step in self.output.done

    def finish(self, step: str) -> None:
        """Write the remaining tensors of that block, or of no block, unchanged."""
        if self.done(step):
            return
        inner = "" if step == REST else f"{step}."
        for name, group in self.slots.items():
            if name not in self.output.names and any(slot.name.startswith(inner) for slot in group):
                held = group[0].tensor
                self.output.add(name, self.value(name) if held.device.type == "meta" else held.detach())
        self.output.finish(step)

    def value(self, name: str) -> Tensor:
        ((_, stored),) = self.files.read([name])
        return cast_floats(stored, self.dtype)

    def _load(self, names: list[str]) -> list[str]:
        """Load those that are on meta, with all tensors tied to them; returns their names in the files."""
        every = dict.fromkeys(map(self.name_of.__getitem__, names))
        wanted = [name for name in every if self.slots[name][0].tensor.is_meta]
        written = self.output.manifest
        ready = [name for name in wanted if name in written.tensors and written.tensors[name].shard in written.shards]
        tensors = self._written(written, ready)
        for name in wanted:
            fill(self.slots[name], tensors[name] if name in tensors else self.value(name).to(self.device))
        return wanted

    def _written(self, manifest: Manifest, names: list[str]) -> dict[str, Tensor]:
        if not names:
            return {}
        entries = {name: manifest.tensors[name] for name in names}
        part = Manifest(entries, {}, {entry.shard: manifest.shards[entry.shard] for entry in entries.values()}, "")
        with Shards(self.output.staged, part) as shards:
            return {
                name: read_tensor(shards, self.output.staged, entry, self.device) for name, entry in entries.items()
            }


def _fill(model: nn.Module, files: Source) -> dict[str, list[Slot]]:
    """The slots of each tensor of ``files``; buffers that the model has computed are filled from the files.
    CheckpointError if the names do not match."""
    found: dict[str, list[Slot]] = {}
    lost, blank = [], []
    for group in _by_tensor(slots(model)):
        names = [slot.name for slot in group if slot.name in files.tensors and slot.name not in files.tied]
        if names:
            found[names[0]] = group
        elif group[0].buffer != "derived":
            lost.append(group[0].name)
        elif group[0].tensor.device.type == "meta":
            blank.append(group[0].name)
    if blank:
        raise ArgumentError(
            f"buffers that {type(model).__name__} computes when it is built have no numbers, since all of it was built "
            f"on meta: {shortened(blank, 3)}. Only its parameters should be there, as in the model that "
            f"bitport.integrations.huggingface.empty_model(directory) returns; or give these buffers their numbers"
        )
    unknown = [name for name in files.tensors if name not in files.tied and name not in found]
    wrong = [name for name in found if tuple(found[name][0].tensor.shape) != files.tensors[name].shape]
    if lost or unknown or wrong:
        raise CheckpointError(
            f"the files in {files.path} do not hold the weights of {type(model).__name__} as it has them, so they "
            f"cannot be brought block by block. Only in the model: {shortened(lost, 3) or '-'}; only in the files: "
            f"{shortened(unknown, 3) or '-'}; of another shape: {shortened(wrong, 3) or '-'}. Load the model they "
            f"hold in Python and calibrate it whole: bitport.quantize_(model, .., calibrate=batches)"
        )
    for name in [name for name, group in found.items() if group[0].tensor.device.type != "meta"]:
        ((_, value),) = files.read([name])
        fill(found[name], value)
    return found


def _move(model: nn.Module, device: torch.device) -> None:
    """Move what is not on meta; tied tensors stay tied."""
    if device.type == "cpu":
        return
    for group in _by_tensor(slot for slot in slots(model) if slot.tensor.device.type != "meta"):
        fill(group, group[0].tensor.detach().to(device))


def _by_tensor(found: Iterable[Slot]) -> list[list[Slot]]:
    """Group slots that share a tensor."""
    groups: dict[object, list[Slot]] = {}
    for slot in found:
        groups.setdefault(identity(slot.tensor), []).append(slot)
    return list(groups.values())
