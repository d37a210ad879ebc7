"""Slices, selections and transpositions: equal to those of the dequantized matrix, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bitport.errors import ArgumentError
from bitport.numerics import Format
from bitport.schemes import PRESETS, Scheme
from bitport.tensor import QTensor, quantize_tensor

Make = Callable[..., QTensor]
Cut = Callable[[Tensor], Tensor]

CUTS: dict[str, tuple[str, tuple[int, ...], Cut]] = {
    "rows": ("int4-g32", (64, 96), lambda w: w[3:17]),
    "rows-negative": ("int4-g32", (64, 96), lambda w: w[-5:-1]),
    "rows-past-the-end": ("int4-g32", (64, 96), lambda w: w[60:100]),
    "rows-none": ("int4-g32", (64, 96), lambda w: w[5:5]),
    "rows-all": ("int4-g32", (64, 96), lambda w: w[:]),
    "rows-of-channels": ("int8", (64, 96), lambda w: w[1:2]),
    "rows-of-one-scale": ("fp8", (64, 96), lambda w: w[7:9]),
    "rows-of-blocks": ("int4-b8x16-sym", (64, 96), lambda w: w[8:24]),
    "rows-short-last-block": ("fp8-block", (160, 200), lambda w: w[128:]),
    "rows-of-a-global-scale": ("nvfp4", (64, 96), lambda w: w[3:17]),
    "rows-twice": ("int4-g32", (64, 96), lambda w: w[8:40][4:9]),
    "columns": ("int4-g32", (64, 96), lambda w: w[:, 32:64]),
    "columns-none": ("int4-g32", (64, 80), lambda w: w[:, 80:]),
    "columns-short-last-group": ("int4-g32", (64, 80), lambda w: w[:, 64:]),
    "columns-of-channels": ("int8", (64, 96), lambda w: w[:, 3:5]),
    "columns-of-one-scale": ("fp8", (64, 96), lambda w: w[:, 1:95]),
    "columns-at-bytes": ("int3-channel-sym", (64, 96), lambda w: w[:, 8:24]),
    "columns-of-blocks": ("fp8-block", (160, 200), lambda w: w[:, 128:]),
    "columns-of-e8m0": ("mxfp4", (64, 96), lambda w: w[:, 32:96]),
    "columns-of-a-global-scale": ("nvfp4", (64, 96), lambda w: w[:, 16:48]),
    "rows-and-columns": ("int4-g32", (64, 96), lambda w: w[4:8, 32:]),
    "narrow": ("int4-g32", (64, 96), lambda w: w.narrow(0, 3, 5)),
    "transposed-rows": ("int4-g32", (64, 96), lambda w: w.t()[32:64]),
    "transposed-columns": ("int4-g32", (64, 96), lambda w: w.t()[:, 5:9]),
    "t-t": ("int4-g32", (64, 96), lambda w: w.t().t()),
    "T": ("int8", (64, 96), lambda w: w.T),
    "mT": ("int8", (64, 96), lambda w: w.mT),
    "permute": ("int8", (64, 96), lambda w: w.permute(1, 0)),
    "permute-nothing": ("int8", (64, 96), lambda w: w.permute(0, 1)),
    "ellipsis": ("int8", (64, 96), lambda w: w[...]),
    "reshape-to-itself": ("int8", (64, 96), lambda w: w.reshape(64, 96)),
    "reshape-the-rest": ("int8", (64, 96), lambda w: w.reshape(64, -1)),
    "view-the-rest": ("int8", (64, 96), lambda w: w.view(-1, 96)),
    "flatten-one": ("int8", (64, 96), lambda w: w.flatten(1)),
    "expert": ("int4-g32", (3, 64, 96), lambda w: w[1]),
    "expert-last": ("int4-g32", (3, 64, 96), lambda w: w[-1]),
    "expert-select": ("nvfp4", (3, 64, 96), lambda w: w.select(0, 2)),
    "experts": ("int4-g32", (3, 64, 96), lambda w: w[1:]),
    "experts-by-index": ("int4-g32", (3, 64, 96), lambda w: w[torch.tensor([2, 0, 2])]),
    "experts-by-mask": ("int4-g32", (3, 64, 96), lambda w: w[torch.tensor([True, False, True])]),
    "experts-by-list": ("fp8-row", (3, 64, 96), lambda w: w[[2, 1]]),
    "experts-rows": ("int4-g32", (3, 64, 96), lambda w: w[:, 3:9]),
    "experts-columns": ("int4-g32", (3, 64, 96), lambda w: w[:, :, 32:]),
    "experts-transposed": ("int4-g32", (3, 64, 96), lambda w: w.transpose(1, 2)),
    "experts-transposed-one": ("int4-g32", (3, 64, 96), lambda w: w.mT[2]),
    "experts-permuted": ("int4-g32", (3, 64, 96), lambda w: w.permute(0, 2, 1)),
    "experts-of-experts": ("int8", (2, 3, 64, 96), lambda w: w[1][2]),
    "experts-dim-1": ("int8", (2, 3, 64, 96), lambda w: w.select(1, 2)),
    "batch-of-one": ("int4-g32", (64, 96), lambda w: w.unsqueeze(0)),
    "batch-of-one-global-scale": ("nvfp4", (64, 96), lambda w: w.unsqueeze(-3)),
    "batch-of-one-transposed": ("int8", (64, 96), lambda w: w.t().unsqueeze(0)),
    "repeated": ("int4-g32", (64, 96), lambda w: w.expand(5, 64, 96)),
    "repeated-transposed": ("int4-g32", (64, 96), lambda w: w.t().expand(5, -1, -1)),
    "repeated-then-transposed": ("int4-g32", (64, 96), lambda w: w.t().expand(5, 96, 64).mT),
    "repeated-twice": ("int4-g32", (64, 96), lambda w: w.expand(1, 64, 96).expand(2, 5, 64, 96)),
    "repeated-one": ("int4-g32", (64, 96), lambda w: w.t().expand(5, 96, 64)[3]),
    "repeated-some": ("int4-g32", (64, 96), lambda w: w.t().expand(5, 96, 64)[:1]),
    "repeated-by-index": ("int4-g32", (64, 96), lambda w: w.expand(5, 64, 96)[torch.tensor([4, 0])]),
    "repeated-rows": ("int4-g32", (64, 96), lambda w: w.expand(5, 64, 96)[:, 3:9]),
    "repeated-columns": ("int4-g32", (64, 96), lambda w: w.expand(5, 64, 96)[..., 32:64]),
    "repeated-row": ("int8", (1, 7), lambda w: w.expand(1, 1, 7)[..., 2:]),
    "repeated-joined": ("int4-g32", (64, 96), lambda w: torch.cat([w.expand(2, 64, 96), w.expand(3, 64, 96)])),
    "repeated-batch-of-one": ("int4-g32", (64, 96), lambda w: w.t().expand(5, 96, 64)[None]),
}


@pytest.mark.parametrize(("scheme", "shape", "cut"), CUTS.values(), ids=CUTS)
def test_as_of_the_float_matrix(make: Make, scheme: str, shape: tuple[int, ...], cut: Cut) -> None:
    q = make(scheme, *shape)
    piece = cut(q)
    wanted = cut(q.dequantize())
    assert isinstance(piece, QTensor)
    assert piece.shape == wanted.shape
    assert torch.equal(piece.dequantize(), wanted)


SPLITS: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "chunk": ("int4-g32", (64, 96), lambda w: w.chunk(3)),
    "chunk-columns": ("int4-g32", (64, 96), lambda w: w.chunk(3, 1)),
    "split": ("int4-g32", (64, 96), lambda w: w.split(50)),
    "split-sizes": ("int4-g32", (64, 96), lambda w: w.split([10, 54])),
    "tensor-split": ("int8", (64, 96), lambda w: w.tensor_split(5)),
    "hsplit": ("int8", (64, 96), lambda w: w.tensor_split(2, 1)),
    "unbind": ("int4-g32", (3, 64, 96), lambda w: w.unbind(0)),
    "iterate": ("int4-g32", (3, 64, 96), lambda w: tuple(w)),
    "split-experts": ("int4-g32", (3, 64, 96), lambda w: w.split(2)),
    "negative-dim": ("int4-g32", (3, 64, 96), lambda w: w.chunk(3, -1)),
}


@pytest.mark.parametrize(("scheme", "shape", "split"), SPLITS.values(), ids=SPLITS)
def test_split(make: Make, scheme: str, shape: tuple[int, ...], split: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    q = make(scheme, *shape)
    pieces, wanted = split(q), split(q.dequantize())
    assert len(pieces) == len(wanted)
    for piece, value in zip(pieces, wanted, strict=True):
        assert isinstance(piece, QTensor)
        assert torch.equal(piece.dequantize(), value)


REFUSED: dict[str, tuple[str, tuple[int, ...], Cut, str]] = {
    "inside-a-group": (
        "int4-g32",
        (64, 96),
        lambda w: w[:, 16:],
        "16:96 cannot be cut out of dim 1 of .*multiples of 32",
    ),
    "inside-a-row-block": (
        "int4-b8x16-sym",
        (64, 96),
        lambda w: w[4:],
        "4:64 cannot be cut out of dim 0 of .*multiples of 8",
    ),
    "inside-a-square-block": ("fp8-block", (160, 200), lambda w: w[:, 64:], "multiples of 128"),
    "inside-a-byte": ("int3-channel-sym", (64, 96), lambda w: w[:, 3:], "multiples of 8, .*bytes stay whole"),
    "end-inside-a-byte": ("int4-channel-sym", (64, 96), lambda w: w[:, :5], "multiples of 2, .*bytes stay whole"),
    "with-a-step": ("int8", (64, 96), lambda w: w[::2], "step 1, not 2: take the float tensor"),
    "one-row-transposed": ("int8", (64, 96), lambda w: w.t()[3], r"not dim 0 .*\.dequantize\(\)"),
    "one-row-as-a-view": ("int8", (64, 96), lambda w: w.select(0, 3), r"not dim 0 .*\.dequantize\(\)"),
    "one-column": ("int8", (64, 96), lambda w: w[:, 3], "not dim 1"),
    "one-row-of-experts": ("int8", (3, 64, 96), lambda w: w[:, 3], "only a batch"),
    "columns-by-index": (
        "int8",
        (64, 96),
        lambda w: w[:, torch.tensor([1, 2])],
        "along its first dimension.*: take the float tensor",
    ),
    "rows-of-experts-by-a-mask": ("int8", (3, 64, 96), lambda w: w[torch.ones(3, 64) > 0], "or a mask along its first"),
    "transposed-batch": (
        "int8",
        (3, 64, 96),
        lambda w: w.transpose(0, 1),
        "last two dimensions.*: take the float tensor",
    ),
    "permuted-batch": (
        "int8",
        (3, 64, 96),
        lambda w: w.permute(1, 0, 2),
        "last two dimensions.*: take the float tensor",
    ),
    "viewed": (
        "int8",
        (64, 96),
        lambda w: w.view(-1),
        r"its shape \[64, 96\].*: take the float .* DistributedDataParallel see",
    ),
    "flattened": ("int8", (3, 64, 96), lambda w: w.flatten(), "keeps its shape"),
    "row-as-batch": (
        "int8",
        (64, 96),
        lambda w: w.unsqueeze(1),
        "only a matrix can be made a batch.*: take the float tensor",
    ),
    "batch-of-batches": ("int8", (3, 64, 96), lambda w: w.unsqueeze(0), "only a matrix can be made a batch"),
    "einsum": ("int8", (64, 96), lambda w: torch.einsum("bk,nk->bn", torch.ones(2, 96), w), r"\.dequantize\(\)"),
    "expanded": ("int8", (3, 64, 96), lambda w: w.expand(2, 3, 64, 96), "cannot be expanded.*: take the float tensor"),
}


@pytest.mark.parametrize(("scheme", "shape", "cut", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Make, scheme: str, shape: tuple[int, ...], cut: Cut, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cut(make(scheme, *shape))


@pytest.mark.parametrize(
    ("cut", "error"),
    [
        pytest.param(lambda w: w[3], IndexError, id="expert-past-the-end"),
        pytest.param(lambda w: w.narrow(0, 2, 5), RuntimeError, id="narrow-past-the-end"),
        pytest.param(lambda w: w.select(5, 0), IndexError, id="no-such-dimension"),
        pytest.param(lambda w: w.transpose(0, 7), IndexError, id="transpose-no-such-dimension"),
        pytest.param(lambda w: w.select(3, 0), IndexError, id="dimension-past-the-last"),
        pytest.param(lambda w: w[0].expand(2, 64, 96).select(0, 5), IndexError, id="repeated-past-the-end"),
        pytest.param(lambda w: w[0].expand(2, 64, 96)[torch.tensor([7])], IndexError, id="repeated-index-past-the-end"),
        pytest.param(lambda w: w.split([1, 1]), ArgumentError, id="sizes-too-small"),
        pytest.param(lambda w: w.split([4, -1]), (ArgumentError, RuntimeError), id="sizes-negative"),
        pytest.param(lambda w: w.split(0), (ArgumentError, RuntimeError), id="size-zero"),
        pytest.param(lambda w: w[torch.tensor([3])], IndexError, id="index-past-the-end"),
        pytest.param(lambda w: torch.cat([w, w], 3), IndexError, id="joined-past-the-last-dimension"),
        pytest.param(lambda w: w[0].expand(5, 64, 96).expand(7, 64, 96), RuntimeError, id="repeated-otherwise"),
    ],
)
def test_out_of_bounds(make: Make, cut: Cut, error: type[Exception]) -> None:
    with pytest.raises(error):
        cut(make("int4-g32", 3, 64, 96))


@pytest.mark.parametrize("scheme", PRESETS)
def test_a_row_of_a_table(make: Make, scheme: str) -> None:
    """It was refused, while ids and slices were not: Gemma 4 reads that of its padding token in every forward pass."""
    q = make(scheme, 64, 96)
    rows = q.dequantize()
    for at, row in ((0, q[0]), (63, q[-1]), (5, q[5, :]), (7, q[7, ...]), (9, q.to_layout("plain")[9])):
        assert type(row) is Tensor
        assert torch.equal(row, rows[at])
    assert torch.equal(q[5, 32:64], rows[5, 32:64])
    with pytest.raises(IndexError):
        q[64]
    with pytest.raises(ArgumentError):  # a write into the floats would be lost
        q[5] = 0


def test_a_row_in_a_program(make: Make) -> None:
    class Padded(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.where(ids[:, None] == 0, self.weight[3, :], super().forward(ids))

    table, ids = Padded(64, 96), torch.tensor([5, 0, 2])
    table.weight = torch.nn.Parameter(make("int4-g32", 64, 96), requires_grad=False)
    expected = table.weight.dequantize()[[5, 3, 2]]
    assert torch.equal(torch.compile(table, backend="aot_eager", fullgraph=True)(ids), expected)
    assert torch.equal(torch.export.export(table, (ids,)).module()(ids), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_a_row_whose_number_is_a_size(make: Make, strict: bool) -> None:
    """In a program it is a symbol: one graph serves them all, and the kernel refuses what is no row."""

    class Learned(torch.nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0]
            return x + self.weight[rows] * self.weight[-rows, :48].sum()

    table, size = Learned(64, 96), torch.export.Dim("size", min=2, max=100)
    table.weight = torch.nn.Parameter(make("int4-g32", 64, 96), requires_grad=False)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(table, backend=counter, fullgraph=True, dynamic=True)
    x = torch.randn(100, 96)
    exported = torch.export.export(table, (x[:5],), dynamic_shapes=({0: size},), strict=strict).module()
    for rows in (2, 7, 33, 63):
        expected = table(x[:rows])
        assert torch.equal(exported(x[:rows]), expected)
        assert torch.equal(compiled(x[:rows]), expected)
    assert counter.frame_count == 1
    for run in (exported, compiled):
        with pytest.raises((IndexError, RuntimeError, ArgumentError)):
            run(x[:70])


def test_a_row_in_the_order_of_the_value(make: Make) -> None:
    for extra in ({"perm": torch.randperm(96)}, {"pre_scale": torch.rand(96) + 0.5}):
        q = make("int4-g32", **extra)
        assert torch.equal(q[3], q.dequantize()[3])


def test_slices_of_the_canonical_form_are_views(make: Make) -> None:
    q = make("int4-g32").to_layout("plain")
    piece = q[8:16]
    piece.scale.mul_(2)
    assert torch.equal(piece.dequantize(), q.dequantize()[8:16])


@pytest.mark.parametrize("scheme", PRESETS)
def test_tiles_of_rows_are_views(make: Make, scheme: str) -> None:
    """Cross-attention slices its weight on every call: unpacking and repacking would take several times as long as the
    products."""
    q, x = make(scheme, 3 * 128 + 8, 96).to_layout("cpu_tiles"), torch.randn(5, 96)
    for piece, (start, end) in zip(q.split([128, 256, 8]), ((0, 128), (128, 384), (384, 392)), strict=True):
        assert piece.bits_layout == "cpu_tiles"
        assert piece.qdata.data_ptr() == q.qdata[start // 32].data_ptr()
        assert torch.equal(piece, q.to_layout("plain")[start:end])
        if not q.scheme.static:
            torch.testing.assert_close(F.linear(x, piece), F.linear(x, q)[:, start:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["plain_int32", "tile_packed_4"])
def test_slices_of_a_packed_tensor(make: Make, layout: str) -> None:
    q = make("int4", 60, 256, dtype=torch.bfloat16)
    packed = q.to_layout(layout)
    for cut in (lambda w: w[3:17], lambda w: w[:, 128:], lambda w: w.t()[:128]):
        assert torch.equal(cut(packed).dequantize(), cut(q).dequantize())


@pytest.mark.parametrize("layout", ["plain", "cpu_tiles", "plain_int32", "tile_packed_2"])
def test_a_batch_of_one_shares_its_memory(make: Make, layout: str) -> None:
    q = make("int4-g32", 64, 96, dtype=torch.bfloat16).to_layout(layout)
    other = make("int4-g32", 1, 64, 96, dtype=torch.bfloat16)
    q.unsqueeze(0).copy_(other)
    assert torch.equal(q, other[0])


def test_slices_keep_what_the_input_is_multiplied_by(make: Make) -> None:
    q = make("int4-g32", pre_scale=torch.rand(96) + 0.5)
    assert torch.equal(q[:, 32:].dequantize(), q.dequantize()[:, 32:])
    x = torch.randn(3, 64)
    torch.testing.assert_close(F.linear(x, q[:, 32:]), x @ q.dequantize()[:, 32:].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int4-g32", "fp8", "nvfp4"])
def test_no_experts(make: Make, scheme: str) -> None:
    """Experts are selected for tokens, of which there may be none."""
    picked = make(scheme, 3, 64, 96)[torch.zeros(0, dtype=torch.int64)]
    assert picked.dequantize().shape == (0, 64, 96)
    assert torch.bmm(torch.randn(0, 2, 96), picked.mT).shape == (0, 2, 64)


def test_permuted_columns_are_sliced_by_rows_only(make: Make) -> None:
    q = make("int4-g32", perm=torch.randperm(96))
    assert torch.equal(q[8:16].dequantize(), q.dequantize()[8:16])
    with pytest.raises(ArgumentError, match="permuted"):
        q[:, 32:]


@pytest.mark.parametrize("cut", [128, 32])
def test_cuts_lie_at_the_blocks_of_inputs(cut: int) -> None:
    """Weights have scales per 32 columns, inputs per 128. At these the product with each half rounds its inputs as that
    with the whole does, so that both add up to it but for the order of a float32 sum of 256 products. Elsewhere they
    would not, so such a cut is refused, as a slice and as a split."""
    scheme = Scheme(weight=Format(dtype="int4", block=(1, 32)), act="fp8-128")
    q, x = quantize_tensor(torch.randn(64, 256), scheme), torch.randn(4, 256)
    ways = (lambda: (q[:, :cut], q[:, cut:]), lambda: q.split([cut, 256 - cut], 1), lambda: q.split(cut, 1))
    for way in ways:
        if cut == 32:
            with pytest.raises(ArgumentError, match="multiples of 128"):
                way()
            continue
        left, right = way()
        total = F.linear(x[:, :cut], left).double() + F.linear(x[:, cut:], right).double()
        # each sum is off by at most K * 2^-24 of the magnitudes, which rounding makes at most 1 + 2^-4 times as large
        most = 2 * 256 * 2.0**-24 * (1 + 2**-4) * (x.double().abs() @ q.dequantize(torch.float64).abs().T)
        assert ((total - F.linear(x, q)).abs() <= most).all()


def test_convolutions_are_sliced_along_their_outputs_only(make: Make) -> None:
    q = make("int8", 8, 4, 3, 3, kind="conv")
    assert torch.equal(q[2:5].dequantize(), q.dequantize()[2:5])
    for cut in (lambda w: w[:, 1:], lambda w: w[:, :, 1:], lambda w: w.transpose(0, 1), lambda w: w[0]):
        with pytest.raises(ArgumentError):
            cut(q)


@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 1, 1, 7)])
def test_a_convolution_from_one_channel_to_one_is_no_expanded_matrix(make: Make, shape: tuple[int, ...]) -> None:
    """Its kernel has the shape of the matrix behind it."""
    q = make("int8", *shape, kind="conv")
    conv = F.conv1d if len(shape) == 3 else F.conv2d
    x = torch.randn(2, 1, *shape[2:-1], 20)
    torch.testing.assert_close(conv(x, q), conv(x, q.dequantize()), rtol=1e-5, atol=1e-5)
    for cut in (lambda w: w[..., 2:], lambda w: w.mT, lambda w: w[0], lambda w: w.expand(3, *shape)):
        with pytest.raises(ArgumentError):
            cut(q)
