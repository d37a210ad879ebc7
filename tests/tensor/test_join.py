"""Joining pieces of quantized tensors, padding at the end, and what cannot be joined."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import _collective_utils

from bitport.errors import ArgumentError
from bitport.schemes import PRESETS, Scheme
from bitport.tensor import QTensor, quantize_tensor
from bitport.tensor.borders import cut_along, plain_shapes, unit
from bitport.tensor.join import zeros_like_piece

from .conftest import Make

N, K = 256, 384
"""Two blocks of 128 rows, three of 128 columns."""


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scheme", PRESETS)
def test_pieces_are_one_again(make: Make, scheme: str, dim: int) -> None:
    q = make(scheme, N, K, pre_scale=torch.rand(K) + 0.5, act_scale=torch.tensor([[0.1]]))
    whole = torch.cat(q.split(128, dim), dim)
    assert isinstance(whole, QTensor)
    assert torch.equal(whole, q)
    assert whole.bits_layout == q.bits_layout
    assert torch.equal(whole.dequantize(), q.dequantize())


def test_experts_and_transposed_ones(make: Make) -> None:
    experts = make("int4-g32", 3, 64, 96)
    assert torch.equal(torch.cat([experts[:1], experts[1:]]), experts)
    assert torch.equal(torch.cat(experts.split(32, 2), 2), experts)
    turned = make("int4-g32", 96, 64).t()
    assert torch.equal(torch.cat(turned.split(32), 0), turned)


def test_layers_are_merged(make: Make) -> None:
    """Query and key joined into one matrix: its product holds the results of both."""
    q, k, x = make("int8", 64, 96), make("int8", 32, 96), torch.randn(3, 96)
    both = F.linear(x, torch.cat([q, k]))  # type: ignore[list-item]
    torch.testing.assert_close(both, torch.cat([F.linear(x, q), F.linear(x, k)], -1))


@pytest.mark.parametrize(
    ("pieces", "dim", "message"),
    [
        pytest.param(lambda make: [make("int8-tensor"), make("int8-tensor")], 0, "differ in scale", id="scale"),
        pytest.param(lambda make: [make("int8"), make("int8")], 1, "differ in scale", id="scale-of-a-row"),
        pytest.param(lambda make: [make("nvfp4"), make("nvfp4")], 0, "differ in scale2", id="global-scale"),
        pytest.param(
            lambda make: [make(pre_scale=torch.rand(96)), make(pre_scale=torch.rand(96))], 0, "pre_scale", id="input"
        ),
        pytest.param(lambda make: [make("int8"), make("int4-g32")], 0, "not alike", id="scheme"),
        pytest.param(lambda make: [make("int8"), make("int8", 64, 32)], 0, "not alike", id="columns"),
        pytest.param(lambda make: [make("int8"), make("int8", pre_scale=torch.rand(96))], 0, "not alike", id="parts"),
        pytest.param(lambda make: [make("int8"), torch.randn(64, 96)], 0, "quantized ones only", id="float"),
        pytest.param(
            lambda make: [make("fp8-block", 200, 128), make("fp8-block", 200, 128)], 0, "must be n x 128", id="borders"
        ),
    ],
)
def test_what_is_not_one(make: Make, pieces: object, dim: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        torch.cat(pieces(make), dim)  # type: ignore[operator]


def test_permuted_columns_are_not_joined(make: Make) -> None:
    """The order is that of all columns. Rows in the same order are, and so are pieces that are all of them."""
    q = make("int4-g32", perm=torch.randperm(96))
    for whole, at in ((q, 1), (q.t(), 0)):
        with pytest.raises(ArgumentError, match=r"permuted .*padded or joined along them: do so with its rows"):
            torch.cat([whole, whole], at)
        with pytest.raises(ArgumentError, match="permuted"):
            F.pad(whole, (0, 32) if at else (0, 0, 0, 32))
        assert torch.equal(torch.cat([whole], at), whole)
    both = torch.cat([q, q])
    assert torch.equal(both.dequantize(), torch.cat([q.dequantize()] * 2))
    assert torch.equal(F.pad(q, (0, 0, 0, 8))[:64], q)


def test_a_batch_is_not_joined_with_an_expanded_matrix(make: Make) -> None:
    with pytest.raises(ArgumentError, match="not alike"):
        torch.cat([make("int8", 2, 64, 96), make("int8", 64, 96).expand(3, 64, 96)])


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize(("dim", "more"), [(0, 3), (1, 128)])
def test_room_at_the_end(make: Make, scheme: str, dim: int, more: int) -> None:
    """Padding by a collective keeps the numbers, and can be cut off again."""
    q = make(scheme, N, K)
    larger = _collective_utils.pad_tensor(q, dim, more)
    assert isinstance(larger, QTensor)
    assert larger.shape[dim] == q.shape[dim] + more
    assert torch.equal(larger.narrow(dim, 0, q.shape[dim]), q)


@pytest.mark.parametrize("scheme", [*PRESETS, "int4-g32-sym", "int8-tensor", "int4-tensor"])
@pytest.mark.parametrize(("dim", "size"), [(0, N), (0, N - 16), (1, K), (1, K - 16)])
def test_what_anyone_else_pads_is_zero(make: Make, scheme: str, dim: int, size: int) -> None:
    """Within the block of a scale, code 0 is zero for floats alone."""
    q = quantize_tensor(torch.randn(*(size if at == dim else whole for at, whole in enumerate((N, K)))), scheme)
    block = q.scheme.weight.block[dim]
    pad = (0, 0, 0, 128) if dim == 0 else (0, 128)
    if q.scheme.weight.number.kind == "float" or (block and size % block == 0):
        assert torch.equal(F.pad(q, pad).dequantize(), F.pad(q.dequantize(), pad))
    else:
        with pytest.raises(ArgumentError, match=f"cannot be padded with zeros in dim {dim}"):
            F.pad(q, pad)


@pytest.mark.parametrize("pad", [(1, 0), (0, -1), (0, 32, 0, 1)])
def test_other_room_is_refused(make: Make, pad: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="padded only with zeros, at the end of one dimension"):
        F.pad(make(), pad)
    with pytest.raises(ArgumentError, match="with zeros"):
        F.pad(make(), (0, 32), value=1.0)


def test_room_for_a_shard(make: Make) -> None:
    """What FSDP2 does: allocate zeros with a shard's rows, fill the existing rows, view flat, narrow."""
    q = make("nvfp4-wo", 7, 96)
    room = zeros_like_piece(q, 0, 4)
    assert room.bits_layout == "plain"
    room.narrow(0, 0, 3).copy_(q[4:])
    shard = room.narrow(0, 0, 3)
    assert torch.equal(shard, q[4:])
    assert shard.qdata.data_ptr() == room.qdata.data_ptr()
    assert torch.equal(room.view(-1).dequantize(), room.dequantize().flatten())
    assert (shard.room, shard.detach().room, shard.clone().room) == (4, 4, 4)


