"""Parse JSON that may be damaged or hostile. Every value of a manifest is checked before it is used."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from bitport.arguments import path_of
from bitport.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES, countable
from bitport.checkpoint.manifest import NAME, VERSION, Entry, Manifest, Part, checksum
from bitport.checkpoint.safetensors_reader import named
from bitport.checkpoint.shards import inside
from bitport.errors import CheckpointError, SchemeError, cut
from bitport.json_text import check_version, parsed
from bitport.report.versions import library_version
from bitport.schemes import Scheme
from bitport.tensor import PARTS

SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
LARGEST = 2**48
"""Upper limit of dimensions, blocks and file sizes."""
BUFFERS = ("persistent", "derived")


def read_manifest(directory: str | Path) -> Manifest:
    """Read the manifest of the checkpoint in ``directory``; CheckpointError if it is not valid."""
    path = path_of(directory, "directory")
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the directory of a checkpoint, which holds {NAME}")
    if not (path / NAME).is_file():
        raise CheckpointError(
            f"{path} is no bitport checkpoint: it has no {NAME}. A directory of plain safetensors files becomes one by "
            f"`bitport quantize` (bitport.checkpoint.quantize_files), and one that others have quantized by "
            f"`bitport convert` (bitport.interop.convert)"
        )
    source = inside(path, NAME)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error
    return parse_manifest(data, source)


def parse_manifest(data: bytes, source: Path) -> Manifest:
    """Parse the text of a manifest; ``source``: its path, for errors."""
    return _Parser(source).manifest(data)


def parsed_file(path: Path) -> Any:
    """The value in a JSON file of others."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return parsed(text, str(path), CheckpointError)


def json_object(path: Path) -> dict[str, Any]:
    return _object(parsed_file(path), str(path))


def parsed_object(text: str | bytes, name: str) -> dict[str, Any]:
    """The object in JSON of others. ``name``: of the file or tensor that holds it."""
    return _object(parsed(text, name, CheckpointError), name)


