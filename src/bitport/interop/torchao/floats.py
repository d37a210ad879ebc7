"""Floats of torchao in bitport's form; for their meaning see :mod:`bitport.interop.torchao.tensors`."""

from __future__ import annotations

import dataclasses

import torch

from bitport.interop.checks import E4M3, E8M0, FLOAT8, Stored, expect
from bitport.interop.swizzle import unswizzled
from bitport.interop.torchao.blocks import Found, blocks_of, one_per_block
from bitport.interop.torchao.header import Entry
from bitport.numerics import FLOATS, Format, Quantized
from bitport.schemes import PRESETS

ELEMENTS = {"float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8", "float4_e2m1fn_x2": "mxfp4"}
"""dtype of MXTensor -> a preset with the same scales."""


def float8(entry: Entry, weight: Stored) -> Found:
    qdata = weight.expect("qdata", tuple(FLOAT8), (None, None))
    shape = (qdata.shape[0], qdata.shape[1])
    block = blocks_of(entry, shape)
    scale = one_per_block(weight, "scale", FLOATS, block, shape)
    fmt = Format(dtype=FLOAT8[qdata.dtype], block=block, scale="input")
    return Found(Quantized(qdata.contiguous(), scale), fmt, shape)


def mx(entry: Entry, weight: Stored) -> Found:
    elements = entry.said.get("elem_dtype")
    if not isinstance(elements, str) or elements not in ELEMENTS:
        raise entry.fail("elem_dtype", f"{', '.join(ELEMENTS)} are read")
    fmt = PRESETS[ELEMENTS[elements]].weight
    if elements == "float8_e5m2":
        fmt = dataclasses.replace(fmt, dtype="float8_e5m2")
    return _of_blocks(entry, weight, fmt, E8M0)


def nvfp4(entry: Entry, weight: Stored) -> Found:
    found = _of_blocks(entry, weight, PRESETS["nvfp4"].weight, E4M3)
    given = "per_tensor_scale" in weight
    second = weight.number("per_tensor_scale") if given else torch.ones((), dtype=torch.float32)
    return found._replace(parts=found.parts._replace(scale2=second.reshape(1, 1)))


def _of_blocks(entry: Entry, weight: Stored, fmt: Format, scales: torch.dtype) -> Found:
    if entry.said.get("block_size") != fmt.block[1]:
        raise entry.fail("block_size", f"{fmt.block[1]} is read")
    qdata = weight.expect("qdata", (fmt.number.storage,), (None, None))
    shape = (qdata.shape[0], qdata.shape[1] * 8 // fmt.number.bits)
    grid, scale, name = fmt.scale_shape(*shape), weight["scale"], weight.names["scale"]
    swizzled = entry.said.get("is_swizzled_scales")
    if not isinstance(swizzled, (bool, type(None))):
        raise entry.fail("is_swizzled_scales", "true and false are read")
    if swizzled:
        scale = unswizzled(scale, name, (scales,), grid)
    return Found(Quantized(qdata.contiguous(), expect(scale, name, (scales,), grid).contiguous()), fmt, shape)
