"""A small package in the form of docs/deploy.md whose code is no model: for tests of the reader, without torch.

python3 synthetic.py OUT.pt2 [--plain]   # --plain: as torch makes them, without a manifest
"""

from __future__ import annotations

import json
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

CODE = 'extern "C" int AOTInductorModelContainerCreateWithDevice() { return 1; }'
LIBRARY = "data/aotinductor/model/model.wrapper.so"
CONSTANTS = "extra/bitport/constants/model.json"


def library(source: str = CODE, *options: str) -> bytes:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        raise SystemExit("no C++ compiler: install g++ or clang++")
    with tempfile.TemporaryDirectory() as folder:
        code, made = Path(folder, "code.cpp"), Path(folder, "code.so")
        code.write_text(source)
        subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", *options, "-o", made, code], check=True)
        return made.read_bytes()


def tensors(named: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file: name -> (type, shape, data)."""
    header, data = {}, b""
    for name, (kind, shape, values) in named.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + data


def part(entry: str, content: bytes) -> dict[str, str | int]:
    return {"entry": entry, "size": len(content), "crc32": zlib.crc32(content)}


def contents() -> dict[str, bytes]:
    """Entry -> bytes."""
    code = library()
    weights = tensors(
        {"w": ("F32", [4, 16], bytes(256)), "scale": ("BF16", [4], bytes(8)), ".pad0": ("U8", [56], bytes(56))}
    )
    example = tensors({"input.0": ("F32", [2, 16], bytes(128)), "output.0": ("F32", [2, 4], bytes(32))})
    constants = {
        "linear.w": {"dtype": "F32", "shape": [4, 16], "at": len(weights) - 320},
        "linear.scale": {"dtype": "BF16", "shape": [4], "at": len(weights) - 64},
    }
    entries = {
        CONSTANTS: json.dumps(constants).encode(),
        "extra/bitport/weights.safetensors": weights,
        "extra/bitport/examples/model.safetensors": example,
        LIBRARY: code,
    }
    method = {
        "code": part(LIBRARY, code),
        "constants": {"entry": CONSTANTS, "count": len(constants)},
        "inputs": [{"name": "x", "dtype": "F32", "shape": ["rows", 16], "mutated": False}],
        "outputs": [{"name": "y", "dtype": "F32", "shape": ["rows", 4]}],
        "example": {"entry": "extra/bitport/examples/model.safetensors", "atol": {"output.0": 1e-3}},
    }
    manifest = {
        "format": "bitport-package",
        "version": 3,
        "bitport": "0",
        "torch": "2.13.0",
        "target": {"device": "cpu", "machine": platform.machine(), "level": "x86-64"},
        "weights": {**part("extra/bitport/weights.safetensors", weights), "header": part("", weights[:-320])},
        "methods": {"model": method},
        "dims": {"rows": [1, 64]},
        "meta": {"kind": '\u00e9\ud83d\ude00 \\ "', "list": [1, 2.5, None, True]},
    }
    return {**entries, "extra/bitport.json": json.dumps(manifest).encode(), "archive_format": b"pt2"}


def write(path: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(f"package/{name}", content)


if __name__ == "__main__":
    plain = sys.argv[2:] == ["--plain"]
    write(Path(sys.argv[1]), {LIBRARY: library(), "archive_format": b"pt2"} if plain else contents())
