"""The manifest: a JSON file that describes every tensor of a checkpoint and which shard holds its parts.

::

    {"format": "bitport", "version": 1, "bitport": "0.1.0", "crc32": of the rest, as canonical JSON
     "schemes": {"0": Scheme.to_dict(), ...},
     "shards":  {"model-1f2e3d4c-00001.safetensors": bytes of the file, ...},
     "tied":    {"lm_head.weight": "model.embed_tokens.weight", ...},
     "tensors": {name: {"shard", "dtype", "shape", "parts": {part: {"dtype", "shape", "crc32"}},
                        if quantized "scheme", "transposed"; if a buffer "buffer": "persistent" | "derived"}}}

The parts of a quantized tensor are those of QTensor (qdata, scale, ...) in the plain layout, under ``name.part`` in the
shard. Any other tensor has the single part "", under its own name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from typing import Any

import torch

from bitport.checkpoint.dtypes import name_of
from bitport.schemes import Scheme

NAME = "bitport.json"
INDEX = "bitport.safetensors.index.json"
"""Lists the files of a checkpoint in the format of transformers, which then downloads them."""
DIFFUSERS_INDEX = "diffusion_pytorch_model.safetensors.index.json"
"""The same for a diffusers model; diffusers looks for no other name."""
FOLDER = "unfinished"
"""Subdirectory that holds unfinished output."""
SAID = {"quant_method": "bitport"}
"""The quantization_config entry of config.json; each tensor is described by the manifest."""
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor in a shard: the data of a float tensor, or the codes, scales, .. of a quantized one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    crc32: int

    @property
    def nbytes(self) -> int:
        """Size in its shard."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor. ``buffer``: "" for a parameter, "persistent", or "derived" for a buffer outside the state_dict."""

    name: str
    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: dict[str, Part]
    scheme: Scheme | None = None
    transposed: bool = False
    buffer: str = ""

    @property
    def nbytes(self) -> int:
        """Total size of its parts."""
        return sum(part.nbytes for part in self.parts.values())

    def key(self, part: str) -> str:
        """The name of ``part`` in the shard."""
        return part_key(self.name, part)


def part_key(name: str, part: str) -> str:
    """The name in a shard of ``part`` of the tensor ``name``."""
    return f"{name}.{part}" if part else name


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: the file ``bitport.json``."""

    tensors: dict[str, Entry]
    """By name, in the order of the model."""
    tied: dict[str, str]
    """Further names of a tensor: alias -> name in ``tensors``."""
    shards: dict[str, int]
    """File name -> size in bytes."""
    bitport: str
    """The version of the library that wrote it."""

    def __repr__(self) -> str:
        return f"Manifest({len(self.tensors)} tensors, {self.nbytes} bytes in {len(self.shards)} files)"

    @property
    def nbytes(self) -> int:
        """Total size of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def schemes(self) -> dict[Scheme | None, list[Entry]]:
        """The tensors of each scheme, or None if not quantized."""
        found: dict[Scheme | None, list[Entry]] = {}
        for entry in self.tensors.values():
            found.setdefault(entry.scheme, []).append(entry)
        return found

    def to_json(self) -> str:
        """The file ``bitport.json``, as docs/formats.md describes it."""
        schemes = list(dict.fromkeys(entry.scheme for entry in self.tensors.values() if entry.scheme))
        ids = {scheme: str(at) for at, scheme in enumerate(schemes)}
        content = {
            "format": "bitport",
            "version": VERSION,
            "bitport": self.bitport,
            "schemes": {ids[scheme]: scheme.to_dict() for scheme in schemes},
            "shards": self.shards,
            "tied": self.tied,
            "tensors": {name: _described(entry, ids) for name, entry in self.tensors.items()},
        }
        return _one_line_per_tensor({**content, "crc32": checksum(content)})

    def to_index(self) -> str:
        """The text of :data:`INDEX`, which maps each file to itself: tensors are found by the manifest only."""
        dtypes = [entry.dtype for entry in self.tensors.values() if entry.dtype.is_floating_point]
        metadata = {"dtype": name_of(dtypes[0])} if dtypes else {}
        return json.dumps({"metadata": metadata, "weight_map": {name: name for name in (NAME, *self.shards)}}) + "\n"


def _one_line_per_tensor(content: dict[str, Any]) -> str:
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = (
                "{\n"
                + ",\n".join(f"  {json.dumps(name)}: {json.dumps(inner)}" for name, inner in value.items())
                + "\n }"
            )
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _described(entry: Entry, ids: dict[Scheme, str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "shard": entry.shard,
        "dtype": name_of(entry.dtype),
        "shape": list(entry.shape),
        "parts": {
            name: {"dtype": name_of(part.dtype), "shape": list(part.shape), "crc32": part.crc32}
            for name, part in entry.parts.items()
        },
    }
    if entry.scheme:
        described |= {"scheme": ids[entry.scheme], "transposed": entry.transposed}
    if entry.buffer:
        described["buffer"] = entry.buffer
    return described


def checksum(content: dict[str, Any]) -> int:
    """crc32 of a manifest without its own crc32 entry, to detect any edit or damage."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
