"""The numbers of :func:`bitport.numerics.dequantize`, bit for bit, in less time and memory.

Each op of dequantize writes a result of the size of the matrix, most of them in float32: several times its memory, for
which a CPU has to wait. Here one stretch of rows after the other goes through all ops and stays in the caches. Codes
are unpacked as words instead of bytes, and those that are no integers are looked up in a table.
"""

import functools
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from bitport.numerics.blocks import from_blocks, spread, to_blocks
from bitport.numerics.codec import Quantized, block_scale, dequantize, values_of, zero_of
from bitport.numerics.format import Format
from bitport.numerics.packing import from_storage
from bitport.numerics.types import NumberType

WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""Bits of a code -> the integer that has a byte for each code of a byte."""
AT_ONCE, PER_THREAD = 1 << 19, 1 << 15
"""Numbers in a stretch: what caches hold in float32, and at least what PyTorch gives to each thread."""


def is_computed(*parts: Tensor | None) -> bool:
    """Whether ops on ``parts`` are computed as they are called, on what is in their memory. A program that is traced
    would contain every turn of a loop, and should consist of ops that every runtime has; one that is transformed or
    differentiated gets the definition too."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    return all(
        part is None or (type(part) in (Tensor, Parameter) and not part.requires_grad and not part.is_neg())
        for part in parts
    )


def stretches(q: Quantized, block_n: int, most: int) -> Iterator[tuple[slice, Quantized]]:
    """Cut a matrix into (rows, their parts), of at most ``most`` rows. Blocks of ``block_n`` rows that share a scale
    stay whole, or are longer than a stretch, which then lies within one."""
    n, start = q.data.shape[-2], 0
    while start < n:
        ends = start // block_n * block_n + (most // block_n or 1) * block_n
        stop = min(start + most, ends, n)
        rows, blocks = slice(start, stop), slice(start // block_n, -(-stop // block_n))
        scale, zero = (None if part is None else part[..., blocks, :] for part in (q.scale, q.zero))
        yield rows, Quantized(q.data[..., rows, :], scale, zero, q.scale2)  # type: ignore[arg-type]
        start = stop


def dequantize_now(q: Quantized, fmt: Format, n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """:func:`bitport.numerics.dequantize`. On devices other than CPUs, where each op is a launch, it is that itself."""
    if q.data.device.type != "cpu" or not is_computed(*q) or q.data.shape[-2] != n:
        return dequantize(q, fmt, n, k, dtype)
    dense = torch.empty((*q.data.shape[:-1], k), dtype=dtype, device="cpu")
    most = max(AT_ONCE, PER_THREAD * torch.get_num_threads(), k)
    _fill(dense, q, fmt, torch.empty(min(most, dense.numel()), dtype=torch.float32, device="cpu"))
    return dense


def _fill(dense: Tensor, q: Quantized, fmt: Format, memory: Tensor) -> None:
    """Write the matrices to ``dense``, as many numbers at a time as ``memory`` holds. It is reused, since every page of
    new memory would cost a page fault."""
    *batch, n, k = dense.shape
    if dense.numel() <= len(memory):
        values = memory[: dense.numel()].view(dense.shape)
        _write_values(values, q.data, fmt.number)
        values = to_blocks(values, fmt.block)
        if fmt.number.kind == "int":
            values.sub_(zero_of(fmt, q.zero))
        dense.copy_(from_blocks(values.mul_(spread(block_scale(q.scale, q.scale2))), n, k))
    elif batch:
        for at in range(batch[0]):
            _fill(dense[at], Quantized(*(None if part is None else part[at] for part in q)), fmt, memory)  # type: ignore[arg-type]
    else:
        for rows, parts in stretches(q, fmt.block_shape(n, k)[0], len(memory) // k):
            _fill(dense[rows], parts, fmt, memory)


def _write_values(values: Tensor, data: Tensor, number: NumberType) -> None:
    """values.copy_(values_of(from_storage(data, number, k), number))"""
    k = values.shape[-1]
    if number.kind == "int":
        values.copy_(_codes(data, number, k))
    elif number.bits == 4 and k % 2 == 0:
        torch.index_select(_pairs(number), 0, data.flatten().int(), out=values.flatten().view(torch.int64))
    else:
        torch.index_select(_table(number), 0, _codes(data, number, k).flatten().int(), out=values.flatten())


def _codes(data: Tensor, number: NumberType, k: int) -> Tensor:
    """from_storage(data, number, k). A word holds m codes of b bits in its lowest bits. It is halved until each code
    has a byte: the upper half of the codes moves up by m/2 (8 - b) bits. For b = 2::

        ........ ........ ........ ddccbbaa
        ........ ....ddcc ........ ....bbaa
        ......dd ......cc ......bb ......aa
    """
    bits = number.bits
    if bits == 8 or sys.byteorder != "little":
        return from_storage(data, number, k)
    if bits in WORDS:
        words, codes = data.to(WORDS[bits]), 8 // bits
    else:  # 8 codes have as many bytes as each has bits
        lines = F.pad(data, (0, -data.shape[-1] % bits)).unflatten(-1, (-1, bits))
        words, codes = F.pad(lines, (0, 8 - bits)).view(torch.int64).squeeze(-1), 8
    width = 8 * codes
    while codes > 1:
        codes //= 2
        lower = sum(((1 << codes * bits) - 1) << at for at in range(0, width, 16 * codes))
        upper = (words << codes * (8 - bits)).bitwise_and_(lower << 8 * codes)
        words.bitwise_and_(lower).bitwise_or_(upper)
    return words.view(torch.uint8)[..., :k]


@functools.cache
def _table(number: NumberType) -> Tensor:
    """The float32 value of each code."""
    with torch.inference_mode(False):
        return values_of(torch.arange(1 << number.bits, dtype=torch.uint8, device="cpu"), number)


@functools.cache
def _pairs(number: NumberType) -> Tensor:
    """The values of the two codes in each byte, as the bits of one int64."""
    with torch.inference_mode(False):
        byte = torch.arange(256, device="cpu")
        return torch.stack([_table(number)[byte & 15], _table(number)[byte >> 4]], -1).view(torch.int64).flatten()
