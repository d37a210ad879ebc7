"""Table of bitport's ops as functions on JAX arrays, with the op's own arguments.

The adapters (torchax, torch_xla, torch_tpu) pass these to their library; under jax.jit, a mesh or jax.export they are
used directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitport.backends.xla import activations, attention, contracts, convert, products

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "linear": products.linear,
    "dyn_linear": products.dyn_linear,
    "linear_then": activations.linear_then,
    "dyn_linear_then": activations.dyn_linear_then,
    "grouped_linear": products.grouped_linear,
    "dyn_grouped_linear": products.dyn_grouped_linear,
    "embedding": convert.embedding,
    "dequantize": convert.dequantize,
    "quantize": convert.quantize,
    "quantize_input": convert.quantize_input,
    "repack": convert.repack,
    "quantized_matmul": contracts.quantized_matmul,
    "int4pack_mm": contracts.int4pack_mm,
    "attention": attention.attention,
}
