"""quantized_matmul has the semantics of torch_xla's op of that name, and also computes cases which that one refuses.

The reference is an element-by-element float64 sum in Python; shapes and tolerances of the cases at the end are those of
torch_xla's own tests.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bitport.numerics import sqnr
from bitport.ops import OPS
from bitport.ops.samples import product_budget

op = torch.ops.bitport.quantized_matmul


def judge(x: Tensor, w: Tensor, scaler: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """y[m, n] = sum_c scaler[c, n] * sum_s x w - zero_point[c, n] * sum_s x."""
    blocks = w.t()[None] if w.dim() == 2 else w
    chunks, size, n = blocks.shape
    scale, zero = scaler.reshape(chunks, n), None if zero_point is None else zero_point.reshape(chunks, n)
    rows = x.reshape(-1, chunks, size).tolist()
    y = torch.zeros(len(rows), n, dtype=torch.float64)
    for m, at in itertools.product(range(len(rows)), range(n)):
        for c in range(chunks):
            inner = sum(rows[m][c][s] * int(blocks[c, s, at]) for s in range(size))
            y[m, at] += float(scale[c, at]) * inner
            if zero is not None:
                y[m, at] -= float(zero[c, at]) * sum(rows[m][c])
    return y.reshape(*x.shape[:-1], n)


def cosine(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0)


def rounded(x: Tensor) -> Tensor:
    """Each row rounded to int8 in float64: symmetric, scale amax / 127, half to even."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).double()
    return torch.where(scale > 0, (x.double() / scale).round() * scale, 0.0)


