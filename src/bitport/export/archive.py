"""PT2 archives: zip files with uncompressed entries below one root folder.

Entries to be mapped start at a multiple of ALIGNMENT in the file, by padding the extra field of their header.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

ALIGNMENT = 4096
"""Bytes: the size of a page."""
HEADER = 30
"""Size in bytes of a local header before the name and the extra field."""
ZIP64 = 20
"""Size in bytes of the extra field for sizes above 4 GiB."""
FILLER = b"BP"
"""The id of the extra field used for padding."""


class ArchiveWriter:
    def __init__(self, path: Path, root: str) -> None:
        self.root = root
        self.zip = zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True)
        for name, content in (("archive_format", "pt2"), ("archive_version", "0"), (".data/version", "6\n")):
            self.add(name, content.encode())

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.zip.close()

    def add(self, name: str, data: bytes) -> None:
        self.zip.writestr(self._entry(name), data)

    def stream(self, name: str, write: Callable[[IO[bytes]], None]) -> int:
        """Add an aligned entry written by ``write``, flush it, and return the offset of its data in the file."""
        entry = self._entry(name)
        at = self.zip.fp.tell() + HEADER + len(entry.filename.encode()) + ZIP64 + 4  # type: ignore[union-attr]
        room = -at % ALIGNMENT
        entry.extra = FILLER + room.to_bytes(2, "little") + bytes(room)
        with self.zip.open(entry, "w", force_zip64=True) as file:
            write(file)
        self.zip.fp.flush()  # type: ignore[union-attr]
        return at + room

    def _entry(self, name: str) -> zipfile.ZipInfo:
        return zipfile.ZipInfo(f"{self.root}/{name}")  # dated 1980, so that equal contents give equal archives


class ArchiveReader:
    """Entries by name below the root folder; damaged archives raise zipfile.BadZipFile, OSError, ValueError or
    KeyError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _damaged(str(path)):
            self.zip = zipfile.ZipFile(path)
        names = self.zip.namelist()
        self.root = names[0].split("/")[0] if names else ""

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.zip.close()

    def read(self, name: str) -> bytes:
        """Read an uncompressed entry; a compressed one is refused, as it could be larger than memory."""
        entry = self.zip.getinfo(f"{self.root}/{name}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{name} is compressed, which entries of a package are not")
        with _damaged(name):
            return self.zip.read(entry)

    def place(self, name: str) -> tuple[int, int]:
        """(start, size) of a stored entry in the file."""
        entry = self.zip.getinfo(f"{self.root}/{name}")
        with open(self.path, "rb") as file:
            file.seek(entry.header_offset)
            header = file.read(HEADER)
        if len(header) < HEADER or header[:4] != b"PK\3\4" or entry.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{name} is not stored where the directory says")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return entry.header_offset + HEADER + lengths, entry.file_size


@contextlib.contextmanager
def _damaged(what: str) -> Iterator[None]:
    """zipfile raises these for entries that end early, are encrypted, or need a later version of the format."""
    try:
        yield
    except (EOFError, RuntimeError) as error:
        raise zipfile.BadZipFile(f"{what}: {error or 'it ends before its entries do'}") from error


def as_bytes(write: Callable[[IO[bytes]], object]) -> bytes:
    """Return what ``write`` writes to a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()
