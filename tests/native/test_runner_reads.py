"""The runner reads packages or refuses them with a reason; nothing here loads libtorch."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .builds import ROOT, runner

pytestmark = pytest.mark.xdist_group("runner")  # built once, by one worker

spec = importlib.util.spec_from_file_location("synthetic", ROOT / "native" / "runner" / "tests" / "synthetic.py")
assert spec
assert spec.loader
synthetic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(synthetic)

MANIFEST, WEIGHTS, CODE = "extra/bitport.json", "extra/bitport/weights.safetensors", synthetic.LIBRARY
E_MACHINE, AARCH64, X86_64 = 18, 183, 62
"""Offset of the machine type in an ELF header, and two of its values."""


@pytest.fixture(scope="module")
def programs() -> Path:
    return runner()


@pytest.fixture(scope="module")
def entries(programs: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = synthetic.contents()
    return found


def check(programs: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(programs / "bitport-run"), *(str(each) for each in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def refused(programs: Path, package: Path, *arguments: object) -> str:
    """The reason for a refusal: one line on stderr, with exit code 1."""
    done = check(programs, package, *(arguments or ["--check"]))
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("bitport-run: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_whole_package_is_read(programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    synthetic.write(tmp_path / "p.pt2", entries)
    done = check(programs, tmp_path / "p.pt2", "--check", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"methods": ["model"]})


def test_zip64_and_comments_are_read(programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    """As in files beyond 4 GB: 64-bit sizes in front of each entry, and a 64-bit end record."""
    path = tmp_path / "p.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            with archive.open(zipfile.ZipInfo(f"p/{name}"), "w", force_zip64=True) as entry:
                entry.write(content)
        archive.comment = b"a comment"
    assert check(programs, path, "--check").returncode == 0
    whole = path.read_bytes()
    end = whole.rindex(b"PK\5\6")
    count, size, offset = struct.unpack("<HII", whole[end + 10 : end + 20])
    record = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    last = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(whole[:end] + record + locator + last)
    assert check(programs, path, "--check").returncode == 0


def test_weights_in_a_file_of_their_own(programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    weights = entries[WEIGHTS]
    beside = {key: value for key, value in entries.items() if key != WEIGHTS}
    part = {"entry": None, "file": "w.safetensors"}
    synthetic.write(tmp_path / "p.pt2", changed(beside, lambda manifest: manifest["weights"].update(part)))
    assert "w.safetensors: No such file" in refused(programs, tmp_path / "p.pt2")
    (tmp_path / "w.safetensors").write_bytes(weights)
    assert check(programs, tmp_path / "p.pt2", "--check").returncode == 0
    (tmp_path / "w.safetensors").write_bytes(weights[:-1] + b"?")
    assert "checksum" in refused(programs, tmp_path / "p.pt2")
    (tmp_path / "w.safetensors").write_bytes(weights[:-8])
    assert f"{len(weights)} were exported" in refused(programs, tmp_path / "p.pt2", "--list")
    for own in ([], ["--weights", tmp_path / "w.safetensors"]):
        (tmp_path / "w.safetensors").write_bytes(weights.replace(b'"w"', b'"v"'))
        assert "holds other tensors" in refused(programs, tmp_path / "p.pt2", "--list", *own)
    (tmp_path / "w.safetensors").write_bytes(weights[:-1] + b"?")
    assert check(programs, tmp_path / "p.pt2", "--check", "--weights", tmp_path / "w.safetensors").returncode == 0


def changed(
    entries: dict[str, bytes], change: Callable[[dict[str, Any]], object], entry: str = MANIFEST
) -> dict[str, bytes]:
    """The entries with a changed manifest, or a changed list of constants."""
    read = json.loads(entries[entry])
    change(read)
    return {**entries, entry: json.dumps(read).encode()}


def method(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["methods"]["model"]
    return found


WRONG_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda m: m.update(version=2), "version 2 of the format; this runner reads version 3"),
    "format": (lambda m: m.update(format="other"), "the format is not bitport-package"),
    "machine": (lambda m: m["target"].update(machine="sparc"), "compiled for sparc; this machine is"),
    "level": (lambda m: m["target"].update(level="x86-64-v9"), "the unknown level x86-64-v9"),
    "device": (lambda m: m["target"].update(device="cuda"), "made for the device cuda"),
    "code is missing": (lambda m: method(m)["code"].update(entry="nowhere.so"), "the code of model is missing"),
    "code has changed": (lambda m: method(m)["code"].update(crc32=1), "not what was exported"),
    "constants": (lambda m: method(m)["constants"].update(entry="gone"), "gone is missing"),
    "their count": (lambda m: method(m)["constants"].update(count=3), "2 constants; 3 were exported"),
    "weights size": (lambda m: m["weights"].update(size=7), "7 were exported"),
    "weights crc": (lambda m: m["weights"].update(crc32=7), "the checksum is wrong"),
    "weights elsewhere": (lambda m: m["weights"].update(entry=None, file="../w"), "without a folder"),
    "no weights": (lambda m: m.update(weights=None), "constants, and the package names no weights"),
    "no header": (lambda m: m["weights"].pop("header"), "weights: header: crc32 must be"),
    "example": (lambda m: method(m)["example"].update(entry="gone"), "gone is missing"),
    "dtype": (lambda m: method(m)["inputs"][0].update(dtype="F31"), "unknown type 'F31'; known: F64, F32"),
    "name of a size": (lambda m: method(m)["inputs"][0].update(shape=["lines"]), "'lines' is neither a number nor in"),
    "size below zero": (lambda m: method(m)["inputs"][0].update(shape=[-1]), "below zero"),
    "size": (lambda m: method(m)["inputs"][0].update(shape=[1 << 40, 1 << 40]), "larger than any memory"),
    "dims": (lambda m: m.update(dims={"rows": [2, 1]}), "rows must be [least, most]"),
    "a list for an object": (lambda m: m.update(methods=[]), "methods must be an object"),
}


@pytest.mark.parametrize("name", WRONG_MANIFESTS)
def test_wrong_manifests(name: str, programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    change, said = WRONG_MANIFESTS[name]
    synthetic.write(tmp_path / "p.pt2", changed(entries, change))
    assert said in refused(programs, tmp_path / "p.pt2")


WRONG_CONSTANTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "beyond": (lambda c: c["linear.w"].update(at=1 << 40), "linear.w: bytes 1099511627776 to"),
    "around": (lambda c: c["linear.w"].update(at=(1 << 63) - 8), "the file is cut off"),
    "larger": (lambda c: c["linear.w"].update(shape=[1 << 30]), "the file is cut off"),
    "odd place": (lambda c: c["linear.w"].update(at=c["linear.w"]["at"] + 2), "which is no place for F32"),
    "type": (lambda c: c["linear.w"].update(dtype="F31"), "unknown type 'F31'"),
    "size below zero": (lambda c: c["linear.w"].update(shape=[-1]), "below zero"),
    "no place": (lambda c: c["linear.w"].pop("at"), "linear.w: at must be"),
    "no object": (lambda c: c.update({"linear.w": "w"}), "must be a string"),
}


@pytest.mark.parametrize("name", WRONG_CONSTANTS)
def test_wrong_constants(name: str, programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    change, said = WRONG_CONSTANTS[name]
    synthetic.write(tmp_path / "p.pt2", changed(entries, change, synthetic.CONSTANTS))
    assert said in refused(programs, tmp_path / "p.pt2")
    assert check(programs, tmp_path / "p.pt2", "--list").returncode == 0  # constants are read with their method


def with_machine(code: bytes) -> bytes:
    (machine,) = struct.unpack_from("<H", code, E_MACHINE)
    other = struct.pack("<H", AARCH64 if machine == X86_64 else X86_64)
    return code[:E_MACHINE] + other + code[E_MACHINE + 2 :]


WRONG_CODE = {
    "another machine's": (with_machine, "export the model for it"),
    "no ELF": (lambda code: b"MZ" + code[2:], "no ELF file"),
    "cut off": (lambda code: code[: len(code) // 2], "damaged"),
    "empty": (lambda code: b"", "cut off or damaged"),
    "another library": (
        lambda code: code.replace(b"AOTInductorModel", b"AOTInductorMadel"),
        "no library of AOTInductor",
    ),
}


@pytest.mark.parametrize("name", WRONG_CODE)
@pytest.mark.parametrize("plain", [False, True], ids=["manifest", "plain"])
def test_wrong_code(name: str, plain: bool, programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    """Also when all checksums are right."""
    change, said = WRONG_CODE[name]
    code = change(entries[CODE])
    right = {"size": len(code), "crc32": zlib.crc32(code)}
    made = changed({**entries, CODE: code}, lambda manifest: method(manifest)["code"].update(right))
    synthetic.write(tmp_path / "p.pt2", {CODE: code} if plain else made)
    assert said in refused(programs, tmp_path / "p.pt2")


HEADERS = {
    "no JSON": (b"{", "no valid JSON"),
    "hole": (b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}', "F32[4] takes 16 bytes, not 8"),
    "beyond": (b'{"w":{"dtype":"U8","shape":[99999],"data_offsets":[0,99999]}}', "cut off or damaged"),
    "backwards": (b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}}', "no range"),
    "overflow": (b'{"w":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}}', "larger than any memory"),
    "none of many": (
        b'{"w":{"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}}',
        "larger than any memory",
    ),
    "number": (b'{"w":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}', "too large"),
    "twice": (b'{"w":{},"w":{}}', "twice"),
    "deep": (b'{"w":' + b"[" * 5000, "nested too deep"),
    "digits that are none": (
        b'{"\\u00\x14\x11":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "at byte 4: four hexadecimal digits follow",
    ),
    "too few digits": (b'{"\\u00', "four hexadecimal digits follow"),
    "zeros before a number": (b'{"w":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}', "begins with a zero"),
    "nothing before a point": (b'{"w":{"dtype":"U8","shape":[.5],"data_offsets":[0,4]}}', "a value is wanted"),
    "nothing behind a point": (b'{"w":{"dtype":"U8","shape":[4.],"data_offsets":[0,4]}}', "digits follow a point"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_wrong_weight_files(name: str, programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    """In a package made by torch alone, constants can only be found by name."""
    header, said = HEADERS[name]
    synthetic.write(tmp_path / "p.pt2", {CODE: entries[CODE]})
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert said in refused(programs, tmp_path / "p.pt2", "--check", "--weights", tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "length", [0, 8, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFF8], ids=["none", "short", "all", "wraps"]
)
def test_wrong_lengths_of_the_header(length: int, programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    synthetic.write(tmp_path / "p.pt2", {CODE: entries[CODE]})
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", length) + b"{")
    refused(programs, tmp_path / "p.pt2", "--check", "--weights", tmp_path / "w.safetensors")


def test_files_that_are_no_package(programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    assert "No such file" in refused(programs, tmp_path / "gone.pt2")
    assert "not a file" in refused(programs, tmp_path)
    (tmp_path / "empty").write_bytes(b"")
    assert "too short" in refused(programs, tmp_path / "empty")
    (tmp_path / "text").write_bytes(b"text " * 100)
    assert "no zip directory" in refused(programs, tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/archive_format", "pt2" * 100)
    assert "is compressed" in refused(programs, tmp_path / "packed")
    synthetic.write(tmp_path / "other", {"archive_format": b"pt2"})
    assert "holds neither" in refused(programs, tmp_path / "other")


def test_a_file_cut_anywhere_is_refused(programs: Path, entries: dict[str, bytes], tmp_path: Path) -> None:
    synthetic.write(tmp_path / "p.pt2", entries)
    whole = (tmp_path / "p.pt2").read_bytes()
    for length in range(0, len(whole), len(whole) // 20):
        (tmp_path / "cut.pt2").write_bytes(whole[:length])
        refused(programs, tmp_path / "cut.pt2")


OPTIONS = {
    "nothing": ([], "which package"),
    "unknown": (["p.pt2", "--what"], "unknown option --what"),
    "no value": (["p.pt2", "--inputs"], "--inputs wants a value"),
    "no number": (["p.pt2", "--repeat", "-3"], "'-3' is no whole number"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_options(name: str, programs: Path) -> None:
    arguments, said = OPTIONS[name]
    done = check(programs, *arguments)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize("plain", [False, True], ids=["manifest", "plain"])
def test_damage_of_any_kind_is_refused_or_harmless(
    plain: bool, programs: Path, entries: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "p.pt2"
    synthetic.write(path, {CODE: entries[CODE]} if plain else entries)
    done = subprocess.run([programs / "mutate", path, "1000", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = int(done.stdout.split()[0])
    assert 500 < found < 1000, "most damage is found; some lies where nobody looks"
