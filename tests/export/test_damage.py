"""Packages that are truncated, modified or made for another platform: an error before any of their code runs."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitport.errors import ExportError
from bitport.export import Program, load
from bitport.export.archive import ArchiveReader, ArchiveWriter
from bitport.export.load import MANIFEST, compare
from bitport.export.package import CONSTANTS, WEIGHTS_ENTRY

pytestmark = pytest.mark.xdist_group("package")  # made once, by one worker


def changed(packed: Path, target: Path, change: Callable[[dict[str, Any]], None], part: str = MANIFEST) -> Path:
    """Copy the package with a modified manifest or list of constants."""
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith(part):
                read = json.loads(data)
                change(read)
                data = json.dumps(read).encode()
            copy.writestr(entry.filename, data)
    return target


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (lambda m: m.update(version=2), "version 2"),
    "format": (lambda m: m.update(format="other"), "this is other"),
    "machine": (lambda m: m["target"].update(machine="riscv64"), "compiled for riscv64"),
    "level": (lambda m: m["target"].update(level="x86-64-v9"), "no whole package"),
    "no methods": (lambda m: m.pop("methods"), "no whole package"),
    "code": (lambda m: m["methods"]["half"]["code"].update(crc32=1), "damaged"),
    "no code": (lambda m: m["methods"]["half"]["code"].update(entry="gone.so"), "no whole package"),
    "a dtype": (lambda m: m["methods"]["half"]["inputs"][0].update(dtype="F31"), "no whole package"),
    "a size": (lambda m: m["methods"]["half"]["inputs"][0].update(shape=[1.5]), "1.5 to 1.5: .* whole numbers"),
    "another size": (lambda m: m["methods"]["half"]["inputs"][0].update(shape=["width"]), "no whole package"),
    "bounds": (lambda m: m["dims"].update(rows=[1, "64"]), "from 1 to '64': .* whole numbers"),
    "no bounds": (lambda m: m["dims"].update(rows=[8, 1]), "from 8 to 1"),
    "example": (lambda m: m["methods"]["half"].update(example=3), "no whole package"),
    "no example": (lambda m: m["methods"]["half"]["example"].update(entry="gone"), "no whole package"),
    "its results": (lambda m: m["methods"]["half"]["example"].update(atol={"output.9": 1.0}), "has no output.9"),
    "its tolerance": (lambda m: m["methods"]["half"]["example"].update(atol={"output.0": "1"}), "an error of '1'"),
    "no constants": (lambda m: m["methods"]["half"]["constants"].update(entry="gone.json"), "no whole package"),
    "their count": (lambda m: m["methods"]["half"]["constants"].update(count=1), "are listed for half, not 1"),
    "size": (lambda m: m["weights"].update(size=7), "another size"),
    "weights elsewhere": (
        lambda m: m.update(weights={"file": "/etc/passwd", "size": 7, "crc32": 0}),
        "no whole package",
    ),
}


@pytest.mark.parametrize("key", ["format", "target"])
def test_an_error_quotes_no_whole_file(key: str, packed: Path, tmp_path: Path) -> None:
    path = changed(packed, tmp_path / "changed.pt2", lambda manifest: manifest.update({key: "x" * 10**6}))
    with pytest.raises(ExportError, match=r"this is x|no whole package") as caught:
        load(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_does_not_fit(name: str, packed: Path, tmp_path: Path) -> None:
    change, said = CHANGES[name]
    with pytest.raises(ExportError, match=said):
        load(changed(packed, tmp_path / "changed.pt2", change))


def some(constants: dict[str, Any]) -> dict[str, Any]:
    """Return a constant with elements of more than one byte."""
    return next(each for each in constants.values() if each["dtype"] == "BF16")


CONSTANT_CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "beyond": (lambda c: some(c).update(at=1 << 40), "does not lie within"),
    "larger": (lambda c: some(c).update(shape=[1 << 40]), "does not lie within"),
    "before": (lambda c: some(c).update(at=-64), "whole numbers"),
    "odd": (lambda c: some(c).update(at=some(c)["at"] + 1), "does not lie within"),
    "shape": (lambda c: some(c).update(shape=[-1]), "whole numbers"),
    "beyond counting": (lambda c: some(c).update(shape=[1 << 40, 1 << 40, 0]), "2.63 elements or more"),
    "type": (lambda c: some(c).update(dtype="F31"), "no whole package"),
}


@pytest.mark.parametrize("name", CONSTANT_CHANGES)
def test_constants_that_do_not_fit(name: str, packed: Path, tmp_path: Path) -> None:
    change, said = CONSTANT_CHANGES[name]
    with pytest.raises(ExportError, match=said):
        load(changed(packed, tmp_path / "changed.pt2", change, CONSTANTS.format("half")))


@pytest.mark.parametrize("part", [0, 0.001, 0.5, 0.99, 0.9999])
def test_a_package_that_was_cut(part: float, packed: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pt2"
    shutil.copyfile(packed, cut)
    with open(cut, "r+b") as file:
        file.truncate(int(cut.stat().st_size * part))
    with pytest.raises(ExportError, match="no whole package"):
        load(cut)


def test_a_byte_that_changed(packed: Path, tmp_path: Path) -> None:
    """Detected in a library always, and in the weights when they are verified."""
    with ArchiveReader(packed) as archive:
        manifest = json.loads(archive.read(MANIFEST))
        code, weights = archive.place(manifest["methods"]["half"]["code"]["entry"]), archive.place(WEIGHTS_ENTRY)
    for (start, size), verify in ((code, False), (weights, True)):
        spoiled = tmp_path / "spoiled.pt2"
        shutil.copyfile(packed, spoiled)
        with open(spoiled, "r+b") as file:
            file.seek(start + size - 100)
            byte = file.read(1)[0]
            file.seek(start + size - 100)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(ExportError):
            load(spoiled, verify=verify)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no whole package"):
        load(tmp_path / "gone.pt2")


def test_a_compressed_entry_is_refused(packed: Path, tmp_path: Path) -> None:
    """A few compressed bytes could expand to more than fits in memory."""
    target = tmp_path / "small.pt2"
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            how = zipfile.ZIP_DEFLATED if entry.filename.endswith(MANIFEST) else zipfile.ZIP_STORED
            copy.writestr(entry.filename, source.read(entry), how)
    with pytest.raises(ExportError, match=r"bitport\.json is compressed"):
        load(target)


def test_a_deeply_nested_manifest_is_damage(packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep.pt2"
    with zipfile.ZipFile(packed) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            copy.writestr(entry.filename, "[" * 200_000 if entry.filename.endswith(MANIFEST) else source.read(entry))
    with pytest.raises(ExportError, match="no whole package"):
        load(target)


@pytest.mark.parametrize("gone", ["input.0", "output.0"])
def test_an_example_that_lacks_something(gone: str, program: Program) -> None:
    example = program.examples("half")
    del example[gone]
    with pytest.raises(ExportError, match=gone):
        compare("half", program.methods["half"], example, {"output.0": 1.0})


def patched(data: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    """Overwrite a field of all headers with this signature."""
    starts = [found.start() for found in re.finditer(re.escape(signature), data)]
    changed = bytearray(data)
    for start in starts:
        changed[start + at : start + at + len(value)] = value
    return bytes(changed)


LOCAL, CENTRAL = b"PK\3\4", b"PK\1\2"
HEADERS: dict[str, tuple[tuple[bytes, int, bytes], ...]] = {
    "encrypted": ((LOCAL, 6, b"\1"), (CENTRAL, 8, b"\1")),
    "a later version": ((CENTRAL, 6, b"\x63"),),
    "longer than the file": ((CENTRAL, 20, b"\xff\xff\xff\x00"), (CENTRAL, 24, b"\xff\xff\xff\x00")),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_zipfile_does_not_read(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    with ArchiveWriter(path, "model") as archive:
        archive.add(MANIFEST, b"{}")
    data = path.read_bytes()
    for signature, at, value in HEADERS[case]:
        data = patched(data, signature, at, value)
    path.write_bytes(data)
    with pytest.raises(ExportError, match=r"is no whole package of bitport: BadZipFile"):
        load(path)
