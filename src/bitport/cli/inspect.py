"""``bitport inspect``: show the contents of a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from bitport.checkpoint import Entry, read_manifest
from bitport.checkpoint.dtypes import name_of
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.checkpoint.shards import check_data
from bitport.cli.common import add_verb, location, show
from bitport.cli.safetensors_files import Stored, stored_tensors
from bitport.errors import ArgumentError
from bitport.interop import READERS
from bitport.interop.sources import method_of
from bitport.report.text import size, table


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "inspect",
        run,
        "Show what a checkpoint holds. Schemes, sizes, bits per weight and tied names of a bitport directory, a "
        "Hugging Face directory or a safetensors file; weights are read only for --verify.",
        "llama-int4",
        "llama-int4 --tensors",
        "llama-int4 --verify",
        "model.safetensors --json",
    )
    verb.add_argument("path", type=location, help="a directory or a safetensors file")
    verb.add_argument("--tensors", action="store_true", help="list every tensor")
    verb.add_argument("--verify", action="store_true", help="read all data and compare it with the checksums")


def run(args: argparse.Namespace) -> int:
    data = examine(args.path)
    if args.verify:
        if data["format"] != "bitport":
            raise ArgumentError(f"{args.path} holds no checksums: only a bitport checkpoint can be verified")
        check_data(args.path, read_manifest(args.path))
    shown = data if args.tensors else {key: value for key, value in data.items() if key != "tensors"}
    show(args, shown, _text(shown))
    return 0


def examine(path: Path) -> dict[str, Any]:
    data: dict[str, Any]
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        tensors = [Stored(e.name, _kind(e), e.shape, e.nbytes, e.shard) for e in manifest.tensors.values()]
        schemes = [str(scheme) for scheme in manifest.schemes if scheme]
        data = {"format": "bitport", "version": manifest.bitport, "schemes": schemes, "tied": manifest.tied}
    else:
        tensors = stored_tensors(path)
        data = {"format": "safetensors", "version": None, "schemes": [], "tied": {}, "quantized_by": method_of(path)}
    kinds = dict.fromkeys(tensor.kind for tensor in tensors)
    return {
        "path": str(path),
        **data,
        "kinds": [{"kind": kind, **_sum([t for t in tensors if t.kind == kind])} for kind in kinds],
        "total": _sum(tensors),
        "files": sorted({tensor.file for tensor in tensors}),
        "tensors": [dataclasses.asdict(tensor) for tensor in tensors],
    }


def _kind(entry: Entry) -> str:
    return str(entry.scheme) if entry.scheme else name_of(entry.dtype)


def _sum(tensors: list[Stored]) -> dict[str, Any]:
    weights, nbytes = sum(math.prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    bits = 8 * nbytes / max(weights, 1)
    return {"tensors": len(tensors), "weights": weights, "bytes": nbytes, "bits_per_weight": bits}


def _text(data: dict[str, Any]) -> str:
    rows = [*data["kinds"], {"kind": "total", **data["total"]}]
    cells = [
        (row["kind"], row["tensors"], f"{row['weights']:,}", size(row["bytes"]), f"{row['bits_per_weight']:.3f}")
        for row in rows
    ]
    by = f", written by bitport {data['version']}" if data["version"] else ""
    if data.get("quantized_by"):
        read = "reads it" if data["quantized_by"] in READERS else f"reads {', '.join(READERS)}"
        by = f", quantized by {data['quantized_by']} (bitport convert {read})"
    lines = [
        f"{data['path']}: {data['format']}{by}, {len(data['files'])} file{'s' * (len(data['files']) != 1)}",
        table(("numbers", "tensors", "weights", "size", "bits/weight"), cells),
        *(f"tied: {alias} = {name}" for alias, name in data["tied"].items()),
    ]
    if "tensors" in data:
        listed = [(t["name"], t["kind"], "x".join(map(str, t["shape"])), size(t["nbytes"])) for t in data["tensors"]]
        lines += ["", table(("tensor", "numbers", "shape", "size"), listed)]
    return "\n".join(lines)
