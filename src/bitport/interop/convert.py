"""Conversion of a quantized checkpoint to another format, number for number unless scales are to be rounded, with one
weight in memory at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from torch import Tensor

from bitport.arguments import bytes_of, path_of
from bitport.checkpoint.manifest import FOLDER, SAID
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.checkpoint.writer import SHARD_SIZE
from bitport.checkpoint.writer import Writer as Checkpoint
from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.interop import gguf
from bitport.interop.codec import Described, Writer, kind_of
from bitport.interop.directory import Directory
from bitport.interop.formats import WRITERS
from bitport.interop.scales import Narrowed
from bitport.interop.sources import Readable, description, source_of, upright
from bitport.report.progress import progress as with_progress
from bitport.report.text import size, table
from bitport.schemes.experts import expert_blocks
from bitport.tensor import QTensor

BITPORT = "bitport"
FORMATS = (BITPORT, *WRITERS, gguf.Writer.name)
"""The formats that can be written."""


@dataclasses.dataclass(frozen=True)
class Converted:
    """What convert() did. ``weights``: name -> scheme; ``notes``: what could not be carried over, and what was
    rounded."""

    read: str
    written: str
    weights: dict[str, str]
    others: int
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        schemes = dict.fromkeys(self.weights.values())
        rows = [(scheme, sum(each == scheme for each in self.weights.values())) for scheme in schemes]
        lines = [
            table(("scheme", "weights"), [*rows, ("as they were", self.others)]),
            f"{self.read}, {size(self.bytes_before)} -> {self.written}, {size(self.bytes_after)}",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str = BITPORT,
    config: str | Path | None = None,
    scales: str | None = None,
    shard_size: int | str = SHARD_SIZE,
    progress: bool | None = None,
    overwrite: bool = False,
) -> Converted:
    """Convert the quantized model ``source`` (a bitport checkpoint, a Hugging Face directory in one of
    :data:`bitport.interop.READERS`, or a GGUF file; of several, the first or their directory) into the directory
    ``target``, in the format ``to``: "bitport" or one of :data:`bitport.interop.WRITERS`; or into the file ``target``,
    with "gguf", which ignores ``shard_size``.

    Codes, scales and zero points keep their values (except with "float", which writes a model that is not quantized);
    ArgumentError if the format cannot hold one, and then nothing is written. Configuration, tokenizer and other files
    are copied. ``overwrite``: replace the model in ``target``.

    ``config``: for diffusion models in GGUF or ComfyUI's formats (one .safetensors file), which contain no
    configuration: the config.json of the model in diffusers, or its directory. diffusers must be installed.

    ``scales``: "float16" or "bfloat16": round float32 scales and float32 zero points to that, which is smaller and
    faster, and what some formats require; the notes say what changed. For this a bitport checkpoint may be converted
    to "bitport".
    """
    if to not in FORMATS:
        raise ArgumentError(f"cannot write {to!r}; formats are {', '.join(FORMATS)}")
    path, there = path_of(source, "source"), path_of(target, "target")
    described, limit = None if config is None else path_of(config, "config"), bytes_of(shard_size, "shard_size")
    with torch.device("cpu"):  # regardless of the user's default device
        if to == gguf.Writer.name:
            files = source_of(path, described)
            _check_file(files, there, overwrite)
            return _to_gguf(_narrowed(files, scales), there, progress)
        _check_target(path, there, to, overwrite)
        files = source_of(path, described)
        if files.format == to == BITPORT and scales is None:
            raise ArgumentError(f"{path} is a checkpoint of bitport already")
        write = _to_bitport if to == BITPORT else _to_others
        return write(_narrowed(files, scales), there, to, limit, progress)


def _narrowed(files: Readable, scales: str | None) -> Readable:
    return files if scales is None else Narrowed(files, scales)


def _to_bitport(files: Readable, directory: Path, to: str, shard_size: int, progress: bool | None) -> Converted:
    weights: dict[str, str] = {}
    with Checkpoint(directory, shard_size=shard_size) as out:
        for name, tensor in with_progress(files.items(), len(files.names()), "converting", progress):
            out.add(name, tensor)
            if isinstance(tensor, QTensor):
                weights[name] = str(tensor.scheme)
        _check_any(files, weights)
        for alias, name in files.tied.items():
            out.tie(alias, name)
        for relative, content in files.others({"quantization_config": SAID}):
            out.carry(relative, content)
    others = len(files.names()) - len(weights)
    return Converted(files.format, to, weights, others, files.nbytes, out.manifest.nbytes, tuple(files.notes))


def _to_others(files: Readable, directory: Path, to: str, shard_size: int, progress: bool | None) -> Converted:
    writer = WRITERS[to]()
    _check_all(writer, files)
    blocks = expert_blocks(files.names())
    weights: dict[str, str] = {}
    left: list[str] = []
    plain: list[str] = []
    with Directory(directory, shard_size, writer.room(files.names())) as out:
        for name, tensor in with_progress(files.items(), len(files.names()), "converting", progress):
            if isinstance(tensor, QTensor):
                _check(writer, description(name, tensor, blocks))
                for key, part in writer.write(name, upright(tensor) if writer.upright else tensor).items():
                    out.add(key, part)
                weights[name] = str(tensor.scheme)
                continue
            out.add(name, tensor)
            plain.append(name)
            if is_layer(name, tensor):
                left.append(name.rpartition(".")[0])
        _check_any(files, weights)
        left += [alias.rpartition(".")[0] for alias, name in files.tied.items() if name not in weights]
        said = writer.config(left)
        quantization = dict.fromkeys(writer.keys, said) if said else {}
        others = dict(files.others(quantization))
        if quantization:  # needed even if the source has no config.json
            others.setdefault(Path("config.json"), json.dumps(quantization, indent=2) + "\n")
        out.publish({**others, **writer.files()}, writer.metadata(plain))
    notes = (*files.notes, *writer.notes)
    return Converted(files.format, to, weights, len(plain), files.nbytes, out.nbytes, notes)


def _to_gguf(files: Readable, target: Path, progress: bool | None) -> Converted:
    try:
        writer = gguf.Writer(files.names(), files.tied, dict(files.others({})))
    except ArgumentError as error:
        raise ArgumentError(f"{files.path} cannot be written as {gguf.Writer.name}: {error}") from error
    _check_all(writer, files)
    names, blocks = files.names(), expert_blocks(files.names())
    weights: dict[str, str] = {}
    with writer.output(target, files.described()) as out:
        for name, tensor in with_progress(files.items(), len(names), "converting", progress):
            if name in writer.left:
                continue
            if isinstance(tensor, QTensor):
                _check(writer, description(name, tensor, blocks))
                weights[name] = str(tensor.scheme)
            writer.write(out, name, tensor)
        _check_any(files, weights)
        out.publish()
    notes = (*files.notes, *writer.notes)
    others = len(names) - len(writer.left) - len(weights)
    return Converted(files.format, writer.name, weights, others, files.nbytes, out.nbytes, notes)


def _check_any(files: Readable, weights: dict[str, str]) -> None:
    if not weights:
        raise CheckpointError(f"{files.path} says that it is quantized by {files.format}, and holds no such weight")


def is_layer(name: str, tensor: Tensor) -> bool:
    """Whether a float tensor looks like the weight of a layer that could have been quantized."""
    kind = kind_of(name, tuple(tensor.shape))
    return tensor.dim() == 2 and name.endswith(".weight") and kind in ("linear", "other")


def _check(writer: Writer | gguf.Writer, q: Described) -> None:
    if reason := writer.refuses(q):
        raise ArgumentError(f"{q.name} ({q.scheme}) cannot be written as {writer.name}: {reason}")


def _check_all(writer: Writer | gguf.Writer, files: Readable) -> None:
    """ArgumentError with all weights that cannot be written, grouped by reason, before anything is read."""
    refused: dict[str, list[str]] = {}
    for q in files.described():
        if reason := writer.refuses(q):
            refused.setdefault(reason, []).append(q.name)
    if refused:
        told = "; ".join(f"{reason}: {shortened(names, 3)}" for reason, names in refused.items())
        raise ArgumentError(f"{files.path} cannot be written as {writer.name}. {told}")


def _check_file(files: Readable, target: Path, overwrite: bool) -> None:
    if target.suffix != gguf.SUFFIX or target.is_dir():
        name = target.with_suffix(gguf.SUFFIX)
        raise ArgumentError(f"GGUF is one file: give its name, such as {name}, and not {target}")
    if isinstance(files, gguf.Gguf) and target.resolve() in (path.resolve() for path in files.paths):
        raise ArgumentError(f"{target} is the source, or a part of it; choose another name")
    if target.exists() and not overwrite:
        raise ArgumentError(f"{target} is there already; --overwrite replaces it")


def _check_target(source: Path, target: Path, to: str, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{target} is a file; give a directory")
    there = target.resolve()
    places = {source.resolve(), source.parent.resolve() / source.name}  # two, if it is a link
    if any(there.is_relative_to(here) or here.is_relative_to(there) for here in places):
        raise ArgumentError(f"one of {target} and the source {source} lies in the other; choose another directory")
    if (target / FOLDER).exists():
        raise ArgumentError(
            f"{target / FOLDER} is there, from a run that ended early or is still going on; remove it first"
        )
    ours, others = (target / MANIFEST).exists(), (target / "config.json").exists() and not (target / MANIFEST).exists()
    if (others if to == BITPORT else ours) or ((ours or others) and not overwrite):
        how = "remove it" if overwrite else "--overwrite replaces one of the same format"
        raise ArgumentError(f"{target} holds a {'checkpoint of bitport' if ours else 'model'} already; {how}")
