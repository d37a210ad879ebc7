"""Dtypes and shapes of the canonical parts of a quantized matrix, and checks of given parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from bitport.errors import ArgumentError
from bitport.layouts import Matrix, layout
from bitport.numerics import FLOATS, Format, Quantized
from bitport.numerics.format import SCALE_DTYPES


class PartSpec(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]


def matrix_of(fmt: Format, n: int, k: int) -> Matrix:
    return Matrix(fmt.dtype, n, k, *fmt.block_shape(n, k))


def rows_and_columns(shape: tuple[int, ...], batched: bool, transposed: bool) -> tuple[int, int]:
    """(N, K) of the matrix behind a tensor of ``shape``: leading dimensions are batch; without a batch, trailing
    dimensions are flattened into K (a convolution)."""
    if len(shape) < 2:
        raise ArgumentError(f"a quantized tensor has at least two dimensions, not shape {list(shape)}")
    if len(shape) > 2 and not batched:
        return shape[0], math.prod(shape[1:])
    return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])


def part_specs(fmt: Format, matrix: Matrix) -> dict[str, PartSpec]:
    plain = layout("plain").expects(matrix)
    named = SCALE_DTYPES[fmt.scale]
    scales = FLOATS if named is None else (named,)
    specs = {"data": PartSpec((plain.data_dtype,), plain.data_shape), "scale": PartSpec(scales, plain.scale_shape)}
    if fmt.zero != "none":
        specs["zero"] = PartSpec((torch.uint8,) if fmt.zero == "int" else scales, matrix.grid)
    if fmt.global_scale:
        specs["scale2"] = PartSpec((torch.float32,), (1, 1))
    return specs


def check_dense(named: Iterable[tuple[str, object]]) -> None:
    """Raise ArgumentError unless each part is None or a dense tensor: sparse, nested and PyTorch's own quantized ones
    may have neither sizes nor memory to look at."""
    for name, part in named:
        if part is not None and not isinstance(part, Tensor):
            raise ArgumentError(f"{name} must be a tensor, not a {type(part).__name__}")
        if part is not None and (part.layout != torch.strided or part.is_nested or part.is_quantized):
            raise ArgumentError(f"{name} must be a dense tensor, not a sparse, nested or quantized one of PyTorch")


def check_parts(parts: Quantized, fmt: Format, matrix: Matrix, batch: tuple[int, ...] = ()) -> None:
    """Raise ArgumentError unless the canonical ``parts`` have the dtypes and shapes of ``fmt``, all on one device."""
    wanted = part_specs(fmt, matrix)
    for name, part in zip(Quantized._fields, parts, strict=True):
        spec = wanted.get(name)
        if (part is None) != (spec is None):
            raise ArgumentError(f"{fmt.dtype}: part {name!r} is {'missing' if part is None else 'not expected'}")
        if part is None or spec is None:
            continue
        if part.dtype not in spec.dtypes or tuple(part.shape) != (*batch, *spec.shape):
            raise ArgumentError(
                f"{fmt.dtype} {matrix.n}x{matrix.k}: part {name!r} is {part.dtype} {list(part.shape)}, "
                f"expected {' or '.join(map(str, spec.dtypes))} {[*batch, *spec.shape]}"
            )
        if part.device != parts.data.device:
            raise ArgumentError(
                f"part {name!r} is on {part.device}, data on {parts.data.device}; move both to one device"
            )


def check_packed(parts: Quantized, fmt: Format, matrix: Matrix, name: str, batch: tuple[int, ...]) -> None:
    """Raise ArgumentError unless the parts have the dtypes and shapes of the layout ``name``; call before unpacking."""
    wanted = layout(name).expects(matrix)
    scales = part_specs(fmt, matrix)["scale"].dtypes
    specs = [(parts.data, (wanted.data_dtype,), wanted.data_shape), (parts.scale, scales, wanted.scale_shape)]
    if parts.zero is not None and wanted.zero_shape is not None:
        specs.append((parts.zero, (torch.uint8, *FLOATS), wanted.zero_shape))
    for part, dtypes, shape in specs:
        if part.dtype not in dtypes or tuple(part.shape) != (*batch, *shape):
            raise ArgumentError(
                f"{matrix.dtype} {matrix.n}x{matrix.k} in layout {name} wants {' or '.join(map(str, dtypes))} "
                f"{[*batch, *shape]}, not {part.dtype} {list(part.shape)}"
            )


def has_data(*tensors: Tensor) -> bool:
    """Whether the tensors hold values: neither on the meta device, nor under FakeTensorMode, nor while compiled."""
    if torch.compiler.is_compiling() or any(tensor.device.type == "meta" for tensor in tensors):
        return False
    return detect_fake_mode(tensors) is None


def check_zero(zero: Tensor | None, fmt: Format) -> None:
    """Raise ArgumentError unless integer zero points are codes or one more (GPTQ stores 16 for 4 bits): a kernel may
    store them in few bits. Only checked on the CPU, where files are read; on other devices it would synchronize."""
    if fmt.zero != "int" or zero is None or zero.numel() == 0:
        return
    if zero.device.type != "cpu" or not has_data(zero):
        return
    most, given = 1 << fmt.number.bits, int(zero.max())
    if given > most:
        raise ArgumentError(f"{fmt.dtype}: a zero point is one of 0..{most}, but part 'zero' holds {given}")


def check_extra(
    k: int,
    device: torch.device,
    perm: Tensor | None = None,
    pre_scale: Tensor | None = None,
    act_scale: Tensor | None = None,
) -> None:
    for name, part in (("perm", perm), ("pre_scale", pre_scale), ("act_scale", act_scale)):
        if part is not None and not isinstance(part, Tensor):
            raise ArgumentError(f"{name} must be a tensor, not a {type(part).__name__}")
        if part is not None and part.device != device:
            raise ArgumentError(f"{name} is on {part.device}, data on {device}; move both to one device")
        if part is not None and name != "act_scale" and tuple(part.shape) != (k,):
            raise ArgumentError(f"{name} must have shape [{k}], not {list(part.shape)}")
    if pre_scale is not None and pre_scale.dtype not in FLOATS:
        raise ArgumentError(f"pre_scale must be one of {', '.join(map(str, FLOATS))}, not {pre_scale.dtype}")
    if perm is not None and has_data(perm):
        every = torch.arange(k, dtype=torch.int64, device=perm.device)
        if perm.dtype not in (torch.int32, torch.int64) or not torch.equal(perm.sort().values.to(torch.int64), every):
            raise ArgumentError(f"perm must hold each of 0..{k - 1} once")
    if act_scale is not None and (act_scale.numel() != 1 or act_scale.dtype != torch.float32):
        raise ArgumentError(f"act_scale must be one float32 number, not {act_scale.dtype} {list(act_scale.shape)}")
