"""The C functions over tensors (native/shim), with a stand-in for torch: run by CTest on the installed kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bitport.export.compile import ARCHIVE
from bitport.export.ops import FAKES, SCHEMAS, declarations
from tests.native.builds import nvcc

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "shim" / "bitport_shim.h"


@pytest.mark.skipif(not shutil.which("ctest") or not ARCHIVE.is_file(), reason="needs cmake and the kernels' archive")
def test_ctest(tmp_path: Path) -> None:
    configure = ["cmake", "-S", ROOT / "native" / "shim", "-B", tmp_path, f"-DBITPORT_ARCHIVE={ARCHIVE}"]
    for command in (
        [*configure, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CUDA_COMPILER="],
        ["cmake", "--build", tmp_path],
        ["ctest", "--test-dir", tmp_path, "--output-on-failure", "-V"],
    ):
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    cases = re.search(r"(\d+) cases: no fault", ran.stdout)
    assert cases
    assert int(cases[1]) > 200


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make") or not shutil.which("g++"), reason="needs make and g++")
def test_no_fault_is_found() -> None:
    ran = subprocess.run(["make", "-s", "-C", ROOT, "sanitize-shim"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-8000:]


def test_on_cuda_all_tensors_are_on_one_device(tmp_path: Path) -> None:
    shim, program = ROOT / "native" / "shim", str(tmp_path / "devices")
    host = ("error.cpp", "link.cpp", "../torch/ask.cpp", "tests/host.cpp")
    sources = [str(shim / each) for each in ("cuda/tinygemm.cu", "tests/cuda/devices.cpp", *host)]
    for command in ([nvcc(), "-std=c++17", "-o", program, *sources], [program]):
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    assert "3 cases: no fault" in ran.stdout


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_header_declares_what_generated_code_calls(name: str) -> None:
    (wanted,) = next(texts for op, texts in declarations().items() if op._schema.name.endswith(name))
    flat = re.sub(r"\s+", " ", HEADER.read_text()).replace("( ", "(")
    assert f"BITPORT_SHIM {wanted};" in flat
    assert set(FAKES) == set(SCHEMAS)
