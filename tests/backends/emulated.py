"""CUDA C++ kernels on machines without a GPU: emulated.cpp around the source that a device would get."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bitport.numerics import NUMBER_TYPES
from bitport.numerics.packing import to_storage
from bitport.ops import Weight

HERE = Path(__file__).parent
GIVEN = "#define CALL(x, codes, scale, zero, bias, y, s) {0}(x, codes, scale, zero, bias, y, {1})\n"
KERNELS = {
    "few_rows": GIVEN.format("few_rows", "s[0], s[1], s[2]")
    + "#define GROUPS GROUP ? k / (GROUP ? GROUP : 1) : 1\n#define BEGINS !CLUSTERS\n",
    "many_rows": GIVEN.format("many_rows", "s[0], s[1], s[2], s[3], s[4]")
    + "#define GROUPS sizes[3]\n#define BEGINS true\n",
}
"""Kernel -> the macros that emulated.cpp needs; BEGINS: whether x may be read from the start."""


class Emulated:
    """Called like a Function."""

    def __init__(self, library: Path) -> None:
        self.emulate = ctypes.CDLL(str(library)).emulate
        self.emulate.restype = ctypes.c_char_p
        self.launches: list[tuple[int, bool]] = []
        """(blocks per cluster, whether it may start early) of each launch."""

    def __call__(
        self,
        *given: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        cluster: int = 0,
        dependent: bool = False,
    ) -> None:
        self.launches.append((cluster, dependent))
        addresses = (ctypes.c_void_p * 6)(*(each.value for each in given[:6]))
        sizes = [each.value for each in given[6:]]
        wrong = self.emulate(
            *((ctypes.c_int * 3)(*grid), max(1, cluster), threads, shared, addresses),
            *((ctypes.c_int * len(sizes))(*sizes), len(sizes)),
        )
        assert wrong is None, wrong.decode()


@functools.cache
def emulated(kernel: str, source: str, compiler: str, folder: Path) -> Emulated:
    """Compile ``source`` in ``folder`` for emulation; cached by the arguments."""
    place = folder / f"{kernel}-{len(list(folder.iterdir()))}"
    place.mkdir()
    (place / "source.cu").write_text(source)
    file = place / "emulated.cpp"
    file.write_text(f'#define SOURCE "{place / "source.cu"}"\n{KERNELS[kernel]}{(HERE / "emulated.cpp").read_text()}')
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(file.with_suffix(".so"))]
    done = subprocess.run([compiler, *options, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Emulated(file.with_suffix(".so"))


def every_code_and_zero(number: str, dtype: torch.dtype) -> tuple[list[Weight], torch.Tensor]:
    """(weights in each layout that the kernels read, with a row per zero point and every code in columns; their values)

    A zero point may be one more than the largest code, if a byte holds that."""
    its, k = NUMBER_TYPES[number], 256
    codes = torch.arange(k, dtype=torch.uint8).bitwise_and(its.qmax)
    zeros = torch.arange(min(its.qmax + 2, 256), dtype=torch.uint8)[:, None]
    data, n = to_storage(codes.expand(len(zeros), k), its), len(zeros)
    layouts = {"plain": data, **({"signed_int8": data ^ 0x80} if number == "int8" else {})}
    ones = torch.ones(n, 1, dtype=dtype)
    weights = [Weight(data, ones, zeros, None, number, n, k, 1, k, layout) for layout, data in layouts.items()]
    return weights, codes.double() - zeros.double()


class Stream(NamedTuple):
    cuda_stream: int


def in_place_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    in_stream(monkeypatch, 0)


def in_stream(monkeypatch: pytest.MonkeyPatch, number: int, captured: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(number))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
