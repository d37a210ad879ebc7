"""Writing of GGUF files: the library ``gguf`` can read them, and they are either complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop.gguf.header import read_header
from bitport.interop.gguf.output import Output

from .gguf_files import gguf

SETTINGS = {
    "general.architecture": "llama",
    "a.whole": 7,
    "a.real": 1e-5,
    "a.truth": True,
    "a.text": "Zwölf",
    "a.words": ["x", "", "ü"],
    "a.none": [],
    "a.numbers": [1, -2, 3],
    "a.reals": [0.5, -1e9],
}


def raw(value: Tensor) -> Tensor:
    return value.reshape(len(value), -1).view(torch.uint8)


def test_settings_and_tensors(tmp_path: Path) -> None:
    matrix, vector = torch.randn(3, 5), torch.randn(7)
    with Output(tmp_path / "m.gguf", SETTINGS, {"v": 1, "m": 2}) as out:
        out.add("m", "F32", (3, 5), raw(matrix))
        out.add("v", "F32", (7,), raw(vector))
        out.publish()
    assert dict(read_header(tmp_path / "m.gguf").settings) == SETTINGS
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["a.numbers"].contents() == [1, -2, 3]
    assert reader.fields["a.whole"].types == [gguf.GGUFValueType.UINT32]
    found = {each.name: torch.tensor(each.data) for each in reader.tensors}
    assert torch.equal(found["m"], matrix)
    assert torch.equal(found["v"], vector)
    places = [each.data_offset for each in reader.tensors]
    assert places == sorted(places)
    assert [place - reader.data_offset for place in places] == [0, 64]
    assert (tmp_path / "m.gguf").stat().st_size == reader.data_offset + 64 + 32


def test_parts_in_any_order(tmp_path: Path) -> None:
    """Experts of two tensors, added as they arrive."""
    one, other = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    with Output(tmp_path / "m.gguf", {}, {"one": 3, "other": 3}) as out:
        for part in (1, 0, 2):
            out.add("one", "F32", (3, 2, 8), raw(one[part]), part)
            out.add("other", "F32", (3, 2, 8), raw(other[part]), part)
        out.publish()
    tensors = read_header(tmp_path / "m.gguf").tensors
    assert torch.equal(tensors["one"].read(), one)
    assert torch.equal(tensors["other"].read(), other)


def incomplete(out: Output) -> None:
    out.add("one", "F32", (3, 2, 8), raw(torch.ones(2, 8)), 1)
    out.publish()


def absent(out: Output) -> None:
    out.publish()


def twice(out: Output) -> None:
    for _ in range(2):
        out.add("one", "F32", (1, 2, 8), raw(torch.ones(2, 8)))
    out.publish()


def of_two_types(out: Output) -> None:
    out.add("one", "F32", (2, 2, 8), raw(torch.ones(2, 8)))
    out.add("one", "F16", (2, 2, 8), raw(torch.ones(2, 8).half()), 1)


def of_two_dimensions(out: Output) -> None:
    out.add("one", "F32", (2, 8), raw(torch.ones(2, 8)))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (incomplete, "one did not come in full"),
        (absent, "one did not come in full"),
        (twice, "one did not come in full"),
        (of_two_types, r"one type: F32 \[2, 2, 8\], and a part is F16"),
        (of_two_dimensions, "has 3 dimensions"),
    ],
)
def test_what_is_not_whole_leaves_nothing(make: object, reason: str, tmp_path: Path) -> None:
    assert callable(make)
    with pytest.raises(BitportError, match=reason), Output(tmp_path / "m.gguf", {}, {"one": 3}) as out:
        make(out)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        Output(tmp_path / "file" / "folder" / "m.gguf", {}, {})
    (tmp_path / "m.gguf.unfinished").write_text("")
    with pytest.raises(ArgumentError, match=r"m\.gguf\.unfinished is there already"):
        Output(tmp_path / "m.gguf", {}, {})
