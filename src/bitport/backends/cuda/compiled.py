"""CUDA C++ that is compiled at its first call by NVRTC, the compiler that comes with PyTorch; no toolkit is needed.
Binaries are cached in the user's cache folder under a hash of everything they depend on. A file begins with the SHA-256
of the rest: the driver would refuse damaged code in every call, or run it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.backends import user_cache

SOURCES = Path(__file__).parent / "kernels"
SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
CLUSTER, DEPENDENT = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
DIGEST = hashlib.sha256().digest_size
Sizes = tuple[int, int, int]


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("_padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


class Function:
    """A kernel, compiled for and loaded on one device, which must be current when it is created and in each call."""

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        """``shared``: the most bytes of dynamic shared memory that a block gets in any call."""
        module, self._function, self._code = ctypes.c_void_p(), ctypes.c_void_p(), code
        _bind()
        _driver("cuModuleLoadData", ctypes.byref(module), code)
        _driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _driver("cuFuncSetAttribute", self._function, SHARED_BYTES, shared)

    def __call__(
        self, *arguments: Any, grid: Sizes, threads: int, shared: int, cluster: int = 0, dependent: bool = False
    ) -> None:
        """Launch on the current stream. ``arguments``: ctypes values of the kernel's parameter types. ``cluster``:
        blocks along x in a cluster, where the kernel does not declare it. ``dependent``: programmatic dependent launch,
        where the kernel begins before the previous one in the stream has ended and waits for it itself."""
        _bind()
        given = [_Attribute(CLUSTER, 0, (cluster, 1, 1))] if cluster else []
        given += [_Attribute(DEPENDENT, 0, (1,))] if dependent else []
        attributes = (_Attribute * len(given))(*given)
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(grid, (threads, 1, 1), shared, stream, attributes, len(given))
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _driver("cuLaunchKernelEx", ctypes.byref(launch), self._function, addresses, None)


class _Thread(threading.local):
    bound = False


_thread = _Thread()


def _bind() -> None:
    """Give this thread the context of the current device, unless it has one. CUDA's runtime, by which PyTorch computes,
    does that by itself at its first work in a thread; the driver refuses a launch that comes before."""
    if _thread.bound:
        return
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _driver("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _driver("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _driver("cuCtxSetCurrent", context)
    _thread.bound = True


def address(part: Tensor | None) -> ctypes.c_void_p:
    """Return the address of its data; null for None."""
    return ctypes.c_void_p(None if part is None else part.data_ptr())


def source(kernel: str, values: Mapping[str, int], before: str = "") -> str:
    """Return the text to compile: ``values`` as macros (the kernel's file explains them), ``before``, and the files."""
    files = [(SOURCES / name).read_text(encoding="utf-8") for name in ("device.cu", f"{kernel}.cu")]
    return "".join([*(f"#define {name} {value}\n" for name, value in values.items()), before, *files])


def binary(source: str, architecture: str) -> bytes:
    """Compile ``source`` to a cubin for ``architecture``, such as 90a, or take it from the cache."""
    options = [f"--gpu-architecture=sm_{architecture}", "--std=c++17"]
    depends = "\0".join([source, *options, str(torch.version.cuda), *map(str, _version())])
    file = user_cache.folder() / "cuda" / f"{hashlib.sha256(depends.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        content = file.read_bytes()
        digest, kept = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(kept).digest() == digest:
            return kept
        warnings.warn(f"{file} is damaged: it is compiled anew", stacklevel=2)
    made = _compile(source, options)
    with contextlib.suppress(OSError):  # uncached: the next process compiles again
        user_cache.write(file, hashlib.sha256(made).digest() + made)
    return made


def _compile(source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"bitport.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        try:
            _nvrtc("nvrtcCompileProgram", program, len(options), given)
        except RuntimeError as error:
            raise RuntimeError(f"{error}:\n{_text(program)}") from None
        return _bytes(program, "nvrtcGetCUBIN")
    finally:
        _nvrtc("nvrtcDestroyProgram", ctypes.byref(program))


def _text(program: ctypes.c_void_p) -> str:
    return _bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")


def _bytes(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(f"{what}Size", program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    _nvrtc(what, program, content)
    return content.raw


def architecture(major: int, minor: int) -> str | None:
    """Return what to compile for to run on sm{major}{minor}: that itself or, where NVRTC is older than the chip, the
    first of its generation, whose code all later ones run. None if NVRTC knows neither."""
    known, chip, first = _architectures(), 10 * major + minor, 10 * major
    return str(chip) if chip in known else str(first) if first in known else None


@functools.cache
def _architectures() -> tuple[int, ...]:
    count = ctypes.c_int()
    _nvrtc("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    _nvrtc("nvrtcGetSupportedArchs", known)
    return tuple(known)


def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _driver(name: str, *arguments: object) -> None:
    if status := getattr(_libraries()[0], name)(*arguments):
        message = ctypes.c_char_p()
        _libraries()[0].cuGetErrorString(status, ctypes.byref(message))
        raise RuntimeError(f"CUDA: {name} failed: {(message.value or b'unknown').decode()} ({status})")


def _nvrtc(name: str, *arguments: object) -> None:
    library = _libraries()[1]
    if status := getattr(library, name)(*arguments):
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {name} failed: {library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load (driver, NVRTC)."""
    major = str(torch.version.cuda).partition(".")[0]
    if sys.platform == "win32":
        return ctypes.CDLL("nvcuda.dll"), ctypes.CDLL(f"nvrtc64_{major}0_0.dll")
    return ctypes.CDLL("libcuda.so.1"), _found(f"libnvrtc.so.{major}")


def _found(name: str) -> ctypes.CDLL:
    """Load a library by name; where it is not on the search path, first load one of PyTorch's that links to it."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        return ctypes.CDLL(name)


@functools.cache
def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        _version()
    except (OSError, RuntimeError, AttributeError) as error:
        return f"no compiler for CUDA was found beside PyTorch: {error}"
    return None
