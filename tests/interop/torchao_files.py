"""Files of torchao from loops of plain Python, and what bitport makes of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitport.interop import torchao
from bitport.tensor import QTensor

from .files import read

RNG = np.random.default_rng(0)

File = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors, and what the header says of the one parameter m.weight."""


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def file(kind: str, parts: dict[str, Any], **said: Any) -> File:
    tensors = {f"m._weight_{role}": torch.as_tensor(part) for role, part in parts.items()}
    return tensors, {"_type": kind, "_data": said, "_tensor_data_names": list(parts)}


def reader(said: Any, of: torch.dtype = torch.bfloat16) -> torchao.Reader:
    found = torchao.Reader({"quant_method": "torchao", "quant_type": {"default": {}}}, of)
    text = said if isinstance(said, str) else json.dumps(said)
    norm = json.dumps({"_type": "Tensor"})
    found.metadata = {"format": "pt", "tensor_names": '["m.weight", "norm"]', "m.weight": text, "norm": norm}
    return found


def values(made: File) -> tuple[QTensor, np.ndarray]:
    (q,) = read(reader(made[1]), {**made[0], "norm": torch.ones(3)}).values()
    return q, q.dequantize(torch.float32).double().numpy()


def bfloat16(values: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Rounded: as a tensor, and in float64."""
    rounded = torch.from_numpy(values).bfloat16()
    return rounded, rounded.double().numpy()


def spread(values: np.ndarray, k: int, group: int) -> np.ndarray:
    return np.repeat(values, group, 1)[:, :k]


def plain(n: int = 8, k: int = 64, group: int = 32, zeros: bool = True, **said: Any) -> tuple[File, np.ndarray, Any]:
    q = RNG.integers(-8, 8, (n, k))
    scale, exact_scale = bfloat16(RNG.uniform(0.001, 0.1, (n, -(-k // group))))
    zero, exact_zero = bfloat16(RNG.uniform(-0.5, 0.5, scale.shape) * zeros)
    qdata = np.zeros((n, k // 2), np.uint8)
    for row in range(n):
        for column in range(k):
            qdata[row, column // 2] |= (q[row, column] & 15) << 4 * (column % 2)
    parts = {"qdata": qdata.view(np.int8), "scale": scale.T.contiguous(), "zero_point": zero.T.contiguous()}
    shift = spread(exact_zero, k, group)
    made = file("Int4Tensor", parts, block_size=[1, group], shape=[n, k], **said)
    return made, q * spread(exact_scale, k, group) + shift, shift - 8 * spread(exact_scale, k, group)


def tiles(n: int = 12, k: int = 192, group: int = 64) -> tuple[File, np.ndarray, np.ndarray]:
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    codes = RNG.integers(0, 16, (rows, columns))
    pairs, exact = bfloat16(RNG.uniform(0.01, 0.1, (columns // group, rows, 2)))
    qdata = np.zeros((rows // 8, columns // 128, 32, 4), np.int64)
    for tile, outer, lane, pair in np.ndindex(*qdata.shape):
        base = (outer * 8 + 2 * pair) * 16 + 2 * (lane % 4)
        row = 8 * tile + lane // 4
        for shift, column in zip((0, 16, 4, 20, 8, 24, 12, 28), (0, 1, 8, 9, 16, 17, 24, 25), strict=True):
            qdata[tile, outer, lane, pair] |= int(codes[row, base + column]) << shift
    parts = {"qdata": qdata.astype(np.uint32).view(np.int32), "scale_and_zero": pairs}
    made = file("Int4TilePackedTo4dTensor", parts, block_size=[1, group], shape=[n, k])
    scale, zero = (spread(exact[:, :, at].T, columns, group)[:n, :k] for at in (0, 1))
    return made, (codes[:n, :k] - 8) * scale + zero, zero - 8 * scale


def integers(kind: str, bits: int, block: tuple[int, int], zero: bool, **said: Any) -> tuple[File, np.ndarray]:
    n, k = 8, 64
    low, grid = -(1 << (bits - 1)), (n // block[0], k // block[1])
    q, zeros = RNG.integers(low, -low, (n, k)), RNG.integers(low, -low, grid) * zero
    scale = RNG.uniform(0.001, 0.1, grid).astype(np.float32)
    parts = {"qdata": q.astype(np.int8), "scale": scale, "zero_point": zeros.astype(np.int8)}
    exact = np.zeros((n, k))
    for row, column in np.ndindex(n, k):
        at = row // block[0], column // block[1]
        exact[row, column] = np.float32(np.float32(q[row, column] - zeros[at]) * scale[at])
    return file(kind, parts, block_size=list(block), dtype=dtype("bfloat16"), **said), exact


def int8_inputs(per: str = "PerRow", mapping: str = "SYMMETRIC", **more: Any) -> dict[str, Any]:
    granularity = {"_type": per, "_data": {"dim": -1} if per == "PerRow" else {}}
    data = {"granularity": granularity, "mapping_type": {"_type": "MappingType", "_data": mapping}, **more}
    return {"_type": "QuantizeTensorToInt8Kwargs", "_data": {"reduce_range": False, **data}}


def float8_inputs(**data: Any) -> dict[str, Any]:
    common = {"float8_dtype": dtype("float8_e4m3fn"), "hp_value_lb": None, "hp_value_ub": None}
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": {**common, **data}}


def nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
