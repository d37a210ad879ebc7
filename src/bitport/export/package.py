"""Packages: the libraries of several methods, their shared weights, and a manifest (docs/deploy.md)."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from bitport.checksum import crc32
from bitport.errors import ArgumentError
from bitport.export import signature
from bitport.export.archive import ArchiveWriter, as_bytes
from bitport.export.checks import check_target
from bitport.export.compile import check_compiler, compile_library, graph_of, lowered
from bitport.export.constants import Constant, Constants
from bitport.export.level import check_level
from bitport.export.load import FORMAT, MANIFEST, VERSION, compare, load
from bitport.export.names import Names
from bitport.export.rows import lie_by_row
from bitport.export.trace import Method, dense, exported
from bitport.export.weights import TAGS, Written, write_weights
from bitport.numerics import packing
from bitport.report.versions import library_version

WEIGHTS_ENTRY = "extra/bitport/weights.safetensors"
EXAMPLE = "extra/bitport/examples/{}.safetensors"
CONSTANTS = "extra/bitport/constants/{}.json"
MOST_AFTER = 1 << 16
"""Maximum size in bytes of a mutated tensor that is recorded in an example."""
CODE = "data/aotinductor/{}"


def package(
    methods: Mapping[str, Method] | Method,
    path: str | os.PathLike[str],
    *,
    weights: str | None = None,
    level: str | None = None,
    examples: bool = True,
    tolerance: float | None = None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compile ``methods`` (or one, called "forward") into the package ``path`` and return its manifest.

    ``weights``: the name of a file next to the package for the weights, which are otherwise in the package.
    ``level``: the instruction set to compile for, "x86-64-v3" (AVX2) or "x86-64-v4" (AVX-512); default: the highest
    that this machine runs. ``examples``: include the methods' arguments and their results in eager mode; it is an error
    if a compiled method gives other results. ``tolerance``: the error allowed, relative to the largest number; default:
    half of the digits of the dtype. ``meta``: numbers and texts for the program that runs the package.
    """
    given = _by_name(methods)
    target, level = target_of(path, weights), check_level(level)
    _check_options(tolerance, meta)
    for name, method in given.items():
        signature.check(name, method)
    check_compiler()
    chosen = {name: dense(method) for name, method in given.items()}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "bitport": library_version(),
        "torch": torch.__version__,
        "target": {"device": "cpu", "machine": platform.machine(), "level": level},
        "weights": None,
        "methods": {},
        "dims": {},
        "meta": dict(meta or {}),
    }
    recorded: dict[str, dict[str, Tensor]] = {}
    names = Names({name: method.module for name, method in chosen.items()})
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".bitport-") as folder,
        tempfile.TemporaryDirectory() as compiling,  # torch passes paths to compilers unquoted
    ):
        draft = Path(folder, target.name)
        with ArchiveWriter(draft, target.stem) as archive:
            programs = {name: lowered(exported(method)) for name, method in chosen.items()}
            graphs = {name: graph_of(program) for name, program in programs.items()}
            lie_by_row(graphs.values(), names)
            constants = Constants(graphs, names)
            beside = None if weights is None else Path(folder, weights)
            manifest["weights"], found = _store(constants, archive, draft, beside)
            for name, method in chosen.items():
                entry, sizes = signature.describe(name, method, programs[name])
                code, listed = _compile(
                    name, programs.pop(name), graphs.pop(name), Path(compiling, name), level, archive
                )
                entry |= code | _list(name, {each: found[name][each] for each in listed}, archive)
                _add_sizes(manifest["dims"], sizes)
                entry["example"] = None
                if examples:
                    recorded[name] = _record(method, entry["inputs"])
                    entry["example"] = _example(name, _stored(recorded[name], entry["inputs"]), tolerance, archive)
                manifest["methods"][name] = entry
            archive.add(MANIFEST, json.dumps(manifest, indent=1).encode())
        program = load(draft)
        for name, tensors in recorded.items():
            compare(name, program.methods[name], tensors, _within(tensors, tolerance))
        if beside is not None:
            os.replace(beside, target.with_name(beside.name))
        os.replace(draft, target)
    return manifest


def _by_name(methods: Mapping[str, Method] | Method) -> Mapping[str, Method]:
    chosen = {"forward": methods} if isinstance(methods, Method) else methods
    if not isinstance(chosen, Mapping) or not chosen:
        given = type(methods).__name__ if methods else repr(methods)
        raise ArgumentError(f"methods are a Method(module, args), or a dictionary of some by name, not {given}")
    return chosen


def _check_options(tolerance: float | None, meta: Mapping[str, Any] | None) -> None:
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise ArgumentError(f"tolerance is a part of the largest number, such as 0.01, not {tolerance!r}")
    try:
        json.dumps(dict(meta or {}))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"meta is a dictionary of what JSON can hold, numbers and texts: {error}") from None


