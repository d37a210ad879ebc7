"""Read a checkpoint by docs/formats.md and docs/numerics.md alone, in numpy: what bitport reads is judged by this.

Number types and tables are taken from the pages themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.meta.tree import table

Array = NDArray[Any]

TYPES = {row[0]: row for row in table("numerics.md", "name")}
TABLES = {row[0].strip("`"): np.float32(row[1].split(", ")) for row in table("numerics.md", "table")}
PLAIN = {f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}


def parts(directory: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, bytes]]]:
    """(name, its entry, its scheme or {}, part -> bytes) of every tensor."""
    manifest = json.loads((directory / "bitport.json").read_text())
    shards = {name: (directory / name).read_bytes() for name in manifest["shards"]}
    for name, entry in manifest["tensors"].items():
        shard = shards[entry["shard"]]
        start = 8 + int.from_bytes(shard[:8], "little")
        header = json.loads(shard[8:start])
        found = {}
        for part in entry["parts"]:
            first, end = header[f"{name}.{part}" if part else name]["data_offsets"]
            found[part] = shard[start + first : start + end]
        yield name, entry, manifest["schemes"].get(entry.get("scheme"), {}), found


def value(entry: dict[str, Any], scheme: dict[str, Any], data: dict[str, bytes]) -> Array:
    """A quantized tensor in float32."""
    found = {name: _floats(data[name], **{**part, "crc32": 0}) for name, part in entry["parts"].items()}
    shape, weight = entry["shape"], scheme["weight"]
    if entry["transposed"]:
        shape = [*shape[:-2], shape[-1], shape[-2]]
    stack = found["qdata"].ndim > 2
    *_, n, k = shape if stack else (shape[0], int(np.prod(shape[1:])))
    with np.errstate(all="ignore"):
        numbers = _numbers(found["qdata"], weight["dtype"], k)
        zero = _spread(found["zero"], weight["block"], n, k) if "zero" in found else _middle(weight["dtype"])
        scale = found["scale"] * found.get("scale2", np.float32(1))
        w = (numbers - zero) * _spread(scale, weight["block"], n, k)
        w[..., found.get("perm", np.arange(k)).astype(int)] = w.copy()
        w = w * found.get("pre_scale", np.float32(1))
    return w.swapaxes(-1, -2) if entry["transposed"] else w.reshape(entry["shape"])


def _spread(blocks: Array, block: list[int], n: int, k: int) -> Array:
    rows, columns = block[0] or n, block[1] or k
    return blocks.repeat(rows, -2)[..., :n, :].repeat(columns, -1)[..., :k]


def _middle(name: str) -> Any:
    bits = int(name[3:]) if name.startswith("int") else 0
    return np.float32(0 if not bits else 0.5 if bits == 1 else 2 ** (bits - 1))


def _numbers(data: Array, name: str, k: int) -> Array:
    """What the codes of a row mean, before zero and scale."""
    if data.dtype == np.float32:  # a type of 8 bits, which lies there as itself
        return data
    width = int(name[3:]) if name.startswith("int") else int(TYPES[name][1])
    bits = np.unpackbits(data, axis=-1, bitorder="little")
    assert not bits[..., width * k :].any(), "a row is padded with zeros"
    codes = bits[..., : width * k].reshape(*data.shape[:-1], k, width) @ (1 << np.arange(width))
    if name.startswith("int"):
        return codes.astype(np.float32)
    return TABLES[name][codes] if name in TABLES else _float(codes, name)


def _float(codes: Array, name: str) -> Array:
    """s eeee mmm, bias 7: as its row in the table of number types says."""
    _, bits, pattern, _, _, special, _ = TYPES[name]
    fields, bias = re.match(r"([sem ]+), bias (\d+)", pattern).groups()  # type: ignore[union-attr]
    wide, e, m = int(bits), fields.count("e"), fields.count("m")
    sign = codes >> (e + m) if "s" in fields else 0 * codes
    exponent, mantissa = codes >> m & (1 << e) - 1, codes & (1 << m) - 1
    assert wide == fields.count("s") + e + m
    normal = np.ldexp(1 + mantissa / (1 << m), exponent - int(bias))
    small = np.ldexp(mantissa / (1 << m), 1 - int(bias))
    found = np.where((exponent == 0) & ("s" in fields), small, normal)
    if special.startswith("NaN"):
        found = np.where(codes & (1 << e + m) - 1 == (1 << e + m) - 1, np.nan, found)
    elif special.startswith("infinity"):
        found = np.where(exponent == (1 << e) - 1, np.where(mantissa == 0, np.inf, np.nan), found)
    return np.float32(np.where(sign == 1, -found, found))


def _floats(data: bytes, dtype: str, shape: list[int], crc32: int) -> Array:
    """A part: uint8 as it is, everything else in float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype.startswith("float8"):
        name = dtype.removesuffix("fn").removesuffix("fnu")
        return _float(np.frombuffer(data, np.uint8).astype(int), name).reshape(shape)
    found = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return found if dtype == "uint8" else found.astype(np.float32)
