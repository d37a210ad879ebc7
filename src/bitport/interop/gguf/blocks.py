"""The block types of ggml, used in GGUF files, in bitport's form.

Types with a single factor are represented exactly: d * s has at most 18 significant bits. Those with an offset need a
zero point, (q - z) * d with z = -m / d, and z is rounded to float32. So a value v that llama.cpp computes as d * q + m,
rounded once, differs from ours by at most 2^-24 * (|m| + 3 |v|), slightly more than the rounding of either. If d is 0
the block is the constant m, and codes are 0 (:func:`bitport.interop.shifts.of_constants`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bitport.interop.gguf import grids, splits
from bitport.interop.shifts import of_constants
from bitport.numerics import Format, Quantized, pack_bits
from bitport.schemes import Scheme, preset

CHUNK = 1 << 24
"""The number of elements decoded at once, since each temporarily takes several bytes."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class BlockType(NamedTuple):
    elements: int
    fields: tuple[int, ...]
    """Bytes of each field."""
    scheme: Scheme
    split: Callable[..., splits.Split]
    """Decodes the fields, each uint8 [.., bytes]."""

    @property
    def nbytes(self) -> int:
        return sum(self.fields)


def decoded(block: BlockType, raw: Tensor) -> Quantized:
    """Decode ``raw``: uint8 [.., N, bytes of a row], whole blocks. If the scheme has a global scale it is 1."""
    at_once = max(1, CHUNK // (raw.shape[-1] // block.nbytes * block.elements))
    pieces = [_decoded(block, rows) for rows in raw.flatten(0, -2).split(at_once)]
    data, scale, zero, _ = (
        None if each[0] is None else torch.cat(each).unflatten(0, raw.shape[:-1]) for each in zip(*pieces, strict=True)
    )
    assert data is not None
    assert scale is not None
    scale2 = torch.ones(*raw.shape[:-2], 1, 1, dtype=torch.float32) if block.scheme.weight.global_scale else None
    return Quantized(data, scale, zero, scale2)


def _decoded(block: BlockType, rows: Tensor) -> Quantized:
    blocks = rows.unflatten(-1, (-1, block.nbytes))
    codes, scale, offset = block.split(*blocks.split(block.fields, -1))
    zero = None
    if offset is not None:
        codes, scale, zero = _with_zero(codes, scale, offset)
    data = pack_bits(codes.flatten(-2), block.scheme.weight.number.bits)
    return Quantized(data, scale.flatten(-2), None if zero is None else zero.flatten(-2))


def _with_zero(codes: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    constant = scale == 0
    groups = codes.unflatten(-1, (scale.shape[-1], -1)).masked_fill(constant.unsqueeze(-1), 0)
    size, sign = of_constants(offset)
    zero = torch.where(constant, sign, -offset / scale)
    return groups.flatten(-2), torch.where(constant, size, scale), zero


def _symmetric(dtype: str, group: int) -> Scheme:
    return Scheme(weight=Format(dtype=dtype, block=(1, group), scale="input"))


BLOCKS: dict[str, BlockType] = {
    "Q1_0": BlockType(128, (2, 16), _symmetric("int1", 128), splits.q1_0),
    "Q2_0": BlockType(64, (2, 16), _symmetric("int2", 64), splits.q2_0),
    "PQ2_0": BlockType(128, (2, 32), _symmetric("int2", 128), splits.q2_0),
    "Q4_0": BlockType(32, (2, 16), preset("int4-g32-sym"), splits.q4_0),
    "Q4_1": BlockType(32, (2, 2, 16), preset("int4-g32-fzero"), splits.q4_1),
    "Q5_0": BlockType(32, (2, 4, 16), preset("int5-g32-sym"), splits.q5_0),
    "Q5_1": BlockType(32, (2, 2, 4, 16), preset("int5-g32-fzero"), splits.q5_1),
    "Q8_0": BlockType(32, (2, 32), preset("int8-g32"), splits.q8_0),
    "Q2_K": BlockType(256, (16, 64, 2, 2), preset("int2-g16-fzero"), splits.q2_k),
    "Q3_K": BlockType(256, (32, 64, 12, 2), preset("int3-g16-sym"), splits.q3_k),
    "Q4_K": BlockType(256, (2, 2, 12, 128), preset("int4-g32-fzero"), splits.q4_k),
    "Q5_K": BlockType(256, (2, 2, 12, 32, 128), preset("int5-g32-fzero"), splits.q5_k),
    "Q6_K": BlockType(256, (128, 64, 16, 2), preset("int6-g16-sym"), splits.q6_k),
    "IQ1_S": BlockType(256, (2, 32, 16), _symmetric("ggml_iq2", 32), grids.iq1_s),
    "IQ1_M": BlockType(256, (32, 16, 8), _symmetric("ggml_iq2", 16), grids.iq1_m),
    "IQ2_XXS": BlockType(256, (2, 64), _symmetric("ggml_iq2", 32), grids.iq2_xxs),
    "IQ2_XS": BlockType(256, (2, 64, 8), _symmetric("ggml_iq2", 16), grids.iq2_xs),
    "IQ2_S": BlockType(256, (2, 32, 32, 8, 8), _symmetric("ggml_iq2", 16), grids.iq2_s),
    "IQ3_XXS": BlockType(256, (2, 64, 32), _symmetric("ggml_iq3", 32), grids.iq3_xxs),
    "IQ3_S": BlockType(256, (2, 64, 8, 32, 4), _symmetric("ggml_iq3s", 32), grids.iq3_s),
    "IQ4_NL": BlockType(32, (2, 16), _symmetric("ggml_iq4", 32), splits.q4_0),
    "IQ4_XS": BlockType(256, (2, 2, 4, 128), _symmetric("ggml_iq4", 32), splits.iq4_xs),
    "TQ1_0": BlockType(256, (32, 16, 4, 2), preset("int2-g256-sym"), splits.tq1_0),
    "TQ2_0": BlockType(256, (64, 2), preset("int2-g256-sym"), splits.tq2_0),
    "MXFP4": BlockType(32, (1, 16), preset("mxfp4-wo"), splits.mxfp4),
    "NVFP4": BlockType(64, (4, 32), preset("nvfp4-wo"), splits.nvfp4),
}
