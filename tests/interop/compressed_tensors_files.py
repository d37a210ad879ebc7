"""Tensors and settings of compressed-tensors made by plain Python and numpy, and their values in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitport.interop.compressed_tensors import Reader, Writer
from bitport.interop.sources import description
from bitport.numerics import Format
from bitport.schemes import PRESETS, Scheme, preset
from bitport.tensor import QTensor, quantize_tensor

from .files import read, words

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M3 = np.array([m / 8 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)


def decoded(codes: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """The top bit of a code is the sign."""
    half = len(magnitudes)
    return np.where(codes >= half, -1.0, 1.0) * magnitudes[codes % half]


def spread(scale: np.ndarray, n: int, k: int, rows: int, columns: int) -> np.ndarray:
    return scale.repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]


def padded_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """As up to version 0.16: a word holds as many whole codes as it can."""
    each = 32 // bits
    filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
    return np.concatenate([words(filled[:, at : at + each], bits) for at in range(0, filled.shape[1], each)], 1)


def config(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    said = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}, "ignore": []}
    return {**said, **more}


def ints(bits: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "int", "num_bits": bits, "symmetric": symmetric, "dynamic": False, **more}


def floats(bits: int, **more: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": bits, "symmetric": True, "dynamic": False, **more}


def single(said: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> QTensor:
    (q,) = read(Reader(said, dtype), tensors).values()
    return q


def value(q: QTensor) -> np.ndarray:
    """Codes, zero points and scales have so few bits in these tests that float32 holds their product exactly."""
    return q.dequantize(torch.float32).double().numpy()


@dataclasses.dataclass
class Layer:
    """A layer of random integers. ``block``: 0 stands for the whole axis."""

    n: int
    k: int
    bits: int
    block: tuple[int, int]
    symmetric: bool

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.n, self.k, self.bits])
        rows, columns = self.block[0] or self.n, self.block[1] or self.k
        grid = (-(-self.n // rows), -(-self.k // columns))
        middle = 1 << (self.bits - 1)
        self.codes = rng.integers(0, 1 << self.bits, (self.n, self.k))
        self.zeros = np.full(grid, middle) if self.symmetric else rng.integers(0, 1 << self.bits, grid)
        self.scale = torch.from_numpy(rng.uniform(0.001, 0.1, grid)).to(torch.bfloat16)
        scales = self.scale.double().numpy()
        self.value = (self.codes - spread(self.zeros, self.n, self.k, rows, columns)) * spread(
            scales, self.n, self.k, rows, columns
        )

    def packed(self, pack: Callable[[np.ndarray, int], np.ndarray] = words) -> dict[str, Tensor]:
        tensors = {
            "m.weight_packed": torch.from_numpy(pack(self.codes, self.bits)),
            "m.weight_shape": torch.tensor([self.n, self.k]),
            "m.weight_scale": self.scale if self.block != (0, 0) else self.scale.reshape(1),
        }
        if not self.symmetric:
            tensors["m.weight_zero_point"] = torch.from_numpy(pack(self.zeros.T, self.bits).T.copy())
            if self.block == (0, 0):
                tensors["m.weight_zero_point"] = self.signed(self.zeros).reshape(1)
        return tensors

    def in_bytes(self) -> dict[str, Tensor]:
        tensors = {"m.weight": self.signed(self.codes), "m.weight_scale": self.scale}
        return tensors if self.symmetric else tensors | {"m.weight_zero_point": self.signed(self.zeros)}

    def signed(self, codes: np.ndarray) -> Tensor:
        return torch.from_numpy((codes - (1 << (self.bits - 1))).astype(np.int8))

    def said(self, **more: Any) -> dict[str, Any]:
        blocks: dict[tuple[int, int], dict[str, Any]] = {
            (0, 0): {"strategy": "tensor"},
            (1, 0): {"strategy": "channel"},
        }
        if self.block[0] > 1:
            return ints(self.bits, self.symmetric, strategy="block", block_structure=list(self.block), **more)
        group = {"strategy": "group", "group_size": self.block[1]}
        return ints(self.bits, self.symmetric, **blocks.get(self.block, group), **more)


def streamed(codes: np.ndarray, bits: int) -> Tensor:
    """The bytes that codes fill: in whole words, there are no others."""
    return torch.from_numpy(words(codes, bits)).view(torch.uint8)


NVFP4 = floats(
    4, strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn"
)


def nvfp4_layer(divisor: float) -> tuple[dict[str, Tensor], np.ndarray]:
    rng = np.random.default_rng(7)
    codes, scales = rng.integers(0, 16, (6, 64)), rng.integers(1, 126, (6, 4))
    tensors = {
        "m.weight_packed": streamed(codes, 4),
        "m.weight_scale": torch.from_numpy(scales.astype(np.uint8)).view(torch.float8_e4m3fn),
        "m.weight_global_scale": torch.tensor([divisor]),
    }
    return tensors, decoded(codes, E2M1) * (E4M3[scales] / float(np.float32(divisor))).repeat(16, 1)


TOKEN8: dict[str, Any] = {"type": "int", "num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "symmetric": True}
MX32: dict[str, Any] = {
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}
GROUP128: dict[str, Any] = {"strategy": "group", "group_size": 128}
CHANNEL: dict[str, Any] = {"strategy": "channel"}
MXFP4 = floats(4, strategy="group", group_size=32, scale_dtype="torch.uint8")


def plain(name: str | Scheme, n: int = 64, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    scheme = preset(name) if isinstance(name, str) else name
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype)
    act_scale = torch.tensor([0.02]) if scheme.static else None
    return quantize_tensor(weight, scheme, act_scale=act_scale).to_layout("plain")


def written(weights: dict[str, QTensor], left: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    writer, tensors = Writer(), {}
    for name, q in weights.items():
        assert writer.refuses(description(name, q)) is None
        tensors.update(writer.write(name, q))
    return writer.config(left), tensors


def assert_same(one: QTensor, other: QTensor, but: tuple[str, ...] = ()) -> None:
    assert one.scheme == other.scheme
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    names = one.__tensor_flatten__()[0]
    assert names == other.__tensor_flatten__()[0]
    for name in names:
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if name not in but:
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


REFUSED = {"fp8-e5m2-wo", "nf4", "nvfp4"}
MORE = (
    *("int2-sym", "int3-g32", "int5-channel", "int8-g64-asym", "int4-tensor", "int8-tensor-asym", "int8-b16x32"),
    *("int8-dyn-asym", "fp8-wo-g64", "fp8-block-wo", "fp8-wo-b32x16", "mxfp8-wo", "mxfp4-wo"),
)
SCHEMES = {
    **{name: preset(name) for name in (*PRESETS, *MORE) if name not in REFUSED},
    "int1-g32": Scheme(weight=Format(dtype="int1", block=(1, 32), zero="int", scale="input")),
    "fp8-static": dataclasses.replace(preset("fp8"), static=True),
    "mxfp4-fp8": dataclasses.replace(preset("mxfp4"), act="fp8-128"),
}
