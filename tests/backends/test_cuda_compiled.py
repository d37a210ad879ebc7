"""CUDA C++ compiled by a fake NVRTC and loaded by a fake driver: what is cached, and what errors say."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitport.backends.cuda import compiled

SOURCE = 'extern "C" __global__ void nothing() {}'


class Nvrtc:
    """Returns the source as compiled code, prefixed by the number of compilations."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[str]]] = []
        self.version, self.log, self.fails = (13, 0), b"line 1: what is this?\0", False
        self.architectures = [75, 80, 86, 87, 89, 90, 100, 101, 120]
        self.nvrtcGetErrorString: Any = lambda status: b"NVRTC_ERROR_COMPILATION"

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcGetNumSupportedArchs(self, count: Any) -> int:
        count._obj.value = len(self.architectures)
        return 0

    def nvrtcGetSupportedArchs(self, to: Any) -> int:
        to[:] = self.architectures
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *rest: Any) -> int:
        program._obj.value = 1
        self.source = source.decode()
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.made.append((self.source, [each.decode() for each in options[:count]]))
        return 6 if self.fails else 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0

    def code(self) -> bytes:
        return f"{len(self.made)} {self.source}".encode()

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.code())
        return 0

    def nvrtcGetCUBIN(self, program: Any, to: Any) -> int:
        ctypes.memmove(to, self.code(), len(self.code()))
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.log)
        return 0

    def nvrtcGetProgramLog(self, program: Any, to: Any) -> int:
        ctypes.memmove(to, self.log, len(self.log))
        return 0


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Nvrtc]:
    made = Nvrtc()
    monkeypatch.setattr(compiled, "_libraries", lambda: (None, made))
    monkeypatch.setenv("BITPORT_CACHE", str(tmp_path))
    compiled._architectures.cache_clear()
    yield made
    compiled._architectures.cache_clear()


def test_compiled_once_for_all_that_it_depends_on(nvrtc: Nvrtc, tmp_path: Path) -> None:
    first = compiled.binary(SOURCE, "90a")
    assert first == f"1 {SOURCE}".encode()
    assert compiled.binary(SOURCE, "90a") == first, "as it was kept"
    assert nvrtc.made == [(SOURCE, ["--gpu-architecture=sm_90a", "--std=c++17"])]
    assert compiled.binary(SOURCE, "80") != first
    assert compiled.binary(SOURCE + " ", "90a") != first
    nvrtc.version = (13, 1)
    assert compiled.binary(SOURCE, "90a") != first
    assert len(nvrtc.made) == len(list(tmp_path.glob("cuda/*.cubin"))) == 4


@pytest.mark.parametrize(
    ("chip", "compiled_for"),
    [
        *(((8, 0), "80"), ((8, 6), "86"), ((8, 7), "87"), ((10, 0), "100"), ((12, 0), "120")),
        *(((12, 1), "120"), ((10, 3), "100")),
        *(((11, 0), None), ((13, 0), None)),
    ],
)
def test_what_code_is_made_for_a_chip(nvrtc: Nvrtc, chip: tuple[int, int], compiled_for: str | None) -> None:
    """A chip runs code for the first of its generation. So does PyTorch for CUDA 12.8 on GB10 (sm121) and B300 (sm103),
    which its NVRTC does not know; sm101 is the first of no generation, and no other chip runs its code."""
    assert compiled.architecture(*chip) == compiled_for


@pytest.mark.parametrize("keep", [0, 20, 40, -1], ids=["empty", "in the checksum", "in the code", "one byte less"])
def test_damaged_code_is_not_loaded(nvrtc: Nvrtc, tmp_path: Path, keep: int) -> None:
    made = compiled.binary(SOURCE, "90a")
    (file,) = tmp_path.glob("cuda/*.cubin")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.warns(UserWarning, match="is damaged: it is compiled anew"):
        again = compiled.binary(SOURCE, "90a")
    assert (made, again) == (f"1 {SOURCE}".encode(), f"2 {SOURCE}".encode())
    assert compiled.binary(SOURCE, "90a") == again, "as it was kept"