def _object(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is JSON, but no object: it holds {type(found).__name__}")
    return found


class _Parser:
    """Each method checks one kind of value; ``where`` identifies the value in errors."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {problem}. Fetch or save the checkpoint again")

    def manifest(self, data: bytes) -> Manifest:
        root = self.object(self.json(data), "the manifest")
        if root.get("format") != "bitport":
            self.fail(f"'format' is {reprlib.repr(root.get('format'))}, not 'bitport'")
        check_version(root.get("version"), VERSION, str(self.source), CheckpointError)
        keys = ("format", "version", "bitport", "schemes", "shards", "tied", "tensors", "crc32")
        self.keys(root, "the manifest", keys)
        if root.pop("crc32") != checksum(root):
            self.fail("its checksum does not match its content: it was damaged or edited")
        described, files, every = (self.object(root[key], f"'{key}'") for key in ("schemes", "shards", "tensors"))
        writer = self.string(root["bitport"], "'bitport'")
        schemes = {key: self.scheme(value, key, writer) for key, value in described.items()}
        shards = {self.shard_name(key): self.count(value, key) for key, value in files.items()}
        tensors = {name: self.entry(name, value, schemes, shards) for name, value in every.items()}
        self.unique(tensors)
        tied = self.tied(self.object(root["tied"], "'tied'"), tensors)
        return Manifest(tensors, tied, shards, writer)

    def json(self, data: bytes) -> Any:
        try:
            return json.loads(data, object_pairs_hook=named)
        except (ValueError, RecursionError) as error:
            self.fail(f"it is not JSON ({error})")

    def entry(self, name: str, value: Any, schemes: dict[str, Scheme], shards: dict[str, int]) -> Entry:
        where = f"tensor {reprlib.repr(name)}"
        fields = self.object(value, where)
        self.keys(fields, where, ("shard", "dtype", "shape", "parts"), ("scheme", "transposed", "buffer"))
        scheme = fields.get("scheme")
        transposed = fields.get("transposed", False)
        if scheme is not None and (not isinstance(scheme, str) or scheme not in schemes):
            self.fail(f"{where}: there is no scheme {reprlib.repr(scheme)}")
        if not isinstance(transposed, bool):
            self.fail(f"{where}: 'transposed' must be true or false, not {reprlib.repr(transposed)}")
        shard = self.string(fields["shard"], f"{where}: 'shard'")
        if shard not in shards:
            self.fail(f"{where}: shard {reprlib.repr(shard)} is not among 'shards'")
        described = self.object(fields["parts"], f"{where}: 'parts'")
        parts = {key: self.part(part, f"{where}, part {reprlib.repr(key)}") for key, part in described.items()}
        if scheme is None and list(parts) != [""]:
            self.fail(f"{where}: a tensor without a scheme has the one part '', not {reprlib.repr(list(parts))}")
        if scheme is not None and (not set(parts) <= set(PARTS) or not {"qdata", "scale"} <= set(parts)):
            known = f"known are {', '.join(PARTS)}, the first two needed"
            self.fail(f"{where}: its parts are {reprlib.repr(list(parts))}; {known}")
        dtype, shape = self.dtype(fields["dtype"], where), self.shape(fields["shape"], where)
        if scheme is not None and dtype not in WEIGHT_DTYPES:
            self.fail(
                f"{where}: a quantized tensor stands for one of {', '.join(map(str, WEIGHT_DTYPES))}, not for {dtype}"
            )
        if scheme is None and (parts[""].dtype, parts[""].shape) != (dtype, shape):
            self.fail(f"{where}: its dtype and shape are not those of its part")
        buffer = fields.get("buffer", "")
        if "buffer" in fields and buffer not in BUFFERS:
            self.fail(f"{where}: 'buffer' must be one of {', '.join(BUFFERS)}, not {reprlib.repr(buffer)}")
        return Entry(name, shard, dtype, shape, parts, None if scheme is None else schemes[scheme], transposed, buffer)

    def part(self, value: Any, where: str) -> Part:
        fields = self.object(value, where)
        self.keys(fields, where, ("dtype", "shape", "crc32"))
        crc = self.count(fields["crc32"], f"{where}: 'crc32'")
        return Part(self.dtype(fields["dtype"], where), self.shape(fields["shape"], where), crc)

    def scheme(self, value: Any, key: str, writer: str) -> Scheme:
        where = f"scheme {reprlib.repr(key)}"
        try:
            return Scheme.from_dict(value)
        except SchemeError as error:
            told = f"it was written by bitport {reprlib.repr(writer)}, this is {library_version()}"
            raise CheckpointError(f"{self.source}: {where}: {cut(str(error))} ({told})") from error

    def tied(self, tied: dict[str, Any], tensors: dict[str, Entry]) -> dict[str, str]:
        for alias, name in tied.items():
            if self.string(name, "'tied'") not in tensors or alias in tensors:
                self.fail(
                    f"{reprlib.repr(alias)} is tied to {reprlib.repr(name)}: the first must be a new name, "
                    f"the second that of a tensor"
                )
        return tied

    def unique(self, tensors: dict[str, Entry]) -> None:
        seen: set[tuple[str, str]] = set()
        for entry in tensors.values():
            for part in entry.parts:
                key = (entry.shard, entry.key(part))
                if key in seen:
                    self.fail(f"two tensors use {reprlib.repr(key[1])} of {key[0]}")
                seen.add(key)

    def shard_name(self, name: str) -> str:
        if not SHARD_NAME.fullmatch(name) or ".." in name:
            self.fail(
                f"{reprlib.repr(name)} cannot be the name of a shard, which must be a plain file name, *.safetensors"
            )
        return name

    def dtype(self, value: Any, where: str) -> torch.dtype:
        if not isinstance(value, str) or value not in DTYPES:
            self.fail(f"{where}: dtype {reprlib.repr(value)} is unknown; known are {', '.join(DTYPES)}")
        return DTYPES[value]

    def shape(self, value: Any, where: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > 16:
            self.fail(f"{where}: 'shape' must be a list of at most 16 sizes, not {reprlib.repr(value)}")
        shape = tuple(self.count(size, f"{where}: 'shape'") for size in value)
        if not countable(shape):
            self.fail(f"{where}: 'shape' has 2^63 elements or more: {value}")
        return shape

    def count(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value <= LARGEST:
            self.fail(f"{where} must be a whole number from 0 to 2^48, not {reprlib.repr(value)}")
        return value

    def string(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.fail(f"{where} must be a string, not {reprlib.repr(value)}")
        return value

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(f"{where} must be an object, not {reprlib.repr(value)}")
        return value

    def keys(self, fields: dict[str, Any], where: str, needed: Sequence[str], optional: Sequence[str] = ()) -> None:
        missing, unknown = set(needed) - set(fields), set(fields) - {*needed, *optional}
        if missing or unknown:
            self.fail(f"{where}: missing keys {sorted(missing)}, unknown keys {reprlib.repr(sorted(unknown))}")
