"""Run a package in Python: each method is a function, and the weights are shared and mapped from the file."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bitport.arguments import path_of
from bitport.checkpoint.dtypes import READABLE, countable, from_bytes
from bitport.checkpoint.safetensors_reader import ALIGNED, SafetensorsReader
from bitport.checksum import crc32
from bitport.errors import ArgumentError, CheckpointError, ExportError, cut
from bitport.export.archive import ArchiveReader
from bitport.export.level import RUN_BY
from bitport.export.weights import CHUNK, PAD

MANIFEST = "extra/bitport.json"
WRONG = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(zipfile.BadZipFile, CheckpointError),
)
"""Exceptions that reading a damaged package may raise."""
FORMAT, VERSION = "bitport-package", 3


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Program:
    """Open the package ``path``; ExportError if it is damaged or not for this machine. ``verify``: read all weights
    once and compare their checksum."""
    file = path_of(path, "path")
    try:
        with ArchiveReader(file) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            _check(manifest)
            listed = {}
            for name, method in manifest["methods"].items():
                _compare(archive.read(method["code"]["entry"]), method["code"])
                listed[name] = json.loads(archive.read(method["constants"]["entry"]))
                _check_example(name, method, archive)
            stored = manifest["weights"]
            inside = "entry" in stored
            start, size = archive.place(stored["entry"]) if inside else (0, stored["size"])
        where = file if inside else file.with_name(Path(stored["file"]).name)
        if (not inside and where.stat().st_size != size) or size != stored["size"]:
            raise ExportError(f"the weights in {where} have another size than the package says: {size} bytes")
        if verify:
            _verify(where, start, stored)
        with SafetensorsReader(where, mapped=True, start=start, size=size) as reader:
            weights = {name: reader.read(name) for name in reader.tensors if not name.startswith(PAD)}
            assert reader.mapped is not None
            data = reader.mapped[start : start + size]
        if not inside:
            _check_header(where, data, stored["header"])
        methods = {
            name: Function(file, name, entry, manifest["dims"], _constants(data, listed[name]))
            for name, entry in manifest["methods"].items()
        }
    except WRONG as error:
        told = cut(f"{type(error).__name__}: {error}")
        raise ExportError(f"{file} is no whole package of bitport: {told}") from error
    except ExportError as error:
        raise ExportError(cut(str(error))) from error
    return Program(file, manifest, methods, weights)


def _check(manifest: dict[str, Any]) -> None:
    if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
        raise ExportError(f"this is {manifest['format']} of version {manifest['version']}, not {FORMAT} {VERSION}")
    target = manifest["target"]
    here, able = platform.machine(), torch.backends.cpu.get_cpu_capability()
    if target["machine"] != here or (target["level"] and able not in RUN_BY[target["level"]]):
        raise ExportError(f"it was compiled for {target['machine']} {target['level']}; this is {here} with {able}")


def _check_example(name: str, method: dict[str, Any], archive: ArchiveReader) -> None:
    if method["example"] is None:
        return
    archive.place(method["example"]["entry"])
    counts = {"output": len(method["outputs"]), "after": len(method["inputs"])}
    for key, allowed in method["example"]["atol"].items():
        kind, _, at = key.partition(".")
        if not at.isdecimal() or int(at) >= counts.get(kind, 0) or not isinstance(allowed, int | float):
            raise ExportError(f"{name} has no {key} for which an error of {allowed!r} could be allowed")


def _compare(data: bytes, wanted: dict[str, Any]) -> None:
    if (len(data), crc32(data)) != (wanted["size"], wanted["crc32"]):
        raise ExportError(f"{wanted['entry']} is damaged: its checksum differs from the manifest's")


def _verify(path: Path, start: int, wanted: dict[str, Any]) -> None:
    found, left = 0, wanted["size"]
    with open(path, "rb") as file:
        file.seek(start)
        while left and (part := file.read(min(CHUNK, left))):
            found, left = crc32(part, found), left - len(part)
    if left or found != wanted["crc32"]:
        raise ExportError(f"the weights in {path} are damaged: their checksum differs from the manifest's")


def _check_header(path: Path, data: Tensor, wanted: dict[str, int]) -> None:
    """Check that tensors are located as at export, since constants are found by their offset."""
    header = data[: wanted["size"]].numpy().tobytes()
    if (len(header), crc32(header)) != (wanted["size"], wanted["crc32"]):
        raise ExportError(
            f"{path} holds other tensors than the package was exported with, or holds them in other places"
        )


def _constants(data: Tensor, listed: dict[str, Any]) -> dict[str, Tensor]:
    return {name: _constant(data, wanted) for name, wanted in listed.items()}


def _constant(data: Tensor, wanted: dict[str, Any]) -> Tensor:
    shape, at, dtype = wanted["shape"], wanted["at"], READABLE[wanted["dtype"]]
    if not all(type(number) is int and number >= 0 for number in (*shape, at)):
        raise ExportError(f"a constant of the shape {shape} at {at}: these must be whole numbers")
    if not countable(shape):
        raise ExportError(f"a constant of the shape {shape} has 2^63 elements or more")
    end = at + math.prod(shape) * dtype.itemsize
    if end > len(data) or at % dtype.itemsize:
        raise ExportError(f"{dtype} {shape} at {at} does not lie within the {len(data)} bytes of the weights")
    part = data[at:end]
    return from_bytes(part if part.storage_offset() % ALIGNED == 0 else part.clone(), dtype, tuple(shape))


def _bounds(size: Any, dims: dict[str, Any]) -> tuple[int, int]:
    """The minimum and maximum of an input size."""
    least, most = dims[size] if isinstance(size, str) else (size, size)
    most = sys.maxsize if most is None else most
    if not (type(least) is type(most) is int and 0 <= least <= most):
        raise ExportError(f"the size {size!r} is from {least!r} to {most!r}: these must be whole numbers")
    return least, most


def _told(least: int, most: int) -> str:
    if least == most:
        return str(least)
    return f"{least} or more" if most == sys.maxsize else f"{least} to {most}"


class Function:
    """A method of a package."""

    def __init__(
        self, path: Path, name: str, entry: dict[str, Any], dims: dict[str, Any], constants: dict[str, Tensor]
    ) -> None:
        self.entry, self.constants = entry, constants
        self.bounds = [[_bounds(size, dims) for size in each["shape"]] for each in entry["inputs"]]
        self.dtypes = [READABLE[each["dtype"]] for each in entry["inputs"]]
        if len(constants) != entry["constants"]["count"]:
            raise ExportError(f"{len(constants)} constants are listed for {name}, not {entry['constants']['count']}")
        try:
            self.runner = torch._C._aoti.AOTIModelPackageLoader(str(path), name, False, 1, -1)
            if self.constants:
                self.runner.load_constants(self.constants, False, True, True, False)  # all, by reference without copies
        except RuntimeError as error:
            raise ExportError(f"torch does not load {name} of {path}: {error}") from error

    def flat(self, *tensors: Tensor) -> list[Tensor]:
        """Map all tensors of the arguments, in order, to all tensors of the result."""
        self._check(tensors)
        return self.runner.boxed_run(list(tensors))

    def __call__(self, *args: Any) -> Any:
        """Call with the same structure of arguments and result as the exported module."""
        given, outputs = map(pytree.treespec_loads, self.runner.get_call_spec())
        try:
            tensors = given.flatten_up_to((args, {}))  # matches dictionaries by key, in any order
        except ValueError as error:
            wanted, _ = pytree.tree_unflatten([each["name"] for each in self.entry["inputs"]], given)
            raise ArgumentError(f"the module was exported with the arguments {wanted}: {error}") from None
        return pytree.tree_unflatten(self.flat(*tensors), outputs)

    def _check(self, tensors: tuple[Tensor, ...]) -> None:
        """Check devices, dtypes and sizes, because generated code does not."""
        inputs = self.entry["inputs"]
        if len(tensors) != len(inputs):
            raise ArgumentError(f"{len(inputs)} tensors are taken, not {len(tensors)}")
        sizes: dict[str, int] = {}
        for tensor, wanted, bounds, dtype in zip(tensors, inputs, self.bounds, self.dtypes, strict=True):
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{wanted['name']} must be a tensor, not {type(tensor).__name__}")
            fits = tensor.dtype == dtype and tensor.dim() == len(wanted["shape"])
            for size, named, (least, most) in zip(tensor.shape, wanted["shape"], bounds, strict=False):
                fits = fits and least <= size <= most and size == sizes.setdefault(named, size)
            if not fits or not tensor.is_contiguous() or tensor.device.type != "cpu":
                allowed = ", ".join(_told(*each) for each in bounds)
                raise ArgumentError(
                    f"{wanted['name']} must be contiguous {wanted['dtype']} {wanted['shape']} on the CPU, of the sizes "
                    f"[{allowed}], not {tensor.dtype} {[*tensor.shape]} on {tensor.device}"
                )


class Program:
    """``program.methods["decode"](*args)`` or ``program.decode(*args)``, with arguments as at export."""

    def __init__(
        self, path: Path, manifest: dict[str, Any], methods: dict[str, Any], weights: dict[str, Tensor]
    ) -> None:
        self.path, self.manifest, self.methods = path, manifest, methods
        self.weights = weights
        """The tensors that the libraries refer to; they live as long as this object."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["methods"][name]
        except KeyError:
            raise AttributeError(f"{name}: the methods are {', '.join(self.__dict__.get('methods', ()))}") from None

    def examples(self, method: str) -> dict[str, Tensor]:
        """The recorded inputs (``input.0``), outputs (``output.0``), and contents of mutated inputs afterwards
        (``after.0``)."""
        entry = self.manifest["methods"][method]["example"]
        if entry is None:
            return {}
        with ArchiveReader(self.path) as archive:
            start, size = archive.place(entry["entry"])
        with SafetensorsReader(self.path, start=start, size=size) as file:
            return {name: file.read(name) for name in file.tensors if not name.startswith(PAD)}

    def check(self) -> dict[str, float]:
        """Run every recorded example; ExportError if a result is off. Returns the largest difference of each method,
        relative to what is allowed (1: just allowed)."""
        found = {name: entry["example"] for name, entry in self.manifest["methods"].items() if entry["example"]}
        return {
            name: compare(name, self.methods[name], self.examples(name), each["atol"]) for name, each in found.items()
        }


