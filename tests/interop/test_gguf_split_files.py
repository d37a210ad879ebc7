"""Models split into several GGUF files by the library ``gguf``, against the same model in a single file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf, model_at
from bitport.interop.gguf.split_files import read_model
from bitport.interop.sources import source_of
from bitport.tensor import QTensor

from .gguf_files import SIZES, gguf, model_of, transformers, write

KINDS = {r"token_embd.*": "Q6_K", r".*attn_q\..*": "Q4_K", r".*ffn_down\..*": "Q4_0", r".*ffn_up\..*": "Q5_1"}
NAMES = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


def made(path: Path, **changes: Any) -> list[Path]:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 256, **changes})
    write(path / "m.gguf", model_of(config), KINDS, parts=9)
    return sorted(path.glob("*.gguf"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    assert [file.name for file in made(path)] == NAMES
    return path


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(source / name, tmp_path)) for name in NAMES]


def test_numbers_are_those_of_the_library(source: Path) -> None:
    files = source_of(source)
    assert isinstance(files, Gguf)
    assert (files.path, files.paths) == (source / NAMES[0], [source / name for name in NAMES])
    stored = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for name in NAMES
        for tensor in gguf.GGUFReader(source / name).tensors
    }
    found = dict(files.items())
    assert len(found) == len(stored) == 21
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        tensor = found[ours]
        value = tensor.dequantize(torch.float32) if isinstance(tensor, QTensor) else tensor.float()
        # Only Q5_1 has a zero point, -m / d rounded to float32: off by 2^-24 of m, and each value by one rounding.
        bound = 2**-22 * float(stored[theirs].abs().max()) if theirs.endswith("ffn_up.weight") else 0
        assert float((value - stored[theirs]).abs().max()) <= bound, ours


def test_a_file_for_all_and_a_directory_of_one(parts: list[Path], tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "model.gguf"
    convert(tmp_path, whole, to="gguf", progress=False)
    one, several = dict(source_of(whole.parent).items()), dict(source_of(parts[0]).items())
    assert one.keys() == several.keys()
    for name, tensor in several.items():
        both = (each.dequantize() if isinstance(each, QTensor) else each for each in (tensor, one[name]))
        assert torch.equal(*both), name


def write_vectors(path: Path, *, alignment: int = 0, **more: Any) -> None:
    """Write three files with at most one tensor each."""
    writer = gguf.GGUFWriter(path / "m.gguf", "llama", split_max_tensors=1, **more)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name in ("a", "b") if more else ("a", "b", "c"):
        writer.add_tensor(name, torch.ones(3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_first_file_without_tensors(tmp_path: Path) -> None:
    write_vectors(tmp_path, small_first_shard=True)
    header = read_model(tmp_path / NAMES[0])
    assert {name: stored.file.name for name, stored in header.tensors.items()} == {"a": NAMES[1], "b": NAMES[2]}
    assert all(torch.equal(stored.read(), torch.ones(3)) for stored in header.tensors.values())


def test_a_part_that_is_given_by_itself(parts: list[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"no first file: give m-00001-of-00003\.gguf"):
        Gguf(parts[1])


@pytest.mark.parametrize("whole", [False, True], ids=["first file", "directory"])
@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ((2,), r"has 2 of the 3 files of a model; fetch m-00003-of-00003\.gguf$"),
        ((1, 2), r"has 1 of the 3 .*; fetch m-00002-of-00003\.gguf, m-00003-of-00003\.gguf$"),
        ((0,), r"has 2 of the 3 .*; fetch m-00001-of-00003\.gguf$"),
    ],
)
def test_missing_parts(lost: tuple[int, ...], told: str, whole: bool, parts: list[Path], tmp_path: Path) -> None:
    for at in lost:
        parts[at].unlink()
    if 0 in lost and not whole:
        told = "cannot be read: .*No such file"
    with pytest.raises(CheckpointError, match=told):
        source_of(tmp_path if whole else parts[0])


@pytest.mark.parametrize(("kept", "copied"), [(1, 2), (2, 1), (0, 1), (1, 0)])
def test_doubled_parts(kept: int, copied: int, parts: list[Path]) -> None:
    shutil.copy(parts[copied], parts[kept])
    with pytest.raises(CheckpointError, match=rf"{NAMES[kept]} is not the file {kept + 1} of 3 .*split.no {copied}"):
        Gguf(parts[0])


def test_parts_that_changed_places(parts: list[Path], tmp_path: Path) -> None:
    parts[1].rename(tmp_path / "other")
    parts[2].rename(parts[1])
    (tmp_path / "other").rename(parts[2])
    with pytest.raises(CheckpointError, match=rf"{NAMES[1]} is not the file 2 of 3"):
        Gguf(parts[0])


def test_parts_of_two_models(parts: list[Path], tmp_path: Path) -> None:
    """One with as many files but more tensors; one with as many tensors, split at different places."""
    (tmp_path / "other").mkdir()
    others = made(tmp_path / "other", tie_word_embeddings=True)
    assert [path.name for path in others] == NAMES
    shutil.copy(others[1], parts[1])
    with pytest.raises(CheckpointError, match=rf"{NAMES[1]} is not .* or of another model \(.*split.tensors.count 20"):
        Gguf(parts[0])


def test_parts_that_were_cut_elsewhere(parts: list[Path], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 256})
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "m.gguf", model_of(config), KINDS, parts=8)
    shutil.copy(tmp_path / "other" / NAMES[1], parts[1])
    with pytest.raises(CheckpointError, match=rf"{NAMES[1]} has .* again"):
        Gguf(parts[0])
    parts[0].write_bytes((tmp_path / "other" / NAMES[0]).read_bytes())
    parts[1].write_bytes((tmp_path / "other" / NAMES[1]).read_bytes())
    with pytest.raises(CheckpointError, match="hold 19 tensors, and say that it is 21"):
        Gguf(parts[0])


def test_names_that_do_not_tell_the_parts(parts: list[Path], tmp_path: Path) -> None:
    for name in ("other.gguf", "m-00001-of-00004.gguf"):
        shutil.copy(parts[0], tmp_path / name)
        with pytest.raises(CheckpointError, match=r"one of 3 files, which must be called NAME-00001-of-00003\.gguf"):
            Gguf(tmp_path / name)


def test_parts_whose_data_are_aligned_in_two_ways(tmp_path: Path) -> None:
    """The library states the alignment only in the first file, but aligns all: the data of others would be read from
    the wrong place."""
    write_vectors(tmp_path, alignment=64)
    with pytest.raises(CheckpointError, match=rf"{NAMES[1]} does not say that its data are aligned to 64, as"):
        read_model(tmp_path / NAMES[0])


def test_directories_of_several_models_or_of_none(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert model_at(tmp_path / "empty") is None
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        source_of(tmp_path / "empty")
    shutil.copy(parts[0], tmp_path / "mmproj.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models: m-00001-of-00003\.gguf, mmproj\.gguf; give one of them"):
        source_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    assert model_at(tmp_path) is None


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_part_is_written_over(at: int, parts: list[Path], tmp_path: Path) -> None:
    before = parts[at].read_bytes()
    for source in (parts[0], tmp_path):
        with pytest.raises(ArgumentError, match="is the source, or a part of it"):
            convert(source, parts[at], to="gguf", overwrite=True, progress=False)
    assert parts[at].read_bytes() == before


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_part_that_is_cut_off(at: int, parts: list[Path], tmp_path: Path) -> None:
    data = parts[at].read_bytes()
    for size in (3, 100, len(data) // 2, len(data) - 1):
        parts[at].write_bytes(data[:size])
        with pytest.raises(BitportError, match=NAMES[at]):
            convert(parts[0], tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ends", [(".part1of2", ".part2of2"), ("-split-a", "-split-b")])
def test_pieces_of_no_format(ends: tuple[str, str], tmp_path: Path) -> None:
    for end in ends:
        (tmp_path / f"m.gguf{end}").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / f"m.gguf{ends[0]}"):
        with pytest.raises(CheckpointError, match=r"cut anywhere: cat m\.gguf(\.part|-split)\* > m\.gguf"):
            source_of(path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert model_at(tmp_path) == tmp_path / "m.gguf"


def test_what_is_no_file(tmp_path: Path) -> None:
    link = tmp_path / "m.gguf"
    link.symlink_to("nothing/there")
    with pytest.raises(CheckpointError, match=r"m\.gguf is a link to nothing/there, which is not there"):
        source_of(tmp_path)
    link.unlink()
    os.mkfifo(link)
    for path in (tmp_path, link):
        with pytest.raises(CheckpointError, match="not a regular file"):
            source_of(path)
