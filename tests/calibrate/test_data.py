"""Token ids from texts, JSON lines, directories, tables and files of ids; sampled by seed."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitport.calibrate.data import REACH, token_batches
from bitport.errors import ArgumentError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def letters(batches: list[Tensor]) -> list[str]:
    return ["".join(map(chr, batch[0].tolist())) for batch in batches]


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("abcdefgh")
    found = token_batches(file, encode, window=3)
    assert letters(found) == ["abc", "def", "gh"]
    assert {(batch.dtype, batch.dim()) for batch in found} == {(torch.int64, 2)}
    assert letters(token_batches(file, encode, window=3, tokens=5)) == ["abc", "de"]
    file.write_text("ab")
    assert letters(token_batches(file, encode, window=3)) == ["ab"]


def lines(file: Path) -> Path:
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in ("ab", "cd")) + "\n \n")
    return file


def odd_lines(file: Path) -> Path:
    """A byte order mark, and characters that end a line for Python but not for JSON."""
    file.write_text("\ufeff" + json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    return file


def folder(path: Path) -> Path:
    (path / "train").mkdir(parents=True)
    lines(path / "train" / "a.jsonl")
    (path / "b.txt").write_text("ef")
    (path / "dataset_info.json").write_text("{}")
    return path


def numpy_ids(file: Path) -> Path:
    np.save(file, np.array([[97, 98], [99, 100]], dtype=np.uint16))
    return file


def tensor_ids(dtype: torch.dtype) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        save_file({"ids": torch.tensor([97, 98, 99, 100], dtype=dtype)}, file)
        return file

    return make


KINDS: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "lines of JSON": ("a.jsonl", lines, "abcd"),
    "lines with separators": ("a.jsonl", odd_lines, "a\u2028b\x85c"),
    "a directory": ("data", folder, "efabcd"),
    "numpy": ("a.npy", numpy_ids, "abcd"),
    **{
        f"safetensors, {dtype}": ("a.safetensors", tensor_ids(dtype), "abcd")
        for dtype in (torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_documents_follow_each_other(tmp_path: Path, kind: str) -> None:
    name, make, text = KINDS[kind]
    assert letters(token_batches(make(tmp_path / name), encode)) == [text]


@pytest.mark.peers
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables(tmp_path: Path, suffix: str) -> None:
    """In the formats of `datasets`: Arrow streams and Parquet files."""
    arrow = pytest.importorskip("pyarrow")
    file = tmp_path / f"a{suffix}"
    for column in ("content", "text"):
        data = arrow.table({"id": [1, 2, 3], column: ["ab", None, "cd"]})
        if suffix == ".parquet":
            importlib.import_module("pyarrow.parquet").write_table(data, file)
        else:
            with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_stream(sink, data.schema) as writer:
                writer.write_table(data)
        if column != "text":
            with pytest.raises(ArgumentError, match="has the columns id, content; the documents must be in one that"):
                token_batches(file, encode)
    assert letters(token_batches(tmp_path, encode)) == ["abcd"]
    file.write_bytes(b"no table")
    with pytest.raises(ArgumentError, match=r"cannot read .* as a table"):
        token_batches(file, encode)


@pytest.mark.peers
def test_tables_that_lie(tmp_path: Path) -> None:
    """pyarrow does not check what it maps: offsets beyond the characters make it read beyond the file."""
    arrow = pytest.importorskip("pyarrow")
    several = arrow.Table.from_arrays([arrow.array(["abc"]), arrow.array(["b"])], ["text", "text"])
    text, whole = arrow.table({"text": ["abc"]}), struct.pack("<ii", 0, 3)
    for told, data, changed in (
        ("cannot read .* as a table", text, (whole, struct.pack("<ii", 0, 1 << 30))),
        ("cannot read .* as a table: .*UTF8", text, (b"abc", b"ab\xe9")),
        ("has the columns text, text", several, (b"", b"")),
        ("holds int64, not strings", arrow.table({"text": [1, 2]}), (b"", b"")),
    ):
        file = tmp_path / "a.arrow"
        with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_stream(sink, data.schema) as writer:
            writer.write_table(data)
        assert changed[0] in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(*changed, 1))
        with pytest.raises(ArgumentError, match=told):
            token_batches(file, encode)


def test_a_table_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ArgumentError, match="pip install pyarrow"):
        token_batches(tmp_path / "a.parquet", encode)


def test_a_seed_draws_windows_from_all_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"text": chr(65 + at) * 4}) for at in range(50)))
    first, again, other = (letters(token_batches(file, encode, window=4, tokens=20, seed=s)) for s in (1, 1, 2))
    assert first == again != other
    assert len(first) == 5
    assert all(len(set(window)) == 1 for window in first)
    assert first != letters(token_batches(file, encode, window=4, tokens=20))
    assert max(first) > "U", "documents beyond the first ones are taken"
    long = tmp_path / "long.txt"
    long.write_text("".join(chr(65 + at) for at in range(60)))
    assert letters(token_batches(long, encode, window=4, tokens=12, seed=3)) != ["ABCD", "EFGH", "IJKL"]


@pytest.mark.parametrize(("window", "tokens"), [(8, 5), (4, 6), (4, 7), (4, 8), (100, 50)])
def test_a_seed_draws_as_many_tokens_as_were_asked_for(tmp_path: Path, window: int, tokens: int) -> None:
    """Also of a text that is shorter than one window."""
    (tmp_path / "a.txt").write_text("abcdefgh" * 10)
    found = token_batches(tmp_path / "a.txt", encode, window=window, tokens=tokens, seed=0)
    expected = [window] * (tokens // window) + [tokens % window] * (tokens % window > 0)
    assert [batch.shape[1] for batch in found] == expected


@pytest.mark.parametrize(("seed", "tokens"), [(None, 8), (0, 8 * REACH)])
def test_no_more_is_encoded_than_is_drawn_from(tmp_path: Path, seed: int | None, tokens: int) -> None:
    """A dataset may hold thousands of times as much text as is asked for."""
    encoded: list[str] = []

    def noting(text: str) -> list[int]:
        encoded.append(text)
        return encode(text)

    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"text": "abcd"})] * 50))
    token_batches(tmp_path / "a.jsonl", noting, window=4, tokens=8, seed=seed)
    assert len(encoded) == tokens / 4


def objects(file: Path) -> None:
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)


def sized(shape: str) -> Callable[[Path], object]:
    """Ten integers that are said to be more."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return lambda file: file.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", 118) + header.encode() + bytes(80))


