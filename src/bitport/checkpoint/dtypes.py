"""The dtypes that a checkpoint can hold, and the safetensors tag that each is stored under.

Only tags that every supported safetensors release can read are used. Other dtypes are stored as one that has a tag:
one-byte dtypes (e8m0 scales) as U8 of the same shape, complex numbers as [..., 2] real and imaginary parts. The bytes
are the same either way, and the manifest has the true dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import FLOATS

OWN_TAG: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
LENT_TAG: dict[torch.dtype, str] = {
    torch.float8_e8m0fnu: "U8",
    torch.float8_e4m3fnuz: "U8",
    torch.float8_e5m2fnuz: "U8",
    torch.complex64: "F32",
    torch.complex128: "F64",
}
TAGS = OWN_TAG | LENT_TAG
TAGS_FOR_OTHERS = TAGS | {torch.float8_e8m0fnu: "F8_E8M0"}
"""For files of other formats, which have no manifest with the true dtypes."""
READABLE: dict[str, torch.dtype] = {
    **{tag: dtype for dtype, tag in OWN_TAG.items()},
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
"""Tags that are accepted in third-party files."""
WEIGHT_DTYPES = (*FLOATS, torch.float64)
"""Dtypes of weights that are not quantized."""
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in TAGS}


def name_of(dtype: torch.dtype) -> str:
    if dtype not in TAGS:
        raise ArgumentError(f"a checkpoint cannot hold {dtype}; it holds {', '.join(DTYPES)}")
    return str(dtype).removeprefix("torch.")


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 2) if dtype.is_complex else shape


def countable(shape: Sequence[int]) -> bool:
    """Whether the number of elements, ignoring empty dimensions, fits in int64, as torch requires for strides."""
    return math.prod(size for size in shape if size) < 2**63


def to_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of ``tensor`` in row-major order; a view if it is stored that way in CPU memory."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).numpy().data


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of :func:`to_bytes`, without a copy: ``data`` is flat uint8."""
    return data.view(dtype).reshape(shape)
