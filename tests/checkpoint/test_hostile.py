"""Checkpoints that are damaged or lie: one CheckpointError that says what and where, with the model unchanged."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import bitport as bp
from bitport.checkpoint import ModelState, Writer, read_manifest
from bitport.checkpoint.manifest import NAME
from bitport.checkpoint.safetensors_reader import HEADER, SafetensorsReader
from bitport.errors import ArgumentError, CheckpointError

from .models import edit, raw, rewrite_header, tensors_of

WEIGHT = "0.weight"


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = build()
    bp.quantize_(model, "int4-g32")
    bp.save(model, tmp_path / "it")
    return tmp_path / "it"


def refused(directory: Path, message: str, **options: Any) -> None:
    model = build()
    before = {name: raw(tensor) for name, tensor in tensors_of(model).items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        bp.load(model, directory, **options)
    assert len(str(caught.value)) < 2000
    assert {name: raw(tensor) for name, tensor in tensors_of(model).items()} == before


def put(*path: str, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


def drop(*path: str) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return change


TEXT = {
    "empty": (b"", "not JSON"),
    "binary": (b"\xff\xfe\x00", "not JSON"),
    "cut": (b'{"format": "bitport", ', "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "a list": (b"[]", r"must be an object, not \[\]"),
    "a number of 10000 digits": (b'{"version": ' + b"9" * 10_000 + b"}", "not JSON"),
    "twice the same key": (b'{"format": "bitport", "format": "bitport"}', "twice"),
    "of another format": (b'{"format": "other"}', "'format' is 'other', not 'bitport'"),
    "of a later version": (b'{"format": "bitport", "version": 2}', "version 2, of a later .*: upgrade bitport"),
    "of version 0": (b'{"format": "bitport", "version": 0}', "has version 0: 'version' must be a whole number from 1"),
    "of version true": (b'{"format": "bitport", "version": true}', "'version' must be a whole number"),
    "infinite": (b'{"format": "bitport", "version": 1e999}', "'version' must be a whole number"),
    "short": (b'{"format": "bitport", "version": 1}', "missing keys"),
}


@pytest.mark.parametrize("name", TEXT)
def test_manifest_as_text(name: str, saved: Path) -> None:
    data, message = TEXT[name]
    (saved / NAME).write_bytes(data)
    refused(saved, message)


def test_edited_manifest(saved: Path) -> None:
    path = saved / NAME
    path.write_text(path.read_text().replace('"bfloat16"', '"float16"').replace('"float32"', '"float16"'))
    refused(saved, "checksum does not match its content")


QDATA = ("tensors", WEIGHT, "parts", "qdata")
LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shards no object": (put("shards", value=[]), "'shards' must be an object"),
    "tensors no object": (put("tensors", value=3), "'tensors' must be an object"),
    "a tensor no object": (put("tensors", WEIGHT, value="x"), "must be an object"),
    "an unknown key": (put("tensors", WEIGHT, "extra", value=1), "unknown keys"),
    "a missing key": (drop("tensors", WEIGHT, "shape"), "missing keys"),
    "shape negative": (put("tensors", WEIGHT, "shape", value=[-1, 64]), "whole number from 0"),
    "shape huge": (put("tensors", WEIGHT, "shape", value=[2**48, 2**14]), "of another shape"),
    "shape beyond counting": (put("tensors", WEIGHT, "shape", value=[2**48, 2**15]), "2.63 elements or more"),
    "shape empty beyond counting": (put("tensors", WEIGHT, "shape", value=[2**47, 2**47, 0]), "2.63 elements"),
    "shape of 300 digits": (put("tensors", WEIGHT, "shape", value=[10**300]), "whole number from 0"),
    "shape of floats": (put("tensors", WEIGHT, "shape", value=[32.0, 64.0]), "whole number"),
    "shape of truth": (put("tensors", WEIGHT, "shape", value=[True, 64]), "whole number"),
    "shape no list": (put("tensors", WEIGHT, "shape", value="32x64"), "must be a list"),
    "shape of 100 sizes": (put("tensors", WEIGHT, "shape", value=[1] * 100), "at most 16"),
    "dtype unknown": (put("tensors", WEIGHT, "dtype", value="int3"), "'int3' is unknown; known are"),
    "dtype no string": (put("tensors", WEIGHT, "dtype", value=[]), "is unknown"),
    "dtype of integers": (put("tensors", WEIGHT, "dtype", value="int32"), "stands for one of"),
    "transposed no truth value": (put("tensors", WEIGHT, "transposed", value=1), "must be true or false"),
    "transposed wrongly": (put("tensors", WEIGHT, "transposed", value=True), "not a valid int4-g32"),
    "buffer of a new kind": (put("tensors", WEIGHT, "buffer", value="x"), "one of persistent, derived"),
    "no such scheme": (put("tensors", WEIGHT, "scheme", value="7"), "no scheme '7'"),
    "scheme no string": (put("tensors", WEIGHT, "scheme", value=[]), r"no scheme \[\]"),
    "scheme forgotten": (drop("tensors", WEIGHT, "scheme"), "has the one part ''"),
    "scheme of a later version": (put("schemes", "0", "version", value=9), "upgrade bitport"),
    "scheme of a long version": (put("schemes", "0", "version", value="9" * 10**4), r"version '999.*\.\.\.9*': "),
    "scheme with more": (put("schemes", "0", "surprise", value=9), "unknown keys"),
    "scheme of text": (put("schemes", "0", value="int4"), "an object with the keys"),
    "scheme of no type": (
        put("schemes", "0", "weight", "dtype", value="int99"),
        "unknown number type 'int99'.*written",
    ),
    "scheme of a list": (put("schemes", "0", "weight", "dtype", value=[]), "dtype must be a str"),
    "block 0 rows": (put("schemes", "0", "weight", "block", value=[0, 32]), "not a valid"),
    "block negative": (put("schemes", "0", "weight", "block", value=[1, -32]), "Format.block"),
    "block huge": (put("schemes", "0", "weight", "block", value=[1, 2**70]), "< 2.31"),
    "block of 16": (put("schemes", "0", "weight", "block", value=[1, 16]), "expected .* \\[32, 4\\]"),
    "act unknown": (put("schemes", "0", "act", value="x"), "unknown activation"),
    "act no string": (put("schemes", "0", "act", value={}), "act must be a str"),
    "static no truth value": (put("schemes", "0", "static", value="x"), "static must be a bool"),
    "global scale no truth value": (put("schemes", "0", "weight", "global_scale", value=5), "global_scale must be"),
    "a part missing": (drop("tensors", WEIGHT, "parts", "zero"), "part 'zero' is missing"),
    "no data": (drop(*QDATA), "the first two needed"),
    "a part too many": (put("tensors", WEIGHT, "parts", "code", value={}), "missing keys"),
    "an unknown part": (
        put("tensors", WEIGHT, "parts", "code", value={"dtype": "uint8", "shape": [1], "crc32": 0}),
        "known are qdata",
    ),
    "part of another dtype": (put(*QDATA, "dtype", value="float32"), r"is U8 \[32, 32\], the manifest says F32"),
    "part of the same size": (put(*QDATA, "dtype", value="float8_e8m0fnu"), "not a valid int4"),
    "part of another shape": (
        put(*QDATA, "shape", value=[32, 31]),
        r"is U8 \[32, 32\], the manifest says U8 \[32, 31\]",
    ),
    "crc32 negative": (put(*QDATA, "crc32", value=-1), "'crc32' must be a whole number"),
    "shard not listed": (put("tensors", WEIGHT, "shard", value="x.safetensors"), "not among 'shards'"),
    "shard no string": (put("tensors", WEIGHT, "shard", value=[]), "must be a string"),
    "tied to nothing": (put("tied", "a", value="b"), "tied to 'b'"),
    "tied to itself": (put("tied", "a", value="a"), "tied to 'a'"),
    "tied in a circle": (put("tied", value={"a": "b", "b": "a"}), "tied to 'b'"),
    "tied over a tensor": (put("tied", "0.bias", value="1.bias"), "'0.bias' is tied to '1.bias'"),
    "tied to a list": (put("tied", "a", value=[]), "must be a string"),
    "tied to another shape": (
        lambda manifest: (
            (manifest["tensors"].pop("1.bias"), put("tied", "1.bias", value="0.bias")(manifest))[2:] or None
        ),
        "of another shape",
    ),
    "version of the library no string": (put("bitport", value=3), "must be a string"),
    "a name that is not there": (put("tensors", "2.weight", value=None), "must be an object"),
}


@pytest.mark.parametrize("name", LIES)
def test_manifest_that_lies(name: str, saved: Path) -> None:
    change, message = LIES[name]
    edit(saved, change)
    refused(saved, message)


def test_tensor_that_no_shard_has(saved: Path) -> None:
    def rename(manifest: Any) -> None:
        manifest["tensors"]["2.bias"] = manifest["tensors"].pop("0.bias")

    edit(saved, rename)
    model = build()
    model[0].register_parameter("bias", None)
    model.append(nn.Linear(1, 32))
    model[2].register_parameter("weight", None)
    with pytest.raises(CheckpointError, match=r"safetensors lacks 2\.bias"):
        bp.load(model, saved)


def test_two_tensors_of_the_same_bytes(saved: Path) -> None:
    """The part "scale" of one tensor, and another tensor with that name."""

    def add(manifest: Any) -> None:
        entry = manifest["tensors"][WEIGHT]
        part = entry["parts"]["scale"]
        described = {"shard": entry["shard"], "dtype": part["dtype"], "shape": part["shape"], "parts": {"": part}}
        manifest["tensors"][f"{WEIGHT}.scale"] = described

    edit(saved, add)
    refused(saved, "two tensors use")


BAD_NAMES = {
    "up": "../stolen.safetensors",
    "absolute": "/etc/stolen.safetensors",
    "below": "a/b.safetensors",
    "backslash": "..\\stolen.safetensors",
    "dots": "..safetensors",
    "hidden": ".x.safetensors",
    "empty": "",
    "zero byte": "a\0.safetensors",
    "another kind": "model.bin",
    "surrogate": "\ud800.safetensors",
    "long": "a" * 5000 + ".safetensors",
    "line": "a.safetensors\n",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_shard_names_stay_in_the_directory(name: str, saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    (saved.parent / "stolen.safetensors").write_bytes(shard.read_bytes())

    def change(manifest: Any) -> None:
        manifest["shards"] = {BAD_NAMES[name]: manifest["shards"][shard.name]}
        for entry in manifest["tensors"].values():
            entry["shard"] = BAD_NAMES[name]

    edit(saved, change)
    refused(saved, "cannot be the name of a shard|characters that cannot be shown|5012 characters")


def test_links_that_leave_the_directory(saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    shard.rename(saved.parent / "stolen.safetensors")
    shard.symlink_to(saved.parent / "stolen.safetensors")
    refused(saved, "leads out of its directory, to .*stolen.safetensors, and is not followed: put the file itself")
    shard.unlink()
    (saved.parent / "stolen.safetensors").rename(saved / "here.bin")
    shard.symlink_to("here.bin")
    bp.load(build(), saved)


@pytest.mark.parametrize("folder", ["", "transformer"])
def test_cache_of_the_hub(folder: str, saved: Path) -> None:
    """models--x/snapshots/<revision>/name -> ../../blobs/<hash>; the same in a subfolder."""
    snapshot, blobs = saved.parent / "models--x/snapshots/abc" / folder, saved.parent / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for at, path in enumerate(saved.iterdir()):
        path.rename(blobs / str(at))
        (snapshot / path.name).symlink_to(f"{'../' if folder else ''}../../blobs/{at}")
    bp.load(build(), snapshot)


def test_a_convolution_that_lies_transposed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    bp.quantize_(model, {"0": "int4-channel"})
    bp.save(model, tmp_path)
    edit(tmp_path, put("tensors", WEIGHT, "transposed", value=True))
    with pytest.raises(CheckpointError, match="not a valid int4-channel: only a matrix or a stack"):
        bp.load(nn.Sequential(nn.Conv2d(4, 8, 3)), tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_files_that_are_none(saved: Path) -> None:
    """Opening a pipe would block forever."""
    (shard,) = saved.glob("*.safetensors")
    shard.unlink()
    refused(saved, "cannot be opened")
    os.mkfifo(shard)
    refused(saved, "not a regular file")
    shard.unlink()
    shard.mkdir()
    refused(saved, "not a regular file")


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1], ids=["nothing", "half a length", "length", "in header", "in data"])
def test_cut_shard(size: int, saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    data = shard.read_bytes()
    shard.write_bytes(data[:size])
    refused(saved, "safetensors (has|is not a whole)")
    edit(saved, put("shards", shard.name, value=len(data[:size])))
    refused(saved, "not a whole safetensors file")


def test_a_later_shard_is_cut(saved: Path) -> None:
    """The model is unchanged, though the shards before it are whole."""
    model = build()
    bp.quantize_(model, "int4-g32")
    bp.save(model, saved, shard_size=1, overwrite=True)
    shard = sorted(saved.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 1)
    refused(saved, "not a whole safetensors file")


def first(header: dict[str, Any]) -> dict[str, Any]:
    return header[f"{WEIGHT}.qdata"]


def last(header: dict[str, Any]) -> str:
    return max(header, key=lambda name: header[name]["data_offsets"])


HEADERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not an object": (lambda header: [1], "header is not an object"),
    "an entry of text": (lambda header: {**header, "0.bias": "x"}, "described by 'x'"),
    "an entry of null": (lambda header: {**header, "0.bias": None}, "described by None"),
    "no offsets": (lambda header: first(header).pop("data_offsets") and None, "described by"),
    "three offsets": (lambda header: first(header)["data_offsets"].append(1), "described by"),
    "negative": (lambda header: first(header).update(data_offsets=[-9, 9]), "below 2"),
    "beyond the end": (lambda header: first(header).update(data_offsets=[9000, 10024]), "cannot be bytes"),
    "backwards": (lambda header: first(header).update(data_offsets=[1024, 0]), "cannot be bytes"),
    "huge": (lambda header: first(header).update(data_offsets=[0, 10**30]), "below 2"),
    "of many dimensions": (lambda header: first(header).update(shape=[2**48 - 1] * 30_000), "at most 64 dimensions"),
    "beyond counting": (lambda header: first(header).update(shape=[2**47, 2**47, 0]), "below 2.63 elements"),
    "too short": (lambda header: first(header).update(data_offsets=[0, 1023]), "cannot be bytes"),
    "huge shape": (lambda header: first(header).update(shape=[2**40, 0]), "cannot be bytes"),
    "65 dimensions": (lambda header: first(header).update(shape=[32, 32] + [1] * 63), "at most 64 dimensions"),
    "other shape": (lambda header: first(header).update(shape=[16, 64]), r"is U8 \[16, 64\], the manifest says"),
    "other dtype": (lambda header: first(header).update(dtype="I8"), r"is I8 \[32, 32\], the manifest says"),
    "unknown dtype": (lambda header: first(header).update(dtype="U9"), "has the dtype 'U9'"),
    "dtype no string": (lambda header: first(header).update(dtype=[]), r"has the dtype \[\]"),
    "another name": (lambda header: header.update(other=header.pop("0.bias")), r"lacks 0\.bias"),
    "a tensor less": (lambda header: header.pop("0.bias") and None, "must follow each other without gaps or overlaps"),
    "the bytes of another": (
        lambda header: header["1.weight.qdata"].update(data_offsets=header["0.bias"]["data_offsets"]),
        "must follow each other without gaps or overlaps",
    ),
    "the last one less": (lambda header: header.pop(last(header)) and None, "of its data, which has"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_header_that_lies(name: str, saved: Path) -> None:
    change, message = HEADERS[name]
    (shard,) = saved.glob("*.safetensors")
    rewrite_header(shard, change)
    refused(saved, message)


@pytest.mark.parametrize("name", ["empty", "overlap", "gap", "more data"])
def test_same_files_as_the_library(name: str, tmp_path: Path) -> None:
    """Empty tensors lie between others, in any order; all other data belongs to exactly one tensor."""
    offsets = {
        "empty": {"e": (4, 4), "b": (4, 8), "f": (8, 8), "a": (0, 4), "g": (0, 0)},
        "overlap": {"a": (0, 4), "b": (2, 6), "c": (6, 8)},
        "gap": {"a": (0, 4), "b": (5, 8)},
        "more data": {"a": (0, 4), "b": (4, 7)},
    }[name]
    header = {
        key: {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]} for key, (at, end) in offsets.items()
    }
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(8)))
    if name == "empty":
        with SafetensorsReader(path) as reader, safe_open(str(path), "pt") as library:
            assert {key: reader.read(key).tolist() for key in reader.tensors} == {
                key: library.get_tensor(key).tolist()
                for key in library.keys()  # noqa: SIM118  (not a dict)
            }
        return
    with pytest.raises(SafetensorError):
        safe_open(str(path), "pt").__enter__()
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        SafetensorsReader(path)


def test_a_header_too_long_to_be_one(tmp_path: Path) -> None:
    """It is refused before it is read: a sparse file takes no space on the disk, and would fill the memory."""
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write((HEADER + 1).to_bytes(8, "little"))
        file.truncate(8 + HEADER + 1)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="its header of 100000001 bytes is too long; at most 100000000"):
        SafetensorsReader(path)
    assert tracemalloc.get_traced_memory()[1] < HEADER // 100
    tracemalloc.stop()


def test_a_file_cut_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2**16), "b": torch.ones(2**16)}, path)
    with SafetensorsReader(path) as reader:
        os.truncate(path, path.stat().st_size - 4)
        assert torch.equal(reader.read("a"), torch.ones(2**16))
        with pytest.raises(CheckpointError, match="not a whole safetensors file: it ends inside b"):
            reader.read("b")


def test_a_header_that_names_a_tensor_twice(saved: Path) -> None:
    """Some programs would use the first, others the last."""
    (shard,) = saved.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes().replace(b'"1.bias"', b'"0.bias"', 1))
    refused(saved, r"not JSON \(a key appears twice in one object: '0.bias'\)")


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "a\nb", "attn" * 25_000])
def test_names_of_tensors(name: str, saved: Path) -> None:
    """They could not be printed, would control the terminal, or take seconds to be compared with a pattern."""
    (shard,) = saved.glob("*.safetensors")
    told = "has characters that cannot be shown|has 100000 characters; names of at most 1000 are read"
    with pytest.raises(ArgumentError, match=told), Writer(saved.parent / "new") as writer:
        writer.add(name, torch.ones(1))
    edit(saved, lambda manifest: manifest["tensors"].update({name: manifest["tensors"].pop("0.bias")}))
    refused(saved, told)
    rewrite_header(shard, lambda header: header.update({name: header.pop("0.bias")}))
    with pytest.raises(CheckpointError, match=told):
        SafetensorsReader(shard)


def test_damaged_data_is_found(saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    bp.load(build(), saved, verify=False)  # as requested: the disk is trusted
    with pytest.raises(CheckpointError, match=r"the data of 1\.\w+(\.\w+)? is damaged"):
        bp.load(build(), saved)


def test_permutation_that_is_none(saved: Path) -> None:
    """The data are intact, but would make the kernel read outside of the weight."""
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    bp.quantize_(model, "int8")
    q = model[0].weight
    model[0].weight = nn.Parameter(q.replace(perm=torch.full((64,), 10**9)), requires_grad=False)
    bp.save(model, saved, overwrite=True)
    with pytest.raises(CheckpointError, match=r"0\.weight is not a valid int8: perm must hold each of 0\.\.63 once"):
        bp.load(nn.Sequential(nn.Linear(64, 8, bias=False)), saved)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("part", "value"), [("zero", 17), ("perm", 10**9)])
def test_numbers_are_checked_whatever_the_device(part: str, value: int, device: str, saved: Path) -> None:
    """meta stands for a device whose values cannot be seen without waiting for it."""
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    bp.quantize_(model, "int4-g32")
    q = model[0].weight.to_layout("plain")
    parts = q.parts._replace(zero=torch.full_like(q.parts.zero, value)) if part == "zero" else None
    changes = {"perm": torch.full((64,), value)} if part == "perm" else {}
    model[0].weight = nn.Parameter(q.replace(parts, **changes), requires_grad=False)
    bp.save(model, saved, overwrite=True)
    with pytest.raises(CheckpointError, match=r"0\.weight is not a valid int4-g32: "):
        bp.load(nn.Sequential(nn.Linear(64, 8, bias=False)), saved, device=device)


def test_read_manifest_alone_trusts_nothing(saved: Path) -> None:
    edit(saved, put("tensors", WEIGHT, "shape", value=[2**47, 2**15]))
    assert json.dumps(read_manifest(saved).nbytes)
    edit(saved, put(*QDATA, "shape", value=[2**49]))
    with pytest.raises(CheckpointError):
        read_manifest(saved)


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("zero", torch.full((32, 2), 17, dtype=torch.uint8), r"0\.weight was read, and is damaged: .* 0\.\.16"),
        ("zero", torch.zeros(32, 2, dtype=torch.int64), r"zero\.uint8 is torch\.int64"),
        ("qdata", torch.zeros(1, 32, dtype=torch.uint8), r"qdata\.uint8 is torch\.uint8 \[1, 32\]; the model has"),
        ("scale", "x", "is str; the model has"),
    ],
)
def test_a_state_for_distributed_checkpoints_that_lies(part: str, value: object, told: str) -> None:
    """The numbers come from a file; a reader other than PyTorch's may also give other shapes."""
    model = build()
    bp.quantize_(model, "int4-g32")
    state = ModelState(model)
    (key,) = (key for key in state.state_dict() if key.startswith("0.weight") and f".{part}." in key)
    with pytest.raises(CheckpointError, match=told):
        state.load_state_dict({**state.state_dict(), key: value})