def several(file: Path) -> None:
    with file.open("wb") as opened:
        np.savez(opened, a=np.arange(3), b=np.arange(3))


PROBLEMS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "one token": ("a.txt", lambda file: file.write_text("a"), "gives 1 tokens"),
    "not JSON": ("a.jsonl", lambda file: file.write_text('{"text": "ab"}\nab'), "line 2: not JSON"),
    "deep JSON": ("a.jsonl", lambda file: file.write_text("[" * 200_000), "line 1: not JSON"),
    "a long number": ("a.jsonl", lambda file: file.write_text("9" * 6000), "line 1: not JSON"),
    "no text": ("a.jsonl", lambda file: file.write_text('{"story": "ab"}'), 'must be an object with a string "text"'),
    "not there": ("nowhere.txt", lambda file: None, "cannot read"),
    "an empty directory": ("data", lambda file: file.mkdir(), "holds no .parquet"),
    "a pickle": ("a.npy", objects, "cannot read token ids"),
    "floats": ("a.npy", lambda file: np.save(file, np.ones(4)), "holds float64, not token ids"),
    "truth values": ("a.npy", lambda file: np.save(file, np.array([True, False])), "holds bool, not token ids"),
    "an empty file": ("a.npy", lambda file: file.write_bytes(b""), "cannot read token ids"),
    "several arrays": ("a.npy", several, "holds several arrays, not token ids"),
    "a size beyond the file": ("a.npy", sized(f"({1 << 40},)"), "cannot read token ids"),
    "a size beyond counting": ("a.npy", sized(f"(0, {1 << 70})"), "cannot read token ids"),
    "ids beyond counting": (
        "a.safetensors",
        lambda file: save_file({"a": torch.tensor([1, -1]).view(torch.uint64)}, file),
        "2.63 and more",
    ),
    "float tensors": ("a.safetensors", lambda file: save_file({"a": torch.ones(4)}, file), "not token ids"),
    "negative ids": ("a.npy", lambda file: np.save(file, np.array([1, -1])), "negative"),
    "no safetensors": ("a.safetensors", lambda file: file.write_text("x"), "cannot read token ids"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problems_name_the_file(tmp_path: Path, problem: str) -> None:
    name, make, message = PROBLEMS[problem]
    make(tmp_path / name)
    with pytest.raises(ArgumentError, match=message) as error:
        token_batches(tmp_path / name, encode)
    assert name in str(error.value)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "8"])
@pytest.mark.parametrize("name", ["window", "tokens"])
def test_numbers_of_tokens(name: str, count: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ArgumentError, match=f"{name} must be a number of tokens, at least 1, not {count!r}"):
        token_batches(tmp_path / "a.txt", encode, **{name: count})
