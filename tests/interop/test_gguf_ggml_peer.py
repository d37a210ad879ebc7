"""Every block type against ggml's own conversion to float32, which is compiled into llama-cpp-python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from bitport.interop.gguf.blocks import BLOCKS
from bitport.interop.gguf.header import TYPES

from .gguf_files import random_blocks, values_of
from .test_gguf_blocks import ours

pytestmark = pytest.mark.peers
NUMBER = {name: number for number, name in TYPES.items()}
OF_PRISM = ("PQ2_0",)
"""In Prism's version of llama.cpp alone."""


class Traits(ctypes.Structure):
    """The first members of ggml_type_traits."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("elements", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
        ("nbytes", ctypes.c_size_t),
        ("quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@pytest.fixture(scope="module")
def traits() -> Any:
    library = pytest.importorskip("llama_cpp._ggml", reason="compiles llama.cpp: pip install llama-cpp-python").libggml
    library.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return lambda name: library.ggml_get_type_traits(NUMBER[name]).contents


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in OF_PRISM])
def test_the_numbers_of_ggml(name: str, traits: Any) -> None:
    its = traits(name)
    assert (its.name.decode().upper(), its.elements, its.nbytes) == (
        name.upper(), BLOCKS[name].elements, BLOCKS[name].nbytes,
    )  # fmt: skip
    raw = random_blocks(name, 48, 768)
    if name == "TQ2_0":
        raw &= ~(raw >> 1 & 0b01010101)  # no code is 3
    if name == "MXFP4":
        raw.reshape(48, -1, 17)[..., 0] = 120
    if name in ("Q4_1", "Q5_1"):
        raw.reshape(48, -1, its.nbytes)[..., 3] &= 0x2F  # the minimum is below 1/8
    found = torch.empty(48, 768)
    its.to_float(raw.ctypes.data, found.data_ptr(), found.numel())
    assert bool(found.isfinite().all())
    wanted = ours(name, raw)
    if BLOCKS[name].scheme.weight.zero == "none":
        assert torch.equal(wanted, found)
    else:  # a sum of two, of which one is rounded (bitport.interop.gguf.blocks)
        np.testing.assert_allclose(wanted, found, rtol=0, atol=float(found.abs().max()) * 2**-21)
    assert torch.allclose(values_of(raw, name), found, rtol=0, atol=float(found.abs().max()) * 2**-21)