def test_a_float_state_is_still_one(make: Make) -> None:
    """Also with as many columns as the weight, such as [batch, hidden] of an RNN or a LoRA matrix."""
    q = make("int8", 64, 96)
    for shape in ((3, 96), (64, 96), (0, 96), (64, 32), (96,)):
        for dtype in (None, torch.float32, torch.int64):
            state = q.new_zeros(shape, dtype=dtype)
            assert (type(state), state.shape, state.dtype) == (Tensor, shape, dtype or q.dtype)
    assert not q.new_zeros(3, 96).any()


def test_a_flat_view_of_a_whole_is_refused(make: Make) -> None:
    with pytest.raises(ArgumentError, match="keeps its shape"):
        make().view(-1)


@pytest.mark.parametrize("layout", ["plain", "cpu_tiles", "plain_int32"])
def test_a_piece_of_a_packed_tensor_stays_one(make: Make, layout: str) -> None:
    """Also when detached, as torch.distributed.checkpoint does before writing into it."""
    q = make("int4-g32", 64, 96).to_layout(layout)
    piece = q[:16].detach()
    if layout == "plain":
        assert torch.equal(piece.copy_(q[48:]), q[:16])
        return
    with pytest.raises(ArgumentError, match=r"checkpoint save and load not .*ModelState"):
        piece.copy_(q[48:])


@pytest.mark.parametrize(
    ("scheme", "units"),
    [
        ("int4", (1, 128)),
        ("int4-channel", (1, 2)),
        ("int3-g32", (1, 32)),
        ("int5-channel", (1, 8)),
        ("int6-channel", (1, 4)),
        ("int8", (1, 1)),
        ("int8-tensor", (1, 1)),
        ("fp8-block", (128, 128)),
        ("fp8-wo", (1, 1)),
        ("nvfp4", (1, 16)),
        ("mxfp6", (1, 32)),
    ],
)
def test_units(make: Make, scheme: str, units: tuple[int, int]) -> None:
    q = make(scheme, N, K)
    assert (unit(q, 0), unit(q, 1)) == units
    assert (unit(q.t(), 1), unit(q.t(), 0)) == units


def test_the_blocks_of_inputs_count() -> None:
    """A weight with a scale per row, and inputs rounded in blocks of 32."""
    scheme = Scheme(weight=PRESETS["fp8-wo"].weight, act="mxfp8")
    assert unit(quantize_tensor(torch.randn(N, K), scheme), 1) == 32


def test_errors_say_which_sizes_are_allowed(make: Make) -> None:
    q = make("int4-g32", 64, 192)
    with pytest.raises(ArgumentError, match=r"pieces of 48: they must be multiples of 32.*cut 2, 3, 6 ways"):
        q.chunk(4, 1)
    with pytest.raises(ArgumentError, match="No number of equal pieces does that"):
        make("int4", 64, 160).chunk(2, 1)


@pytest.mark.parametrize("scheme", PRESETS)
def test_shapes_are_those_of_the_parts(make: Make, full: QTensor, scheme: str) -> None:
    q = make(scheme, N, K)
    for each in (q, full, make("int4-g32", 3, 64, 96)):
        plain = each.to_layout("plain")
        assert plain_shapes(each, each.shape) == {
            name: tuple(getattr(plain, name).shape) for name in plain.__tensor_flatten__()[0]
        }
    half = plain_shapes(q, (128, K))
    cut = cut_along(q, 0)
    piece = q[:128].to_layout("plain")
    assert all(tuple(getattr(piece, name).shape) == half[name] for name in cut)
