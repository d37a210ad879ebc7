"""A model in several GGUF files, NAME-00001-of-00003.gguf and so on. Each has whole tensors, and the settings::

    split.no             its number, from 0
    split.count          number of files
    split.tensors.count  number of tensors in all of them

The first has the settings of the model, and may have no tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from reprlib import repr as short

from bitport.errors import CheckpointError, shortened
from bitport.interop.gguf.header import ALIGNMENT, Header, read_header

SUFFIX = ".gguf"
"""The suffix by which files of llama.cpp are recognized."""
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
CUT = re.compile(r"(.*\.gguf)([.-](?:part|split))[-\w]*")
"""Pieces of large files on hubs, in no format: model.gguf.part1of2, model.gguf-split-a."""
NUMBER, COUNT, TENSORS, ALIGNED = "split.no", "split.count", "split.tensors.count", "general.alignment"


def model_at(path: Path) -> Path | None:
    """The GGUF file at ``path``, or that of the model in the directory ``path``, the first if there are several. None
    if there is none, or if there are safetensors files: then those are the model."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(file.suffix == ".safetensors" for file in files):
        return None
    models = sorted({_first(file) for file in files if file.suffix == SUFFIX})
    cut = next(filter(None, (CUT.fullmatch(file.name) for file in files)), None)
    if cut and not models:
        raise CheckpointError(f"{cut[0]} is a piece of a file that was cut anywhere: cat {cut[1]}{cut[2]}* > {cut[1]}")
    if len(models) > 1:
        raise CheckpointError(
            f"{path} holds {len(models)} GGUF models: {shortened(file.name for file in models)}; give one of them"
        )
    if models and models[0].is_symlink() and not models[0].exists():
        raise CheckpointError(f"{models[0]} is a link to {models[0].readlink()}, which is not there; fetch it again")
    if models and not models[0].is_file() and PART.fullmatch(models[0].name):
        _check_there(_parts(models[0]))
    return models[0] if models else None


def read_model(path: Path) -> Header:
    """The header of the model in ``path``, which may be the first of several files."""
    header = read_header(path)
    count = header.settings.get(COUNT, 1)
    if type(count) is not int or count < 1:
        raise CheckpointError(f"{path}: {COUNT} is {short(count)}, and must be a whole number from 1 on")
    if count == 1:
        return header
    named = PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise CheckpointError(f"{path} is one of {count} files, which must be called NAME-00001-of-{count:05}{SUFFIX}")
    if path != _first(path):
        raise CheckpointError(f"{path} is no first file: give {_first(path).name}")
    parts = _parts(path)
    _check_there(parts)
    return _joined(header, parts)


def _joined(first: Header, parts: list[Path]) -> Header:
    """The combined header. ``first``: that of the first of ``parts``."""
    tensors = dict(first.tensors)
    for at, part in enumerate(parts):
        header = read_header(part) if at else first
        says = {key: header.settings.get(key) for key in (NUMBER, COUNT, TENSORS)}
        if says[NUMBER] != at or says[COUNT] != len(parts) or says[TENSORS] != first.settings.get(TENSORS):
            told = ", ".join(f"{key} {short(value)}" for key, value in says.items())
            raise CheckpointError(
                f"{part} is not the file {at + 1} of {len(parts)} that its name says, or of another model ({told}); "
                f"fetch it again"
            )
        aligned = [each.settings.get(ALIGNED, ALIGNMENT) for each in (first, header)]
        if aligned[0] != aligned[1]:
            raise CheckpointError(f"{part} does not say that its data are aligned to {aligned[0]}, as {parts[0]} does")
        if twice := tensors.keys() & header.tensors.keys() if at else ():
            raise CheckpointError(f"{part} has {min(twice)} again; fetch the files anew")
        tensors.update(header.tensors)
    if first.settings.get(TENSORS) not in (None, len(tensors)):
        raise CheckpointError(
            f"{parts[0]} and the files after it hold {len(tensors)} tensors, and say that it is "
            f"{short(first.settings[TENSORS])}; fetch the files anew"
        )
    return Header(first.settings, tensors)


def _first(path: Path) -> Path:
    named = PART.fullmatch(path.name)
    return path if named is None else path.with_name(f"{named[1]}-00001-of-{named[3]}{SUFFIX}")


def _parts(first: Path) -> list[Path]:
    named = PART.fullmatch(first.name)
    assert named is not None
    count = int(named[3])
    return [first.with_name(f"{named[1]}-{number:05}-of-{named[3]}{SUFFIX}") for number in range(1, count + 1)]


def _check_there(parts: list[Path]) -> None:
    if lost := [part.name for part in parts if not part.is_file()]:
        there = len(parts) - len(lost)
        raise CheckpointError(
            f"{parts[0].parent} has {there} of the {len(parts)} files of a model; fetch {shortened(lost)}"
        )
