"""A checkpoint written in resumable steps.

Everything is written to the folder ``unfinished`` of the output directory: a journal, activations, and in a folder
``checkpoint`` the files of the result. The journal is replaced atomically (os.replace) whenever a step is finished;
anything that a killed run wrote after that is discarded. At the end the files move to the output directory, the
manifest last, and what is left in the folder is removed, the journal last. Names and contents depend only on the
fingerprint, so an interrupted run produces the same files as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from bitport.calibrate.processes import Processes
from bitport.checkpoint.concurrent_writers import clear, hold, locked, manifest_text
from bitport.checkpoint.dtypes import to_bytes
from bitport.checkpoint.manifest import FOLDER, NAME, Manifest
from bitport.checkpoint.parse import parse_manifest, read_manifest
from bitport.checkpoint.source import Source
from bitport.checkpoint.writer import Writer, move, sync_directory, write_new
from bitport.errors import ArgumentError, CheckpointError, remedy
from bitport.report import LayerReport
from bitport.report.versions import library_version
from bitport.schemes import Plan

JOURNAL = "journal.json"
STAGED = "checkpoint"
"""The folder of the result, in which files that are carried over may have any name."""

T = TypeVar("T")

Fingerprint = dict[str, str]
"""Everything that determines the bytes of the result: name -> value, or a hash of it."""


class Output:
    """``with Output(..) as output:`` lets no other run write there until the block is left, whether the run that it
    holds has finished or failed and is to be resumed."""

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        shard_size: int,
        *,
        resume: bool,
        overwrite: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """``resume``: continue an earlier run, if there is one; ``overwrite``: discard it, and replace an existing
        checkpoint. ``processes``: those that all add the same tensors and finish the same steps; the first writes."""
        self.processes = processes or Processes()
        self.directory, self.folder, self.fingerprint = directory, directory / FOLDER, fingerprint
        self.staged = self.folder / STAGED
        self.let_go: Callable[[], object] = lambda: None
        check_free(directory, resume=resume, overwrite=overwrite)
        with _resumable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.processes.first:
                self.let_go = hold(self.folder, self)
        try:
            self._begin(shard_size, overwrite=overwrite)
        except BaseException:
            self.let_go()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _begin(self, shard_size: int, *, overwrite: bool) -> None:
        writes, fingerprint = self.processes.first, self.fingerprint
        with _resumable(self.folder):
            if overwrite and unfinished(self.directory):
                _empty(self.folder)
        state = _read(self.folder / JOURNAL, fingerprint)
        self.fresh = state is None
        """Whether there was no earlier run to continue."""
        self.done: list[str] = state.done if state else []
        self.layers = {layer.name: layer for layer in state.reports()} if state else {}
        self.closed: bool = state.closed if state else False
        self.act_scales: dict[str, float] | None = state.act_scales if state else None
        """Static input scales by weight, once measured."""
        begun = parse_manifest(state.manifest.encode(errors="surrogatepass"), self.folder / JOURNAL) if state else None
        self.names = set(begun.tensors) if begun else set()
        self.resumed = len(self.done)
        with _resumable(self.folder):
            self.staged.mkdir(exist_ok=True)
            if writes and not self.closed:
                _remove(self.staged, set(begun.shards) if begun else set())  # what no finished step has written
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
        self.writer = _Staged(self.staged, shard_size=shard_size, id=digest[:8], begun=begun)
        if writes and self.fresh:
            self._note()

    @property
    def manifest(self) -> Manifest:
        return self.writer.manifest

    def add(self, name: str, tensor: Tensor) -> None:
        self.names.add(name)
        self.processes.shared(0, lambda: self.writer.add(name, tensor))

    def finish(self, step: str) -> None:
        """Commit what was added since the last step to disk."""
        self.done.append(step)

        def commit() -> None:
            self.writer.end_shard()
            self._note()

        self.processes.shared(0, commit)

    def keep_scales(self, act_scales: dict[str, float]) -> None:
        """Commit the scales, to survive a killed run."""
        self.act_scales = act_scales
        self.processes.shared(0, self._note)

    def publish(self, tied: dict[str, str], order: Iterable[str], carry: Iterable[tuple[Path, str | Path]]) -> None:
        """Publish the checkpoint in the directory. ``order``: of the tensors in the manifest; ``carry``: (name, text or
        file to copy)."""
        if not self.closed:
            self.writer.tied = {}
            for alias, name in tied.items():
                self.writer.tie(alias, name)
            self.writer.entries = {name: self.writer.entries[name] for name in order}
            for relative, content in carry:
                self.writer.carry(relative, content)
            self.writer.close()
            self.closed = True
            self._note()
        self._move()

    def _move(self) -> None:
        files = [path for path in sorted(self.staged.rglob("*")) if path.is_file()]
        with _resumable(self.directory), locked(self.directory):
            replaced = manifest_text(self.directory)
            for path in sorted(files, key=lambda path: path == self.staged / NAME):
                move(path, self.directory, path.relative_to(self.staged))
            clear(self.directory, read_manifest(self.directory).shards, replaced)
            _remove(self.folder, {JOURNAL})  # by which a run that is killed here is resumed
            shutil.rmtree(self.folder)

    def _note(self) -> None:
        layers = [dataclasses.asdict(layer) for layer in self.layers.values()]
        manifest = self.writer.manifest.to_json()
        state = _Journal(self.fingerprint, self.done, self.closed, self.act_scales, layers, manifest)
        new = self.folder / f"{JOURNAL}.new"
        with _resumable(self.folder):
            new.unlink(missing_ok=True)
            write_new(new, json.dumps(dataclasses.asdict(state)).encode())
            os.replace(new, self.folder / JOURNAL)
            sync_directory(self.folder)


@dataclasses.dataclass(frozen=True)
class _Journal:
    """What the journal holds."""

    fingerprint: dict[str, str]
    done: list[str]
    closed: bool
    act_scales: dict[str, float] | None
    layers: list[dict[str, Any]]
    manifest: str

    @classmethod
    def of(cls, said: Any) -> _Journal:
        """TypeError unless ``said`` holds all this."""
        found = _typed(cls, said)
        scales = (found.act_scales or {}).values()
        if not all(isinstance(step, str) for step in found.done):
            raise TypeError("done are no names of steps")
        if not all(type(scale) is float and 0 < scale < math.inf for scale in scales):
            raise TypeError("act_scales are no scales")
        found.reports()
        return found

    def reports(self) -> list[LayerReport]:
        return [_typed(LayerReport, row) for row in self.layers]


def _typed(kind: type[T], said: Any) -> T:
    """A dataclass whose fields have types that isinstance can check, apart from what is in lists and dicts."""
    hints = typing.get_type_hints(kind)
    if not isinstance(said, dict) or said.keys() != hints.keys():
        raise TypeError(f"a {kind.__name__} has {', '.join(hints)}")
    for name, hint in hints.items():
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not isinstance(said[name], tuple(typing.get_origin(each) or each for each in kinds)):
            raise TypeError(f"{name} is a {type(said[name]).__name__}")
    return kind(**said)


class _Staged(Writer):
    """A Writer that keeps its finished shards on failure."""

    def abandon(self) -> None:
        if self.current is not None:
            self.current.abandon()
            self.current = None

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            with _resumable(self.directory):
                yield
        except CheckpointError:
            self.abandon()
            raise


@contextlib.contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Convert OSError to a CheckpointError that explains how to resume a run that writes to ``folder``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}. What finished steps wrote is kept: {remedy(error)}, then resume"
        ) from error


def unfinished(directory: Path) -> bool:
    """Whether an interrupted run has left something to resume."""
    return (directory / FOLDER / JOURNAL).is_file()


def check_free(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """ArgumentError if the directory is in use and neither option says what to do about it."""
    begun, ours = unfinished(directory), (directory / NAME).exists()
    if begun and not (resume or overwrite):
        raise ArgumentError(
            f"{directory / FOLDER} holds what an earlier run has begun: "
            f"resume it (--resume), or overwrite it (--overwrite)"
        )
    if ours and not (overwrite or (resume and begun)):
        done = "is finished, nothing is left to resume" if resume else "holds a checkpoint already"
        raise ArgumentError(f"{directory} {done}; --overwrite replaces it")
    if (directory / "config.json").exists() and not (ours or begun):
        raise ArgumentError(f"{directory} holds another model already; choose another directory, or remove it")


def discard(directory: Path) -> None:
    """Remove the unfinished output of the run that holds it."""
    if unfinished(directory):
        _empty(directory / FOLDER)
        (directory / FOLDER).rmdir()


def _empty(folder: Path) -> None:
    """Remove what is in it, the journal first: nothing can be resumed from a part of the rest."""
    (folder / JOURNAL).unlink()
    _remove(folder, set())


def _remove(folder: Path, kept: Collection[str]) -> None:
    """Remove everything in a folder except the files ``kept``."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