def target_of(path: str | os.PathLike[str], weights: str | None) -> Path:
    """Check where a package and the file of its weights are to be written."""
    target = check_target(path, ".pt2", "a package")
    named = isinstance(weights, str) and Path(weights).name == weights and weights not in ("", ".", "..", target.name)
    if weights is not None and not named:
        raise ArgumentError(f"weights is the name of a file beside the package, such as model.weights, not {weights!r}")
    return target


def _compile(
    name: str,
    program: torch.export.ExportedProgram,
    graph: fx.GraphModule,
    folder: Path,
    level: str,
    archive: ArchiveWriter,
) -> tuple[dict[str, Any], list[str]]:
    """Compile a method; returns its "code" entry and the names of the constants that it needs."""
    folder.mkdir()
    library, *others = compile_library(program, graph, folder, level)
    code = f"{CODE.format(name)}/{library.name}"
    data = library.read_bytes()
    archive.add(code, data)
    for file in others:
        archive.add(f"{CODE.format(name)}/{file.name}", file.read_bytes())
    return {"code": {"entry": code, "size": len(data), "crc32": crc32(data)}}, _wanted(library)


def _list(name: str, constants: Mapping[str, Constant], archive: ArchiveWriter) -> dict[str, Any]:
    """Write the list of a method's constants; returns its "constants" entry."""
    listed = {name: {"dtype": TAGS[each.dtype], "shape": each.shape, "at": each.at} for name, each in constants.items()}
    place = CONSTANTS.format(name)
    archive.add(place, json.dumps(listed, separators=(",", ":")).encode())
    return {"constants": {"entry": place, "count": len(listed)}}


def _add_sizes(dims: signature.Sizes, sizes: signature.Sizes) -> None:
    """Add the bounds of a method's dynamic sizes to those of all methods."""
    for size, bounds in sizes.items():
        if dims.setdefault(size, bounds) != bounds:
            raise ArgumentError(f"the size {size!r} is {dims[size]} here and {bounds} there")


def _example(name: str, stored: dict[str, Tensor], tolerance: float | None, archive: ArchiveWriter) -> dict[str, Any]:
    """Write a method's arguments and results; returns its "example" entry."""
    place = EXAMPLE.format(name)
    archive.add(place, as_bytes(partial(write_weights, tensors=stored)))
    return {"entry": place, "atol": _within(stored, tolerance)}


def _wanted(library: Path) -> list[str]:
    """The names of the constants that a library needs."""
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return sorted(runner.get_constant_names_to_original_fqns().values())


def _record(method: Method, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The method's arguments and its results in eager mode."""
    args = pytree.tree_map(torch.clone, method.args)
    with torch.no_grad():
        outputs = pytree.tree_leaves(method.module(*args))
    before, after = pytree.tree_leaves(method.args), pytree.tree_leaves(args)
    tensors = {f"input.{at}": value for at, value in enumerate(before)}
    tensors |= {f"output.{at}": value for at, value in enumerate(outputs)}
    return tensors | {f"after.{at}": value for at, value in enumerate(after) if inputs[at]["mutated"]}


def _stored(recorded: dict[str, Tensor], inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The recorded tensors to store: without zeros whose size is static, and without large caches."""
    empty = {
        f"input.{at}" for at, each in enumerate(inputs) if all(isinstance(size, int) for size in each["shape"])
    } - {key for key, value in recorded.items() if packing.as_bytes(value).count_nonzero()}
    large = {key for key, value in recorded.items() if key.startswith("after") and value.nbytes > MOST_AFTER}
    return {key: value for key, value in recorded.items() if key not in empty | large}


def _within(tensors: dict[str, Tensor], tolerance: float | None) -> dict[str, float]:
    return {key: _tolerance(value, tolerance) for key, value in tensors.items() if not key.startswith("input")}


def _tolerance(value: Tensor, part: float | None) -> float:
    """The allowed absolute difference: a share of the largest finite number."""
    numbers = value.double()
    finite = numbers[numbers.isfinite()]
    if not value.is_floating_point() or not finite.numel():
        return 0.0
    part = torch.finfo(value.dtype).eps ** 0.5 if part is None else part
    return float(finite.abs().max()) * part


def _store(
    constants: Constants, archive: ArchiveWriter, draft: Path, beside: Path | None
) -> tuple[dict[str, Any], dict[str, dict[str, Constant]]]:
    """Write the weights; returns the "weights" entry and the constants of each method."""
    made: list[Written] = []

    def write(file: IO[bytes]) -> None:
        made.append(write_weights(file, constants.tensors))

    if beside is None:
        start = archive.stream(WEIGHTS_ENTRY, write)
        where = {"entry": WEIGHTS_ENTRY}
    else:
        start = 0
        with open(beside, "xb") as file:
            write(file)
        where = {"file": beside.name}
    (written,) = made
    found = constants.settle(draft if beside is None else beside, start, written)
    return {**where, "size": written.size, "crc32": written.crc32, "header": written.header}, found