def compare(name: str, function: Function, example: dict[str, Tensor], atol: dict[str, float]) -> float:
    """Compare the results of ``function`` with an example; inputs that were not recorded are zeros."""
    inputs = []
    for position, each in enumerate(function.entry["inputs"]):
        given = example.get(f"input.{position}")
        if given is None and any(isinstance(size, str) for size in each["shape"]):
            raise ExportError(f"{name}: input.{position} of the example is missing, and {each['shape']} are no sizes")
        inputs.append(torch.zeros(each["shape"], dtype=READABLE[each["dtype"]]) if given is None else given.clone())
    outputs, worst = function.flat(*inputs), 0.0
    for key, allowed in atol.items():
        kind, at = key.split(".")
        if key not in example:
            raise ExportError(f"{name}: the example lacks {key}, which it is to be compared with")
        got, want = (outputs if kind == "output" else inputs)[int(at)], example[key]
        off = _difference(got, want) if got.shape == want.shape else 0.0
        if got.shape != want.shape or got.dtype != want.dtype or not off <= allowed:
            raise ExportError(
                f"{name} gives another {key} than in eager mode: {off:.3g} off, {allowed:.3g} are allowed "
                f"({got.dtype} {[*got.shape]}, not {want.dtype} {[*want.shape]})"
            )
        worst = max(worst, off / allowed if allowed else 0.0)
    return worst


def _difference(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference. Equal values count as 0, including infinities, and NaN where NaN is expected."""
    one, other = got.double(), want.double()
    apart = (one != other) & ~(one.isnan() & other.isnan())
    return float((one - other)[apart].abs().max()) if apart.any() else 0.0
