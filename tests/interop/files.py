"""Tensors as in a file, what a reader makes of them, and copies of whole directories."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitport.checkpoint.source import FileTensor
from bitport.interop.codec import Described, Reader, Writer
from bitport.interop.sources import Readable, description
from bitport.schemes import preset
from bitport.schemes.experts import expert_blocks
from bitport.tensor import QTensor
from bitport.tensor.aten import same_bits

E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6))
"""The number of each code of 4 bits."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours has each place in a word of AWQ's gemm, from the lowest bits."""


def held(tensors: dict[str, Tensor]) -> dict[str, FileTensor]:
    return {name: FileTensor(name, Path("file"), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def read(reader: Reader, tensors: dict[str, Tensor]) -> dict[str, QTensor]:
    """All quantized weights among ``tensors``, by name."""
    found = {}
    for weight in reader.weights(held(tensors)):
        q = reader.read(weight.read(tensors.__getitem__))
        assert isinstance(q, QTensor)
        found[weight.name] = q
    return found


def only(reader: Reader, tensors: dict[str, Tensor]) -> QTensor:
    """The quantized weight among ``tensors``, which hold one."""
    (q,) = read(reader, tensors).values()
    return q


def assert_numbers(q: QTensor, value: np.ndarray) -> None:
    """``q`` must hold exactly the numbers of ``value``, which may have more digits than float32."""
    np.testing.assert_array_equal(q.dequantize(torch.float32).double().numpy(), value.astype(np.float64), strict=True)


def write(writer: Writer, q: QTensor, name: str = "m.weight") -> dict[str, Tensor]:
    """What ``writer`` makes of a weight, which it must not refuse."""
    assert writer.refuses(description(name, q)) is None
    return writer.write(name, q)


def assert_described(files: Readable) -> None:
    """The descriptions of its weights must match the weights that it returns."""
    tensors = dict(files.items())
    assert list(tensors) == files.names()
    blocks = expert_blocks(files.names())
    quantized = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, QTensor)}
    made = {name: description(name, q, blocks) for name, q in quantized.items()}
    assert {q.name: q for q in files.described()} == made


def described(
    scheme: str,
    shape: tuple[int, ...] = (64, 128),
    kind: str = "linear",
    *,
    transposed: bool = False,
    more: Iterable[str] = (),
    name: str = "m.weight",
) -> Described:
    """A weight with these properties; ``more``: parts that not every scheme has."""
    return Described(name, preset(scheme), shape, kind, transposed, frozenset({"qdata", "scale", *more}))


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes along the last axis into 32-bit words: each row is one large Python integer."""
    rows = codes.reshape(-1, codes.shape[-1])
    count = -(-codes.shape[-1] * bits // 32)
    numbers = [sum(int(code) << (bits * at) for at, code in enumerate(row)) for row in rows]
    made = [[(number >> (32 * at)) & 0xFFFFFFFF for at in range(count)] for number in numbers]
    return np.array(made, dtype=np.uint32).astype(np.int32).reshape(*codes.shape[:-1], count)


def streamed(codes: np.ndarray, bits: int) -> Tensor:
    """The bytes that rows of codes occupy, without gaps; they fill whole words."""
    return torch.from_numpy(words(codes, bits)).view(torch.uint8)


def interleaved(codes: np.ndarray, order: tuple[int, ...] = AWQ_ORDER) -> np.ndarray:
    """Pack codes of 4 bits [R, C] into words of eight neighbours along C, whose ``order`` begins at the lowest bits."""
    filled = np.pad(codes & 15, ((0, 0), (0, -codes.shape[1] % 8)))
    return words(filled.reshape(len(codes), -1, 8)[..., list(order)].reshape(filled.shape), 4)


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales in the layout of tensor cores, one at a time: tiles of 128x4, in which the rows 0, 32, 64 and 96 lie side
    by side."""
    rows, columns = (-(-size // tile) for size, tile in zip(scales.shape, (128, 4), strict=True))
    flat = np.zeros(rows * columns * 512, scales.dtype)
    for (row, column), value in np.ndenumerate(scales):
        tile = row // 128 * columns + column // 4
        flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = value
    return flat.reshape(rows * 128, columns * 4)


def config_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """Copy the directory ``source`` with ``changes`` to its config.json; None removes a key."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = {**config_in(source), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return target


def assert_as_read(again: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """What is written ``again`` must be the ``tensors`` of the file that was read, bit for bit."""
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype, name
        assert again[name].shape == tensor.shape, name
        assert again[name].is_contiguous(), name
        assert same_bits(again[name], tensor), name


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        its = other[name]
        if isinstance(tensor, QTensor):
            assert isinstance(its, QTensor)
            assert its.scheme == tensor.scheme
            assert torch.equal(its.dequantize(torch.float32), tensor.dequantize(torch.float32)), name
        else:
            assert its.dtype == tensor.dtype
            assert torch.equal(its, tensor), name
