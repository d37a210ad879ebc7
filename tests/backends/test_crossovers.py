"""The measured choice between the native kernel and a dense product, and the file that stores it."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bitport as bp
from bitport.backends import cpu, measured
from bitport.backends.cpu import crossovers
from bitport.backends.cpu.crossovers import ROWS, most_rows
from bitport.backends.cpu.native import Library
from bitport.cli.main import main
from bitport.numerics import sqnr
from bitport.ops import OPS, decide, use_kernel
from bitport.ops.product import operand
from tests.backends.taken import compiled

pytestmark = compiled


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    assert isinstance(cpu.LIBRARY, Library)
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path / "cache"))
    crossovers.use(cpu.LIBRARY, {})
    yield cpu.LIBRARY
    crossovers.use(cpu.LIBRARY, {})


def kernel(scheme: str, rows: int) -> str:
    q = bp.quantize_tensor(torch.randn(64, 128).bfloat16(), bp.preset(scheme))
    return decide("linear", torch.randn(rows, 128).bfloat16(), *operand(q), None).kernel


def test_what_was_saved_decides(library: Library) -> None:
    crossovers.save(library, {"int4/row": 16, "nf4/group": None})
    crossovers.use(library, {})
    crossovers.load(library)
    assert [kernel("int4-channel", rows) for rows in (1, 16, 17)] == ["native", "native", "dense_mm"]
    assert kernel("nf4", 5000) == kernel("int4-g32", 5000) == "native"
    q = bp.quantize_tensor(torch.randn(64, 128).bfloat16(), bp.preset("int4-channel"))
    refused = decide("linear", torch.randn(17, 128).bfloat16(), *operand(q), None).refused
    assert ("native", "dense_mm was measured to be faster here from 17 rows on") in refused


def test_a_dense_product_with_a_bias_is_rounded_once(library: Library) -> None:
    """For non-contiguous rows, torch adds the bias to the rounded product."""
    q = bp.quantize_tensor(torch.randn(64, 128).bfloat16(), bp.preset("int4-channel"))
    x, bias = torch.randn(3, 1, 128).bfloat16().expand(3, 2, 128), torch.randn(64).bfloat16()
    with use_kernel("dense_mm"):
        got = F.linear(x, q, bias)
    wanted = x.double() @ q.dequantize(torch.bfloat16).double().t() + bias.double()
    assert sqnr(wanted, got) > sqnr(wanted, wanted.bfloat16()) - 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", ["int3", "int8-asym", "nvfp4-wo", "fp8-block-wo", "nf4"])
def test_the_dense_product_is_right(library: Library, scheme: str, dtype: torch.dtype) -> None:
    q = bp.quantize_tensor(torch.randn(70, 208).to(dtype), bp.preset(scheme))
    dense = library.dense(operand(q), dtype)
    assert float(sqnr(q.dequantize(torch.float32), library.dense(operand(q), torch.float32))) > 130
    x, bias = torch.randn(2, 3, 208).to(dtype), torch.randn(70)
    crossovers.use(library, {measured.kind(operand(q)): 0})
    got = OPS["linear"].overload(x, *operand(q), bias)
    assert torch.equal(got, torch.nn.functional.linear(x, dense, bias.to(dtype)))


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "no JSON": ("{", "it is no JSON"),
        "a long number": ('{"version": ' + "1" * 5000 + "}", "it is no JSON"),
        "deep": ("[" * 100000, "it is no JSON"),
        "a list": ("[]", "not of version 1"),
        "a later version": ('{"version": 2}', "not of version 1"),
        "another machine": ('{"version": 1, "machine": {"cpu": "Z80"}}', "was measured with {'cpu': 'Z80'}"),
        "no rows": (-1, "most_rows must name a whole number"),
        "more rows than an int64": (1 << 63, "most_rows must name a whole number"),
        "binary": (b"\xff\xfe\x00", "codec can't decode"),
    }.values(),
    ids=[
        "no JSON",
        "a long number",
        "deep",
        "a list",
        "a later version",
        "another machine",
        "no rows",
        "many",
        "binary",
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(library: Library, text: str | bytes | int, message: str) -> None:
    file = crossovers.path(library)
    file.parent.mkdir()
    if isinstance(text, int):
        text = json.dumps({"version": 1, "machine": crossovers.machine(library), "most_rows": {"int4/group": text}})
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.warns(UserWarning, match="is ignored") as caught:
        crossovers.load(library)
    assert message in str(caught[0].message)
    assert not crossovers.MOST_ROWS


CPUINFO = {
    "x86": (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon: fast\n"
        "power management:\n\nprocessor\t: 1\nmodel name\t: another\n",
        "Xeon: fast GenuineIntel 6 207",
    ),
    "ARM": ("processor\t: 0\nBogoMIPS\t: 50\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "0x41 0xd40"),
    "nothing known": ("cpu\t: POWER9\n", platform.machine()),
    "no such file": (None, platform.processor() or platform.machine()),
}


@pytest.mark.parametrize("case", CPUINFO)
def test_the_model_of_the_processor(tmp_path: Path, case: str) -> None:
    text, expected = CPUINFO[case]
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert crossovers.model(tmp_path / "cpuinfo") == expected


def test_another_processor_has_a_file_of_its_own(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    file = crossovers.save(library, {"int4/row": 16})
    assert json.loads(file.read_text())["machine"]["model"] == crossovers.model()
    monkeypatch.setattr(crossovers, "model", lambda: "another")
    assert crossovers.path(library) != file
    crossovers.load(library)
    assert not crossovers.MOST_ROWS


def test_no_file_is_no_reason_to_warn(library: Library) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crossovers.load(library)
    assert not crossovers.MOST_ROWS


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ([3.0] * len(ROWS), None),
        ([3.0] * (len(ROWS) - 1) + [0.95], None),
        ([3.0] * (len(ROWS) - 1) + [0.8], ROWS[-2]),
        ([3.0, 0.5] + [2.0] * (len(ROWS) - 3) + [0.5], ROWS[-2]),
        ([0.5] * len(ROWS), 0),
    ],
    ids=["always", "about equal", "not at the end", "a dip before", "never"],
)
def test_most_rows(speedups: list[float], expected: int | None) -> None:
    assert most_rows(speedups) == expected


def test_tune_tells_a_folder_that_cannot_be_written_before_it_measures(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(crossovers, "_speedup", None)
    assert main(["tune"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "name a folder that can be written in BITPORT_CACHE" in printed.err


def test_tune_measures_and_keeps(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crossovers, "SIZE", 256)
    monkeypatch.setattr(crossovers.measure, "__defaults__", (("int4", "int8"),))
    assert main(["tune"]) == 0
    printed = capsys.readouterr().out
    assert "cpu: linear int4/group: native" in printed
    assert f"written to {crossovers.path(library)}" in printed
    assert set(json.loads(crossovers.path(library).read_text())["most_rows"]) == {"int4/group", "int8/row"}
