"""load(): read a checkpoint into a model, each tensor directly onto its device and into that device's layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from bitport import plugins
from bitport.arguments import path_of
from bitport.checkpoint.arranged import Arranged, Arrangement
from bitport.checkpoint.assemble import assembled
from bitport.checkpoint.manifest import Entry, Manifest
from bitport.checkpoint.parse import read_manifest
from bitport.checkpoint.sharded import check_sharded, read_shard
from bitport.checkpoint.shards import Shards
from bitport.checkpoint.slots import Slot, fill, identity, slots
from bitport.errors import ArgumentError, CheckpointError, counted
from bitport.nn.fsdp import adopt_, fsdp_modules, reshard_
from bitport.nn.offloaded import refuse_offloaded
from bitport.ops.device import check_device, check_present
from bitport.report.progress import progress as with_progress
from bitport.tensor import QTensor
from bitport.tensor.sharded import is_quantized, is_sharded

Model = TypeVar("Model", bound=nn.Module)


def load(
    model: Model | Callable[[], Model],
    directory: str | Path,
    *,
    device: torch.device | str | int | None = None,
    strict: bool = True,
    verify: bool = True,
    mmap: bool = True,
    progress: bool | None = None,
    arrangement: Arrangement | None = None,
) -> Model:
    """Load the checkpoint in ``directory`` into ``model`` and return the model. Its parameters are replaced by new
    ones; float tensors have the dtype of the file.

        model = load(lambda: Model(config), "model-int4", device="cuda")

    ``model``: a module, possibly on the meta device, or a function without arguments that builds one; the function is
    called with meta as the default device, so that its weights take no memory.
    ``device``: where every tensor goes; None: where the model has it, or to the CPU if it is on meta. A model whose
    parameters are sharded (DTensors) stays sharded: each process loads its own shards, to the devices of their mesh.
    ``strict``: every parameter and persistent buffer must be in the checkpoint, and nothing else; False: warn.
    ``verify``: compare all data with its checksums (about 2 GB/s). False: trust the disk, and with ``mmap`` read
    nothing before it is used.
    ``mmap``: tensors that stay on the CPU in the form of the file are views of the memory-mapped file. False: read
    everything now, for files that may be overwritten in place while the model is in use.
    ``arrangement``: for a model that has the tensors under other names or in other pieces than the checkpoint.

    Names, shapes and the headers of all shards are checked before the model is changed.
    """
    plugins.load()
    if not callable(model):
        raise ArgumentError(
            "load takes a module or a function that returns one, and then the directory of its checkpoint: the first "
            f"argument cannot be a {type(model).__name__}"
        )
    if device is not None:
        check_present(device)
    path = path_of(directory, "directory")
    held = read_manifest(path)
    built = cast(Model, model) if isinstance(model, nn.Module) else _build(model)
    refuse_offloaded(built)
    reshard_(built)
    manifest = held if arrangement is None else arrangement(held)
    filled = _match(built, path, manifest, strict, [] if built is model else _unfilled(built))
    chosen = [entry for entry in manifest.tensors.values() if entry.name in filled]
    check_sharded(built, path, [(entry, filled[entry.name][0].tensor) for entry in chosen], device)
    for scheme, where in {(entry.scheme, _device(filled[entry.name], device)) for entry in chosen}:
        if scheme is not None:
            check_device(scheme, where)
    managed = bool(fsdp_modules(built))
    with Shards(path, held, verify=verify, mmap=mmap) as shards:
        for entry in with_progress(chosen, len(chosen), "loading", progress):
            targets = filled[entry.name]
            there, where = targets[0].tensor, _device(targets, device)
            if is_sharded(there):
                read = read_shard(read_plain(shards, path, entry), there, where, packed=not managed)
            else:
                read = read_tensor(shards, path, entry, where)
            fill(targets, read)
    adopt_(built)
    return built


def _build(factory: Callable[[], Model]) -> Model:
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"load needs a module or a function that returns one, not {type(model).__name__}")
    return model


def _unfilled(model: nn.Module) -> list[str]:
    """The tensors on meta that are plain attributes of modules, which no checkpoint holds. Modules with hooks before
    their forward recompute such attributes there, as those of torch.nn.utils.weight_norm do."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta and not module._forward_pre_hooks
    ]


