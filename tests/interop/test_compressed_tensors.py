"""compressed-tensors files against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.schemes import preset

from .compressed_tensors_files import (
    E2M3,
    E4M3,
    NVFP4,
    Layer,
    config,
    decoded,
    floats,
    nvfp4_layer,
    padded_words,
    single,
    spread,
)
from .files import E2M1, assert_numbers, streamed, words

KINDS = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])


@KINDS
@pytest.mark.parametrize(("n", "k", "block"), [(5, 64, (1, 32)), (40, 51, (1, 0)), (3, 7, (0, 0)), (33, 70, (1, 32))])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_are_those_of_the_definition(
    bits: int, n: int, k: int, block: tuple[int, int], symmetric: bool
) -> None:
    layer = Layer(n, k, bits, block, symmetric)
    q = single(config("pack-quantized", layer.said()), layer.packed())
    assert_numbers(q, layer.value)
    assert q.dtype == torch.bfloat16
    assert q.scale.dtype == torch.bfloat16
    assert q.scheme.weight.zero == ("none" if symmetric and bits > 1 else "int")


@KINDS
@pytest.mark.parametrize(("n", "k"), [(5, 64), (40, 51), (33, 7)])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_older_files_do_not_lie_across_words(bits: int, n: int, k: int, symmetric: bool) -> None:
    layer = Layer(n, k, bits, (1, 0), symmetric)
    tensors = layer.packed(padded_words)
    assert_numbers(single(config("pack-quantized", layer.said(), version="0.16.0"), tensors), layer.value)
    if k == 64 and symmetric:  # if the packings differ, so do their widths
        assert_numbers(single(config("pack-quantized", layer.said()), tensors), layer.value)


@pytest.mark.parametrize(
    ("version", "pack"), [("0.16.0", padded_words), ("0.17.0", words), ("0.20.1", words), ("1.2", words)]
)
def test_the_version_decides_where_the_width_leaves_it_open(
    version: str, pack: Callable[[np.ndarray, int], np.ndarray]
) -> None:
    layer = Layer(3, 20, 3, (1, 0), True)  # 20 codes of 3 bits are 2 words in both packings
    q = single(config("pack-quantized", layer.said(), version=version), layer.packed(pack))
    assert_numbers(q, layer.value)


@KINDS
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("actorder", ["group", "dynamic"])
def test_act_order(actorder: str, bits: int, symmetric: bool) -> None:
    layer = Layer(6, 96, bits, (1, 32), symmetric)
    order = np.random.default_rng(bits).permutation(96)
    tensors = layer.packed()
    tensors["m.weight_packed"] = torch.from_numpy(words(layer.codes[:, order], bits))
    tensors["m.weight_g_idx"] = torch.from_numpy((order // 32).astype(np.int32))
    q = single(config("pack-quantized", layer.said(actorder=actorder)), tensors)
    assert q.perm is not None
    assert_numbers(q, layer.value[:, order])


@pytest.mark.parametrize("group_of", [torch.full((96,), -1), torch.arange(96) // 32], ids=["never set", "in order"])
def test_act_order_that_orders_nothing(group_of: Tensor) -> None:
    layer = Layer(6, 96, 4, (1, 32), True)
    tensors = layer.packed() | {"m.weight_g_idx": group_of.int()}
    q = single(config("pack-quantized", layer.said(actorder="group")), tensors)
    assert q.perm is None
    assert_numbers(q, layer.value)


@KINDS
@pytest.mark.parametrize("stored", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 16), (4, 32)])
@pytest.mark.parametrize("bits", [1, 4, 7, 8])
def test_integers_in_bytes(bits: int, block: tuple[int, int], stored: str, symmetric: bool) -> None:
    layer = Layer(10, 48, bits, block, symmetric)
    assert_numbers(single(config(stored, layer.said()), layer.in_bytes()), layer.value)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 64), (128, 128), (3, 50)])
def test_float8(block: tuple[int, int], stored: str, scale: torch.dtype) -> None:
    n, k = 150, 192
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (n, k))
    codes[codes % 128 == 127] = 0  # NaN
    rows, columns = block[0] or n, block[1] or k
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (-(-n // rows), -(-k // columns)))).to(torch.bfloat16).to(scale)
    tensors = {
        "m.weight": torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn),
        "m.weight_scale": scales.reshape(1) if block == (0, 0) else scales,
    }
    arguments: dict[tuple[int, int], dict[str, Any]] = {
        (0, 0): {"strategy": "tensor"},
        (1, 0): {"strategy": "channel"},
        (1, 64): {"strategy": "group", "group_size": 64},
    }
    blocks = {"strategy": "block", "block_structure": list(block)}
    q = single(config(stored, floats(8, **arguments.get(block, blocks))), tensors)
    wanted = decoded(codes, E4M3) * spread(scales.double().numpy(), n, k, rows, columns)
    assert_numbers(q, wanted)
    assert q.scale.dtype == torch.float32
    assert q.scheme.name != "custom"


MX = pytest.mark.parametrize(
    ("stored", "bits", "magnitudes", "name"),
    [
        ("mxfp4-pack-quantized", 4, E2M1[:8], "mxfp4-wo"),
        ("mxfp6-pack-quantized", 6, E2M3, "mxfp6-wo"),
        ("mxfp8-quantized", 8, E4M3, "mxfp8-wo"),
    ],
)


@MX
@pytest.mark.parametrize("e8m0", [False, True], ids=["uint8", "e8m0"])
def test_mx(stored: str, bits: int, magnitudes: np.ndarray, name: str, e8m0: bool) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (5, 96))
    codes[codes % 128 == 127] = 0
    exponents = rng.integers(100, 150, (5, 3))
    scale = torch.from_numpy(exponents.astype(np.uint8))
    data = {"m.weight_packed": streamed(codes, bits)} if bits < 8 else {}
    data |= {"m.weight": streamed(codes, bits).view(torch.float8_e4m3fn)} if bits == 8 else {}
    said = config(stored, floats(bits, strategy="group", group_size=32, scale_dtype="torch.uint8"))
    q = single(said, data | {"m.weight_scale": scale.view(torch.float8_e8m0fnu) if e8m0 else scale})
    assert_numbers(q, decoded(codes, magnitudes) * (2.0 ** (exponents - 127)).repeat(32, 1))
    assert q.scheme == preset(name)


@pytest.mark.parametrize("divisor", [1.0, 8192.0, 3.0, 1234.567, 0.07])
def test_nvfp4(divisor: float) -> None:
    tensors, wanted = nvfp4_layer(divisor)
    q = single(config("nvfp4-pack-quantized", NVFP4), tensors)
    assert q.scheme.name == "nvfp4-wo"
    off = 0 if divisor in (1, 8192) else 2.0**-22
    np.testing.assert_allclose(q.dequantize(torch.float32).double().numpy(), wanted, rtol=off, atol=0)