def test_where_nothing_can_be_kept(nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPORT_CACHE", "/dev/null")
    for _ in range(2):
        assert compiled.binary(SOURCE, "90a").endswith(SOURCE.encode())
    assert len(nvrtc.made) == 2


def test_what_the_compiler_says_is_told(nvrtc: Nvrtc, tmp_path: Path) -> None:
    nvrtc.fails = True
    with pytest.raises(RuntimeError, match=r"NVRTC_ERROR_COMPILATION.*\n.*what is this\?"):
        compiled.binary(SOURCE, "90a")
    assert not list(tmp_path.glob("cuda/*"))


def test_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(compiled, "_libraries", none)
    compiled.missing.cache_clear()
    assert compiled.missing() == (
        "no compiler for CUDA was found beside PyTorch: libnvrtc.so.13: cannot open shared object file"
    )
    compiled.missing.cache_clear()


class Driver:
    def __init__(self) -> None:
        self.status = 0
        self.launched: list[dict[str, Any]] = []
        self.context = threading.local()
        self.retained: list[int] = []

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = getattr(self.context, "current", None)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.retained.append(device.value)
        context._obj.value = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context.current = context.value
        return 0

    def invalid_context(self) -> int:
        return 0 if hasattr(self.context, "current") else 201

    def cuModuleLoadData(self, *arguments: Any) -> int:
        return self.status or self.invalid_context()

    def cuModuleGetFunction(self, *arguments: Any) -> int:
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert (attribute, value) == (8, 4096)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"no kernel image is available"
        return 0

    def cuLaunchKernelEx(self, launch: Any, function: Any, arguments: Any, extra: None) -> int:
        given = launch._obj
        attributes = [(each.kind, tuple(each.value)[:3]) for each in given.attributes[: given.count]]
        values = [ctypes.cast(each, ctypes.POINTER(ctypes.c_int)).contents.value for each in arguments]
        self.launched.append({"grid": tuple(given.grid), "block": tuple(given.block), "shared": given.shared})
        self.launched[-1] |= {"attributes": attributes, "values": values, "stream": given.stream}
        return self.invalid_context()


class Stream:
    cuda_stream = 7


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(compiled, "_libraries", lambda: (made, None))
    monkeypatch.setattr(compiled, "_thread", compiled._Thread())
    monkeypatch.setattr(compiled.torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(compiled.torch.cuda, "current_device", lambda: 1)
    return made


def test_each_thread_has_a_context(driver: Driver) -> None:
    """The runtime, which PyTorch uses, binds a thread at its first work there: here none came before. A context that
    is there is kept."""
    function = compiled.Function(b"code", "nothing", 4096)

    def launch() -> None:
        for _ in range(2):
            function(grid=(1, 1, 1), threads=32, shared=0)

    def bound() -> None:
        driver.context.current = 5
        launch()
        assert driver.context.current == 5

    launch()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(launch).result()
        other.submit(bound).result()
    assert len(driver.launched) == 6
    assert driver.retained == [101, 101], "the current device's, once in each thread without one"


def test_launches(driver: Driver) -> None:
    function = compiled.Function(b"code", "nothing", 4096)
    numbers = ctypes.c_int(5), ctypes.c_int(6)
    function(*numbers, grid=(1, 2, 3), threads=128, shared=512, cluster=4, dependent=True)
    function(grid=(1, 1, 1), threads=32, shared=0)
    assert driver.launched == [
        {
            **{"grid": (1, 2, 3), "block": (128, 1, 1), "shared": 512, "stream": 7, "values": [5, 6]},
            "attributes": [(4, (4, 1, 1)), (6, (1, 0, 0))],
        },
        {"grid": (1, 1, 1), "block": (32, 1, 1), "shared": 0, "stream": 7, "values": [], "attributes": []},
    ]


def test_what_the_driver_says_is_told(driver: Driver) -> None:
    driver.status = 209
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData failed: no kernel image is available \(209\)"):
        compiled.Function(b"code", "nothing", 4096)


def test_the_structures_are_those_of_the_driver() -> None:
    """CUlaunchAttribute is 8 bytes and a union of 64; CUlaunchConfig is seven 32-bit numbers, padding, and pointers."""
    assert ctypes.sizeof(compiled._Attribute) == 72
    assert ctypes.sizeof(compiled._Launch) == 56
    assert compiled._Launch.stream.offset == 32