def _match(
    model: nn.Module, path: Path, manifest: Manifest, strict: bool, unfilled: list[str]
) -> dict[str, list[Slot]]:
    """Map each tensor of the checkpoint to the slots that it fills; CheckpointError if the two do not match.
    ``unfilled``: tensors on meta outside of slots."""
    by_name = {slot.name: slot for slot in slots(model)}
    stored = {**{name: name for name in manifest.tensors}, **manifest.tied}
    filled: dict[str, list[Slot]] = {}
    source_of: dict[object, str] = {}
    for name, source in stored.items():
        if name in by_name:
            filled.setdefault(source, []).append(by_name[name])
            source_of.setdefault(identity(by_name[name].tensor), source)
    for name, slot in by_name.items():
        if name not in stored and identity(slot.tensor) in source_of:  # tied within the model
            filled[source_of[identity(slot.tensor)]].append(slot)
    covered = {slot.name for targets in filled.values() for slot in targets}
    uncovered = [slot for slot in by_name.values() if slot.name not in covered]
    unmade = {slot.name for slot in uncovered if slot.tensor.is_meta and (slot.buffer == "derived" or not strict)}
    pairs = [(slot, manifest.tensors[source]) for source, targets in filled.items() for slot in targets]
    problems = {
        "of another shape": [
            f"{slot.name} (checkpoint {list(entry.shape)}, model {list(slot.tensor.shape)})"
            for slot, entry in pairs
            if tuple(slot.tensor.shape) != entry.shape
        ],
        "quantized in the checkpoint but a buffer in the model": [
            slot.name for slot, entry in pairs if slot.buffer and entry.scheme and not is_quantized(slot.tensor)
        ],
        "on the meta device and not in the checkpoint (build the model on a real device to have them, by load(build(), "
        "..) instead of load(build, ..))": [*(slot.name for slot in uncovered if slot.name in unmade), *unfilled],
    }
    differences = {
        "missing in the checkpoint": [
            slot.name for slot in uncovered if slot.buffer != "derived" and slot.name not in unmade
        ],
        "unknown to the model": [
            name for name, entry in manifest.tensors.items() if name not in filled and entry.buffer != "derived"
        ],
    }
    _raise_or_warn(f"{path} does not fit {type(model).__name__}", problems, differences, strict)
    return filled


def _raise_or_warn(what: str, problems: dict[str, list[str]], differences: dict[str, list[str]], strict: bool) -> None:
    fatal = {**problems, **differences} if strict else problems
    if any(fatal.values()):
        raise CheckpointError(f"{what}. {counted({**problems, **differences})}")
    if any(differences.values()):
        warnings.warn(f"{what}; loaded as far as it does. {counted(differences)}", stacklevel=4)


def _device(targets: list[Slot], device: torch.device | str | int | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    there = targets[0].tensor
    if is_sharded(there):
        return torch.device(there.device_mesh.device_type)  # type: ignore[attr-defined]
    return torch.device("cpu") if there.device.type == "meta" else there.device


def read_tensor(shards: Shards, path: Path, entry: Entry, device: torch.device) -> Tensor:
    """Read a tensor of the checkpoint at ``path``; quantized ones in the layout of ``device``."""
    tensor = read_plain(shards, path, entry)
    if isinstance(tensor, QTensor) and device.type == "cpu":  # a move to another device includes this
        return tensor.to_device_layout()
    return tensor.to(device)


def read_plain(shards: Shards, path: Path, entry: Entry) -> Tensor:
    """Like :func:`read_tensor`, on the CPU, where all of its parts can be checked, in the layout of the file."""
    if isinstance(entry, Arranged):
        return entry.made(lambda piece: read_plain(shards, path, piece))
    return assembled(path, entry, {name: shards.read(entry, name) for name in entry.parts})
