"""ggml, from the libraries of llama-cpp-python, called by ctypes: float32 in and out, with the input rounded to int8 in
blocks. "repack" interleaves rows of the weight for wider vectors."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.peers.base import Prepared, undivided

PACKAGES = ("llama-cpp-python",)
VARIANTS = {
    "Q4_0": "4-bit x int8",
    "Q4_K": "4-bit x int8",
    "Q8_0": "8-bit x int8",
    "Q4_0 repack": "4-bit x int8",
    "Q4_K repack": "4-bit x int8",
}
TYPES = {"Q4_0": (2, 32), "Q8_0": (8, 32), "Q4_K": (12, 256)}
"""ggml's number of the type, and the columns per block."""
F32 = 0


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
        ("from_float_ref", c_void_p),
    )


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_get_type_traits": (POINTER(TypeTraits), c_int),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_free": (None, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buft_alloc_buffer": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_get_base": (c_void_p, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_buffer_set_usage": (None, c_void_p, c_int),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_dev_by_type": (c_void_p, c_int),
    "ggml_backend_dev_backend_reg": (c_void_p, c_void_p),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int32),
}
"""Name -> (result, arguments...)."""

WEIGHTS = 1
"""GGML_BACKEND_BUFFER_USAGE_WEIGHTS"""


class Ggml:
    """The functions above, from whichever ggml library has them, and a CPU backend."""

    def __init__(self) -> None:
        found = find_spec("llama_cpp")
        if found is None or not found.submodule_search_locations:
            raise ImportError("No module named 'llama_cpp'")
        folder = Path(next(iter(found.submodule_search_locations))) / "lib"
        names = ("libggml-base.so", "libggml-cpu.so", "libggml.so")
        libraries = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in names]
        for name, (result, *arguments) in FUNCTIONS.items():
            function = next(getattr(each, name) for each in libraries if hasattr(each, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, torch.get_num_threads())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def buffer_type(self, kind: str) -> int | None:
        """The buffer type whose name contains ``kind``, such as AMX; plain memory for ""."""
        if not kind:
            return int(self.backend_cpu_buffer_type())
        registry = self.backend_dev_backend_reg(self.backend_dev_by_type(0))
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.backend_dev_by_type(0))
        at = 0
        while extra[at]:
            if kind.lower() in self.backend_buft_name(extra[at]).decode().lower():
                return int(extra[at])
            at += 1
        return None


@functools.cache
def library() -> Ggml:
    return Ggml()


library()  # fail on import if it is missing


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    name, _, kind = variant.partition(" ")
    number, block = TYPES[name]
    n, k = weight.shape
    if reason := undivided(k, block):
        return reason
    buffer_type = library().buffer_type(kind)
    if buffer_type is None:
        return f"ggml has no {kind} memory on this processor"
    packed = _quantized(weight, number)
    weights = [_weight(packed, number, n, k, buffer_type) for _ in range(copies)]
    return Prepared(
        [functools.partial(_run, at) for at in range(copies)],
        functools.partial(_value, packed, number, n, k),
        len(packed),
        accept=functools.partial(Graphs, weights, n),
    )


def _quantized(weight: Tensor, number: int) -> Any:
    n, k = weight.shape
    values = weight.float().contiguous()
    packed = ctypes.create_string_buffer(library().row_size(number, k) * n)
    library().quantize_chunk(number, values.data_ptr(), packed, 0, n, k, None)
    return packed


def _value(packed: Any, number: int, n: int, k: int) -> Tensor:
    value = torch.empty(n, k)
    library().get_type_traits(number).contents.to_float(ctypes.addressof(packed), value.data_ptr(), n * k)
    return value.double()


def _weight(packed: Any, number: int, n: int, k: int, buffer_type: int) -> int:
    """A tensor in separate memory, which the library may reorder."""
    context = library().init(InitParams(1 << 16, None, True))
    weight: int = library().new_tensor_2d(context, number, k, n)
    buffer = library().backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    library().backend_buffer_set_usage(buffer, WEIGHTS)
    library().backend_tensor_set(weight, packed, 0, len(packed))
    return weight


class Graphs:
    """One product for each copy of the weight, with the same x; all write to the same y."""

    def __init__(self, weights: list[int], n: int, x: Tensor) -> None:
        x, (m, k) = x.float().contiguous(), x.shape
        self._context = library().init(InitParams(len(weights) << 17, None, True))
        held = library().new_tensor_2d(self._context, F32, k, m)
        products = [library().mul_mat(self._context, weight, held) for weight in weights]
        self._buffer = library().backend_buft_alloc_buffer(library().backend_cpu_buffer_type(), 4 * m * (k + n) + 256)
        base = library().backend_buffer_get_base(self._buffer)
        library().backend_tensor_alloc(self._buffer, held, base)
        behind = base + (4 * m * k + 127) // 64 * 64
        for product in products:
            library().backend_tensor_alloc(self._buffer, product, behind)
        library().backend_tensor_set(held, x.data_ptr(), 0, x.nbytes)
        self.graphs = [self._graph(product) for product in products]
        memory = (ctypes.c_float * (m * n)).from_address(behind)
        self.y = torch.frombuffer(memory, dtype=torch.float32).reshape(m, n)

    def _graph(self, product: int) -> int:
        graph: int = library().new_graph_custom(self._context, 8, False)
        library().build_forward_expand(graph, product)
        return graph

    def __del__(self) -> None:
        library().backend_buffer_free(self._buffer)
        library().free(self._context)


def _run(at: int, graphs: Graphs) -> Tensor:
    status = library().backend_graph_compute(library().backend, graphs.graphs[at])
    if status:
        raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
    return graphs.y