def fingerprint(
    files: Source,
    plan: Plan,
    by: object,
    *,
    dtype: torch.dtype | None,
    shard_size: int,
    measure: bool,
    **more: str,
) -> Fingerprint:
    """``by``: the algorithm, whose repr includes all its settings. ``more``: further determining factors."""
    stats = {file.name: file.stat() for file in files.files}
    return {
        "source": hashed(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()), files.config),
        "recipe": hashed(plan.to_json()),
        "algorithm": repr(by),
        "dtype": str(dtype),
        "shard_size": str(shard_size),
        "measure": str(measure),
        "torch": str(torch.__version__),
        "bitport": library_version(),
        **more,
    }


def hashed(*parts: Any) -> str:
    """A digest of tensors by their bytes, and of anything else by its repr."""
    digest = hashlib.sha256()
    leaves, spec = tree_flatten(parts)
    for leaf in leaves:
        tensor = isinstance(leaf, Tensor)
        what = f"{leaf.dtype} {list(leaf.shape)}" if tensor else repr(leaf)
        digest.update(f"{what}\0".encode())  # otherwise 1, 23 would be 12, 3
        digest.update(to_bytes(leaf) if tensor else b"")
    digest.update(str(spec).encode())
    return digest.hexdigest()


def _read(path: Path, expected: Fingerprint) -> _Journal | None:
    if not path.is_file():
        return None
    try:
        state = _Journal.of(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); start again with --overwrite") from error
    found = state.fingerprint
    if other := [key for key in {**found, **expected} if found.get(key) != expected.get(key)]:
        raise ArgumentError(
            f"{path.parent} was begun with another {', '.join(sorted(other))}: give the same again, or start again "
            "with --overwrite"
        )
    return state
