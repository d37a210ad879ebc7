"""Damaged or malicious GGUF files: one clear error, and no memory allocated for data that do not exist."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.errors import CheckpointError
from bitport.interop.gguf import Gguf
from bitport.interop.gguf import header as gguf_header
from bitport.interop.gguf.header import read_header

F32, Q4_0, Q8_K = 0, 2, 15
WHOLE, TEXT, ARRAY = 4, 8, 9


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said.encode())) + said.encode()


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def file_of(
    path: Path, settings: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3, counts: Any = None
) -> Path:
    counts = counts or (len(tensors), len(settings))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(settings) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


def test_what_it_says(tmp_path: Path) -> None:
    settings = [
        setting("a", WHOLE, struct.pack("<I", 7)),
        setting("b", TEXT, text("ä")),
        setting("c", 6, struct.pack("<f", 1e-5)),
        setting("d", ARRAY, struct.pack("<IQ3h", 3, 3, 1, -2, 3)),
        setting("e", ARRAY, struct.pack("<IQ", TEXT, 2) + text("x") + text("")),
        setting("f", 7, b"\1"),
    ]
    tensors = [entry("v", (3,), F32, 96), entry("w", (2, 64), Q4_0)]
    path = file_of(tmp_path / "m.gguf", settings, tensors, 96 + 12)
    with path.open("r+b") as file:
        file.seek(-12, 2)
        file.write(struct.pack("<3f", 1, 2, 3))
    header = read_header(path)
    assert header.settings == {"a": 7, "b": "ä", "c": 1e-5, "d": [1, -2, 3], "e": ["x", ""], "f": True}
    assert torch.equal(header.tensors["v"].read(), torch.tensor([1.0, 2.0, 3.0]))
    assert header.tensors["w"].read().shape == (2, 36)
    assert header.tensors["w"].type == "Q4_0"


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("settings", "tensors", "reason"),
    [
        ([setting("a", WHOLE, b"\0" * 4)] * 2, [], "'a' twice"),
        ([setting("a", 13, b"")], [], "type 13"),
        ([setting("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], "type 9"),
        ([setting("a", ARRAY, struct.pack("<IQ", 0, HUGE))], [], "cut off or damaged"),
        ([setting("a", ARRAY, struct.pack("<IQ", 10, HUGE))], [], "cut off or damaged"),
        ([setting("a", ARRAY, struct.pack("<IQ", TEXT, HUGE))], [], "cut off or damaged"),
        ([setting("a", TEXT, struct.pack("<Q", HUGE))], [], "cut off or damaged"),
        ([setting("a", TEXT, struct.pack("<Q", 1) + b"\xff")], [], "cut off or damaged"),
        ([setting("general.alignment", WHOLE, struct.pack("<I", 0))], [], "alignment is 0"),
        ([setting("general.alignment", TEXT, text("x"))], [], "alignment is 'x'"),
        ([setting("general.quantization_version", WHOLE, struct.pack("<I", 1))], [], "version is 1; 2 is read"),
        ([], [entry("w", ())], "0 dimensions"),
        ([], [entry("w\x1b[2J", (1,))], "characters that cannot be shown"),
        ([], [entry("w" * 1001, (1,))], "1001 characters; names of at most 1000 are read"),
        ([], [entry("w", (1, 1, 1, 1, 1, 1))], "6 dimensions"),
        ([], [entry("w", (2, 48), Q4_0)], "no whole blocks of Q4_0"),
        ([], [entry("w", (0, 32))], "empty"),
        ([], [entry("w", (2,)), entry("w", (2,), F32, 32)], "there twice"),
        ([], [entry("v", (9,)), entry("w", (2,), F32, 32)], "w overlaps another"),
        ([], [entry("w", (17,))], "ends before w"),
        ([], [entry("w", (HUGE, HUGE, HUGE))], "ends before w"),
        ([], [entry("w", (1,), F32, (1 << 64) - 1)], "ends before w"),
        ([], [entry("w", (2, 256), Q8_K)], r"w is of the type Q8_K; F32, F16, BF16, Q1_0.*Q4_K_M"),
        ([], [entry("w", (2,), 77)], "number 77"),
    ],
)
def test_what_cannot_be(settings: list[bytes], tensors: list[bytes], reason: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", settings, tensors, 64)
    with pytest.raises(CheckpointError, match=reason):
        read_header(path)


@pytest.mark.parametrize(("version", "counts"), [(1, None), (3 << 24, None), (3, (HUGE, 0)), (3, (0, HUGE))])
def test_versions_and_counts(version: int, counts: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", [], [], 64, version, counts)
    with pytest.raises(CheckpointError, match="version" if counts is None else "damaged|dimensions|twice"):
        read_header(path)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        Gguf(tmp_path / "absent.gguf")
    for content in (b"", b"GGU", b"PK\3\4" + bytes(100)):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"GGUF|damaged"):
            Gguf(tmp_path / "m.gguf")


def test_settings_longer_than_any_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path / "m.gguf", [setting("a", ARRAY, struct.pack("<IQ", 0, 1000) + bytes(1000))], [])
    assert len(read_header(path).settings["a"]) == 1000
    monkeypatch.setattr(gguf_header, "LONGEST", 900)
    with pytest.raises(CheckpointError, match="more than 900 bytes before its data"):
        read_header(path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    path = file_of(tmp_path / "m.gguf", [], [entry("w", (16,))], 64)
    header = read_header(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends inside w"):
        header.tensors["w"].read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        header.tensors["w"].read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    from .gguf_files import SIZES, model_of, transformers, write

    path = tmp_path_factory.mktemp("model") / "m.gguf"
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1})
    write(path, model_of(config), {".*": "Q4_1"})
    return path.read_bytes()


def test_cut_anywhere_or_changed_anywhere(model: bytes, tmp_path: Path) -> None:
    """Whichever byte of the header changes, the result is a model or one CheckpointError."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model)
    start = min(stored.start for stored in read_header(path).tensors.values())
    draw = random.Random(0)
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for at in range(120):
        if at % 3:
            where = draw.randrange(start)
            changed = model[:where] + bytes([draw.choice((0, 1, 255, model[where] ^ 1 << draw.randrange(8)))])
            path.write_bytes(changed + model[where + 1 :])
        else:
            path.write_bytes(model[: draw.randrange(len(model))])
        try:
            files = Gguf(path)
            assert list(dict(files.items())) == files.names()
        except CheckpointError:
            refused += 1
    assert refused >= 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000, "in KiB"
