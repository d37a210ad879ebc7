"""Decoding of ggml blocks against the numpy code of the library ``gguf``: equal where nothing is rounded, and within
the derived bound where a zero point is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.gguf import blocks as gguf_blocks
from bitport.interop.gguf.blocks import BLOCKS, decoded
from bitport.interop.gguf.header import TYPES
from bitport.tensor import from_parts

from . import gguf_files
from .gguf_files import gguf

N, BLOCKS_OF_ROW = 48, 3
SUMS = tuple(name for name, block in BLOCKS.items() if block.scheme.weight.zero == "float")
EXACT = tuple(name for name in BLOCKS if name not in SUMS)
HALVES = {
    **dict.fromkeys([name for name in BLOCKS if name.endswith("_0") or name.startswith("IQ")], (0, 2)),
    **{"Q2_K": (80, 84), "Q3_K": (108, 110), "Q6_K": (208, 210), "TQ1_0": (52, 54), "TQ2_0": (64, 66)},
}
"""Byte ranges of d and m; the first four bytes in types not listed."""
CODES = {"Q4_1": (4, 20), "Q5_1": (4, 24), "Q2_K": (16, 80), "Q4_K": (16, 144), "Q5_K": (16, 176)}
"""Byte ranges of the codes; with these cleared, a block has its constant value."""
SPECIAL = (0.0, -0.0, 2.0**-24, -(2.0**-24), 3 * 2.0**-17, -1.5, 0.0123, 65504.0, -65504.0)


def number(name: str) -> int:
    found: int = gguf.GGMLQuantizationType[name]
    return found


def random_rows(name: str, halves: tuple[float, ...] = SPECIAL) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    raw = rng.integers(0, 255, (N, BLOCKS_OF_ROW, BLOCKS[name].nbytes), dtype=np.uint8)
    if name == "TQ2_0":
        raw &= ~(raw >> 1 & 0b01010101)  # no code is 3
    if name == "IQ1_M":  # d is in the top four bits of four numbers
        bits = rng.choice(halves, raw.shape[:-1]).astype(np.float16).view(np.uint16)[..., None]
        raw[..., 49::2] = raw[..., 49::2] & 15 | (bits >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 4
    elif name == "NVFP4":
        raw[..., :4] &= 127  # no sign
    elif name != "MXFP4":
        start, end = HALVES.get(name, (0, 4))
        if name == "Q1_0":  # its scale is doubled
            halves = tuple(half for half in halves if abs(half) < 1 << 15)
        drawn = rng.choice(halves, (N, BLOCKS_OF_ROW, (end - start) // 2)).astype(np.float16)
        raw[..., start:end] = drawn.view(np.uint8)
    return raw.reshape(N, -1)


def theirs(name: str, raw: np.ndarray) -> Tensor:
    return gguf_files.values_of(raw, name)


def ours(name: str, raw: np.ndarray) -> Tensor:
    block = BLOCKS[name]
    shape = (*raw.shape[:-1], raw.shape[-1] // block.nbytes * block.elements)
    q = from_parts(decoded(block, torch.from_numpy(raw)), block.scheme, shape=shape, dtype=torch.bfloat16)
    return q.dequantize(torch.float32)


def assert_within(name: str, raw: np.ndarray) -> float:
    """Check that errors are within 2^-24 (minimum + 3 value), and return the largest as a fraction of that bound."""
    constant = raw.reshape(-1, BLOCKS[name].nbytes).copy()
    constant[:, slice(*CODES[name])] = 0
    minimum, wanted = theirs(name, constant.reshape(raw.shape)).double(), theirs(name, raw).double()
    bound = 2.0**-24 * (1 + 2.0**-20) * (minimum.abs() + 3 * wanted.abs())
    off = (ours(name, raw).double() - wanted).abs()
    assert bool((off <= bound).all())
    return float((off / bound.clamp(min=1e-300)).max())


def test_types_and_sizes_are_those_of_the_library() -> None:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {at: name for at, name in TYPES.items() if at in known} == known
    for name, block in BLOCKS.items():
        sizes = gguf_files.PLAIN.get(name) or gguf.GGML_QUANT_SIZES[number(name)]
        assert sizes == (block.elements, block.nbytes)


@pytest.mark.parametrize("name", EXACT)
def test_a_product_is_the_same_number(name: str) -> None:
    raw = random_rows(name)
    with np.errstate(over="ignore"):
        assert torch.equal(ours(name, raw), theirs(name, raw))


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_as_close_as_its_zero_point(name: str) -> None:
    worst = assert_within(name, random_rows(name))
    assert worst > 0.1, "the bound is far from what happens"


@pytest.mark.parametrize("name", SUMS)
def test_a_constant_block_is_exact(name: str) -> None:
    raw = random_rows(name).reshape(-1, BLOCKS[name].nbytes)
    start, _ = HALVES.get(name, (0, 4))
    raw[:, start : start + 2] = 0
    assert torch.equal(ours(name, raw), theirs(name, raw))


def rounded_by_the_library(name: str) -> bool:
    return not name.endswith("_K") and not name.startswith("IQ") and name not in ("NVFP4", *gguf_files.PLAIN)


@pytest.mark.parametrize("name", filter(rounded_by_the_library, BLOCKS))
def test_what_the_library_rounds(name: str) -> None:
    value = np.random.default_rng(0).normal(0, 0.02, (N, 256)).astype(np.float32)
    value[3] = 0
    value[4, :32] = 0.25
    raw = gguf.quants.quantize(value, number(name))
    if name in SUMS:
        assert_within(name, raw)
    else:
        assert torch.equal(ours(name, raw), theirs(name, raw))


@pytest.mark.parametrize("name", BLOCKS)
def test_in_pieces_and_stacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    any_bits = name not in ("MXFP4", "NVFP4", "TQ2_0")
    raw = torch.from_numpy(gguf_files.random_blocks(name, 12, 512) if any_bits else random_rows(name)[:12])
    whole = decoded(BLOCKS[name], raw)
    monkeypatch.setattr(gguf_blocks, "CHUNK", 5 * 512)
    stacked = decoded(BLOCKS[name], raw.reshape(3, 4, -1))
    for one, other in zip(whole, stacked, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            if one is whole.scale2:
                assert (one.shape, other.shape) == ((1, 1), (3, 1, 1))
                continue
            assert other.shape[:2] == (3, 4)
            as_bytes = (part.contiguous().view(torch.uint8) for part in (one, other.flatten(0, 1)))
            assert torch.equal(*as_bytes)


def test_a_scale_that_cannot_be_doubled() -> None:
    raw = np.zeros((1, 18), dtype=np.uint8)
    for half, fits in ((32752.0, True), (-32768.0, False), (float("inf"), True)):
        raw[0, :2] = np.array([half], np.float16).view(np.uint8)
        if fits:
            assert torch.equal(ours("Q1_0", raw), theirs("Q1_0", raw))
        else:
            with pytest.raises(CheckpointError, match="twice a scale of Q1_0 is no float16"):
                ours("Q1_0", raw)


def test_an_exponent_that_is_no_number() -> None:
    raw = np.zeros((1, 17), dtype=np.uint8)
    raw[0, 0] = 255
    with pytest.raises(CheckpointError, match="255"):
        decoded(BLOCKS["MXFP4"], torch.from_numpy(raw))


def test_a_code_that_is_no_number() -> None:
    raw = np.zeros((1, 66), dtype=np.uint8)
    raw[0, 5] = 0b11000000
    with pytest.raises(CheckpointError, match="TQ2_0 is 3"):
        decoded(BLOCKS["TQ2_0"], torch.from_numpy(raw))


def test_scales_of_nvfp4() -> None:
    """All possible scales: 127 is 0, as in llama.cpp, and a sign is not allowed."""
    raw = np.full((32, 36), 0x21, dtype=np.uint8)
    raw[:, :4] = np.arange(128, dtype=np.uint8).reshape(32, 4)
    found = ours("NVFP4", raw)
    assert torch.equal(found, theirs("NVFP4", raw))
    assert found[31, 48:].abs().max() == 0
    assert found[31, 32] == 448 * 0.5
    raw[0, 2] = 128
    with pytest.raises(CheckpointError, match="negative"):
        ours("NVFP4", raw)