@pytest.mark.parametrize("act", [False, True], ids=["a16", "a8"])
@pytest.mark.parametrize("int4", [False, True], ids=["w8", "w4"])
@pytest.mark.parametrize("asym", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [-1, 2, 6], ids=["channel", "block2", "block6"])
def test_every_row_of_the_table(block: int, asym: bool, int4: bool, act: bool) -> None:
    m, k, n = 4, 12, 8
    low, high = (-8, 8) if int4 else (-128, 128)
    grid = (n,) if block == -1 else (k // block, n)
    w = torch.randint(low, high, (n, k) if block == -1 else (k // block, block, n)).to(torch.int8)
    scaler = torch.rand(grid) + 0.1
    zero = torch.randint(-3, 4, grid) * scaler if asym else None
    x = torch.randn(m, k)
    y = op(x, w, scaler, zero, block, int4, act)
    exact = judge(rounded(x) if act else x.double(), w, scaler, zero)
    assert float(sqnr(exact, y)) > product_budget(torch.float32, k, m * n)


def test_the_zero_point_is_in_units_of_the_result() -> None:
    """(q - z) * s is computed by passing z * s, not z."""
    w, s, z = torch.randint(-8, 8, (8, 6)).to(torch.int8), torch.rand(8) + 0.5, torch.randint(1, 4, (8,))
    x = torch.randn(3, 6)
    wanted = x.double() @ ((w.double() - z[:, None]) * s.double()[:, None]).T
    torch.testing.assert_close(op(x, w, s, z * s).double(), wanted, rtol=1e-5, atol=1e-5)
    assert (op(x, w, s, z.float()).double() - wanted).abs().max() > 0.1


@pytest.mark.parametrize("block", [None, -1], ids=["none", "minus-one"])
def test_the_default_is_per_channel(block: int | None) -> None:
    x, w, s = torch.randn(3, 5), torch.randint(-128, 128, (8, 5)).to(torch.int8), torch.rand(8)
    assert torch.equal(op(x, w, s, None, block), op(x, w, s))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 3, 5), (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("act", [False, True], ids=["a16", "a8"])
def test_every_rank_of_input(shape: tuple[int, ...], act: bool) -> None:
    x, w, s = torch.randn(shape), torch.randint(-128, 128, (8, 5)).to(torch.int8), torch.rand(8)
    y = op(x, w, s, quantize_activation=act)
    assert y.shape == (*shape[:-1], 8)
    rows = [op(row[None], w, s, quantize_activation=act)[0] for row in x.reshape(-1, 5)]
    if rows:
        torch.testing.assert_close(y.reshape(-1, 8), torch.stack(rows))


def test_a_row_of_zeros_gives_zeros() -> None:
    x = torch.tensor([[0.0] * 5, [1.0] * 5])
    y = op(x, torch.ones(8, 5, dtype=torch.int8), torch.ones(8), quantize_activation=True)
    assert torch.equal(y, torch.tensor([[0.0] * 8, [5.0] * 8]))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=["s32", "s16"])
def test_the_result_has_the_dtype_of_the_input(dtype: torch.dtype, scale: torch.dtype) -> None:
    y = op(torch.randn(3, 5).to(dtype), torch.ones(8, 5, dtype=torch.int8), torch.rand(8).to(scale))
    assert y.dtype == dtype


def test_keywords_as_in_the_original() -> None:
    x, w = torch.randn(3, 6), torch.randint(-8, 8, (3, 2, 8)).to(torch.int8)
    s = torch.rand(3, 8)
    y = op(x, w, s, zero_point=None, block_size=2, int4_weight=True, quantize_activation=False)
    torch.testing.assert_close(y.double(), judge(x.double(), w, s), rtol=1e-5, atol=1e-6)


def test_eager_compiled_and_meta_agree() -> None:
    x, w, s = torch.randn(3, 5), torch.randint(-128, 128, (8, 5)).to(torch.int8), torch.rand(8)
    torch.compiler.reset()
    run = torch.compile(lambda *a: op(*a, quantize_activation=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x, w, s), op(x, w, s, quantize_activation=True))
    assert op(x.to("meta"), w.to("meta"), s.to("meta")).shape == (3, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"w": torch.ones(8, 6, dtype=torch.uint8)}, "w must be int8.*not torch.uint8", id="uint8"),
        pytest.param({"w": torch.ones(8, 7, dtype=torch.int8)}, r"\['N', 6\] for K=6.*not \[8, 7\]", id="columns"),
        pytest.param({"w": torch.ones(3, 2, 8, dtype=torch.int8)}, r"not \[3, 2, 8\]", id="blocked-without-a-block"),
        pytest.param({"block_size": 4}, "block_size 4 must be -1 or divide K=6", id="block-not-dividing"),
        pytest.param({"block_size": 0}, "block_size 0", id="block-zero"),
        pytest.param({"block_size": -2}, "block_size -2", id="block-negative"),
        pytest.param(
            {"scaler": torch.ones(7)}, r"scaler must be float \[8\], not torch.float32 \[7\]", id="scaler-shape"
        ),
        pytest.param(
            {"scaler": torch.ones(8, dtype=torch.int32)}, "scaler must be float.*not torch.int32", id="scaler-int"
        ),
        pytest.param({"zero_point": torch.ones(3, 8)}, r"zero_point must be float \[8\]", id="zero-shape"),
        pytest.param({"zero_point": torch.ones(8, dtype=torch.int8)}, "zero_point must be float", id="zero-int"),
        pytest.param(
            {"x": torch.ones(3, 6, dtype=torch.float64)}, "x must be float32, bfloat16 or float16", id="x-float64"
        ),
        pytest.param({"x": torch.ones(())}, "x must be", id="x-scalar"),
        pytest.param({"x": torch.ones(3, 6, device="meta")}, "w is on cpu, x on meta", id="device"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    from bitport.errors import ArgumentError

    args = {"x": torch.ones(3, 6), "w": torch.ones(8, 6, dtype=torch.int8), "scaler": torch.ones(8), **changes}
    with pytest.raises(ArgumentError, match=message):
        op(**args)


# -- the cases of torch_xla's own tests: shapes, number of bits, tolerance -------------------------------------------


def quantized(w: Tensor, bits: int, block: int, asym: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round to nearest with scales per row (block 0) or per block, in the op's shapes; w [N, K]."""
    n, k = w.shape
    size = block or k
    groups = w.reshape(n, k // size, size)
    top, low = 2 ** (bits - 1) - 1, -(2 ** (bits - 1))
    if asym:
        high, least = groups.amax(-1).clamp(min=0), groups.amin(-1).clamp(max=0)
        scale = ((high - least) / (2**bits - 1)).clamp(min=1e-5)
        zero = (low - (least / scale).round()).clamp(low, top)
    else:
        scale, zero = (groups.abs().amax(-1) / top).clamp(min=1e-5), torch.zeros(n, k // size)
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(low, top).to(torch.int8)
    shift = zero * scale if asym else None
    if not block:
        return codes.reshape(n, k), scale[:, 0], None if shift is None else shift[:, 0]
    return (
        codes.permute(1, 2, 0).contiguous(),
        scale.t().contiguous(),
        None if shift is None else shift.t().contiguous(),
    )


@pytest.mark.parametrize("act", [False, True], ids=["a16", "a8"])
def test_a_layer_of_5_to_8_is_within_a_hundredth(act: bool) -> None:
    x, w = torch.randn(3, 5), torch.randn(8, 5) * 0.1
    codes, scale, _ = quantized(w, 8, 0, False)
    assert (op(x, codes, scale, quantize_activation=act) - x @ w.T).abs().max() < 0.01


@pytest.mark.parametrize(("k", "n"), [(4, 2), (5, 8)], ids=["4x2", "5x8"])
def test_int4_per_channel(k: int, n: int) -> None:
    x, w = torch.randn(3, k), torch.randn(n, k)
    codes, scale, _ = quantized(w, 4, 0, False)
    y = op(x, codes, scale, int4_weight=True)
    assert float(cosine(judge(x.double(), codes, scale), y)) > 0.999999
    assert float(cosine(x @ w.T, y)) > 0.98


@pytest.mark.parametrize(("bits", "asym"), [(4, False), (8, False), (8, True)], ids=["w4-sym", "w8-sym", "w8-asym"])
def test_blockwise(bits: int, asym: bool) -> None:
    x, w = torch.randn(3, 6), torch.randn(8, 6)
    codes, scale, zero = quantized(w, bits, 2, asym)
    y = op(x, codes, scale, zero, block_size=2, int4_weight=bits == 4)
    assert float(cosine(judge(x.double(), codes, scale, zero), y)) > 0.999999
    assert float(cosine(x @ w.T, y)) > (0.9999 if bits == 8 else 0.98)


@pytest.mark.parametrize("act", [False, True], ids=["a16", "a8"])
@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_per_channel(bits: int, act: bool) -> None:
    x, w = torch.randn(3, 6), torch.rand(8, 6) + 0.5
    codes, scale, zero = quantized(w, bits, 0, True)
    y = op(x, codes, scale, zero, int4_weight=bits == 4, quantize_activation=act)
    assert float(cosine(x @ w.T, y)) > 0.99
    exact = judge(rounded(x) if act else x.double(), codes, scale, zero)
    assert float(cosine(exact, y)) > 0.99999


def test_the_samples_cover_the_table() -> None:
    names = {sample.name for sample in OPS["quantized_matmul"].samples(torch.device("cpu"), torch.float32)}
    wanted = itertools.product(("channel", "blockwise"), ("sym", "asym"), ("w8a16", "w4a16", "w8a8", "w4a8"))
    assert names == {"-".join(row) + kind for row in wanted for kind in ("", "-strided", "-empty")}
