"""DTensors of QTensors, and tensor parallelism: run by tests/ranks.py in several processes.

K is split over two and three processes at multiples of 128.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import bitport
from bitport.errors import ArgumentError
from bitport.tensor import QTensor, quantize_tensor

SIZE = 6 * 128
WEIGHT_ONLY = ("int4", "int3-g32", "int8", "int8-tensor", "int6-channel", "nf4", "fp8-wo", "mxfp4-wo", "nvfp4-wo")
ROUNDED_BY_BLOCKS = ("fp8-block", "mxfp8", "mxfp4")
"""Inputs have a scale per block of K: a row split between blocks is rounded as in one piece."""
ROUNDED_BY_ROWS = ("int8-dyn", "int4-int8", "fp8-row", "fp8", "nvfp4")
UNIT = 2.0**-24


def refused(run: Callable[[], object], *words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def layer(scheme: str, n: int = 96, k: int = SIZE, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(k, n).to(dtype)
    bitport.quantize_(made, scheme, measure=False)
    return made


def bound(x: Tensor, weight: Tensor, terms: int) -> Tensor:
    """Error bound of a float32 sum of ``terms`` products in any order: terms * 2^-24 * the sum of magnitudes."""
    return (terms + 8) * UNIT * (x.double().abs() @ weight.double().abs().T + 1)


def check_a_round_trip_changes_no_bit(mesh: DeviceMesh) -> None:
    extra = {"pre_scale": torch.rand(SIZE) + 0.5, "act_scale": torch.tensor([[0.1]])}
    for scheme in ("int4", "int3-g32", "int8-tensor", "int6-channel", "nvfp4-wo", "fp8-block"):
        whole = quantize_tensor(torch.randn(128 * mesh.size() if scheme == "fp8-block" else 24, SIZE), scheme, **extra)
        for placement, source in itertools.product((Shard(0), Shard(1), Replicate()), (0, None)):
            shared = distribute_tensor(whole, mesh, [placement], src_data_rank=source)
            assert isinstance(shared, DTensor)
            assert isinstance(shared.to_local(), QTensor)
            assert torch.equal(shared.full_tensor(), whole), (scheme, placement)
            again = DTensor.from_local(shared.to_local(), mesh, [placement], run_check=False)
            assert again.shape == whole.shape
            assert torch.equal(again.full_tensor(), whole)
        rows, columns = (distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1))
        assert torch.equal(rows.redistribute(placements=[Shard(1)]).to_local(), columns.to_local())
        assert torch.equal(columns.redistribute(placements=[Shard(0)]).to_local(), rows.to_local())


def check_transposed_ones(mesh: DeviceMesh) -> None:
    """Rows of the whole are columns of the matrix: gathered along them first, pieces of permuted columns would be no
    tensor, and so would those of rows with a pre_scale if all had to have the same, or with a scale for all of a
    row."""
    for extra in ({"perm": torch.randperm(SIZE)}, {"pre_scale": torch.rand(SIZE) + 0.5}):
        whole = quantize_tensor(torch.randn(SIZE, 24), "int4", transposed=True, **extra)
        for dim in (0, 1) if "pre_scale" in extra else (1,):
            shared = distribute_tensor(whole, mesh, [Shard(dim)])
            assert torch.equal(shared.full_tensor(), whole), (dim, *extra)
    for scheme in ("int8-asym", "fp8-wo", "int8-tensor", "nvfp4-wo"):
        whole = quantize_tensor(torch.randn(SIZE, 24), scheme, transposed=True)
        for dim in (0, 1):
            assert torch.equal(distribute_tensor(whole, mesh, [Shard(dim)]).full_tensor(), whole), (scheme, dim)


def check_the_first_process_has_the_say(mesh: DeviceMesh) -> None:
    own = quantize_tensor(torch.randn(24, 96) + mesh.get_local_rank(), "nvfp4-wo")
    shared = distribute_tensor(own, mesh, [Shard(0)]).full_tensor()
    copy = distribute_tensor(own.clone(), mesh, [Replicate()]).to_local()
    assert torch.equal(copy, shared)
    assert torch.equal(copy, own) == (mesh.get_local_rank() == 0)


def check_rows_that_cannot_be_shared_evenly(mesh: DeviceMesh) -> None:
    for rows in (1, 7, mesh.size() * 8 - 1):
        whole = quantize_tensor(torch.randn(rows, 96), "int4-g32")
        for source in (0, None):
            shared = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=source)
            most = -(-rows // mesh.size())
            assert shared.to_local().shape[0] == max(0, min(most, rows - mesh.get_local_rank() * most))
            assert torch.equal(shared.full_tensor(), whole)
            state = shared.to_local()
            state.copy_(state.clone())


def check_single_rows_and_experts(mesh: DeviceMesh) -> None:
    """torch joins pieces of one row, or of one matrix, differently: through a view."""
    for shape, dims in (((1, SIZE), (1,)), ((1, 24, SIZE), (1, 2)), ((1, 1, SIZE), (2,))):
        whole = quantize_tensor(torch.randn(shape), "int4-g32", pre_scale=torch.rand(SIZE) + 0.5)
        for dim in dims:
            assert torch.equal(distribute_tensor(whole, mesh, [Shard(dim)]).full_tensor(), whole), (shape, dim)


def check_cuts_that_would_part_a_block(mesh: DeviceMesh) -> None:
    ways = mesh.size()
    refused(lambda: distribute_tensor(layer("int4", k=128).weight.data, mesh, [Shard(1)]), "multiples of 128")
    refused(
        lambda: distribute_tensor(layer("int4-g32", k=32 * (ways + 1)).weight.data, mesh, [Shard(1)]), "multiples of 32"
    )
    refused(lambda: distribute_tensor(layer("fp8-block", n=200).weight.data, mesh, [Shard(0)]), "multiples of 128")
    refused(lambda: distribute_tensor(layer("int4-channel", k=ways).weight.data, mesh, [Shard(1)]), "bytes stay whole")
    permuted = quantize_tensor(torch.randn(96, SIZE), "int4", perm=torch.randperm(SIZE))
    refused(lambda: distribute_tensor(permuted, mesh, [Shard(1)]), "act-order", "do so with its rows")
    assert torch.equal(distribute_tensor(permuted, mesh, [Shard(0)]).full_tensor(), permuted)
    last = quantize_tensor(torch.randn(128 * ways - 1, 256), "fp8-block")
    assert torch.equal(distribute_tensor(last, mesh, [Shard(0)]).full_tensor(), last)


def check_pieces_that_do_not_belong_together(mesh: DeviceMesh) -> None:
    own = quantize_tensor(torch.randn(8, 96) + mesh.get_local_rank(), "int8-tensor")
    refused(lambda: DTensor.from_local(own, mesh, [Shard(0)]).full_tensor(), "scale", "cannot be joined")


def check_layers_cut_along_n(mesh: DeviceMesh) -> None:
    """Each output comes from one process and the same bits; only kernels for other shapes may add in another order."""
    x = torch.randn(5, SIZE)
    for scheme in (*WEIGHT_ONLY, *ROUNDED_BY_ROWS, *ROUNDED_BY_BLOCKS):
        whole = layer(scheme, n=SIZE if scheme == "fp8-block" else 96)
        y, weight = whole(x), whole.weight.dequantize(torch.float32)
        parallelize_module(whole, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert isinstance(whole.weight, DTensor)
        assert ((whole(x) - y).abs() <= bound(x, weight, SIZE)).all(), scheme


def check_layers_cut_along_k(mesh: DeviceMesh) -> None:
    x = torch.randn(2, 3, SIZE)
    for scheme in (*WEIGHT_ONLY, *ROUNDED_BY_BLOCKS):
        whole = layer(scheme)
        y, weight = whole(x), whole.weight.dequantize(torch.float32)
        parallelize_module(whole, mesh, RowwiseParallel(input_layouts=Replicate()))
        off = (whole(x) - y).abs()
        assert (off <= 2 * bound(x.reshape(-1, SIZE), weight, SIZE).reshape(off.shape)).all(), (scheme, off.max())


def check_inputs_that_are_rounded_by_rows_are_so_by_each_process(mesh: DeviceMesh) -> None:
    """With K split, each process has a part of a row and rounds it by its own scale, which is never larger than that of
    the whole row: the result is the sum of the products of the parts. With one fixed scale from calibration, it equals
    the product of the whole."""
    x = torch.randn(3, SIZE)
    for scheme in (*ROUNDED_BY_ROWS, "int8-static"):
        whole = nn.Linear(SIZE, 96)
        data = [x] if bitport.preset(scheme).static else None
        bitport.quantize_(whole, scheme, calibrate=data, measure=False)
        y, part = whole(x), SIZE // mesh.size()
        cuts = [slice(at, at + part) for at in range(0, SIZE, part)]
        terms = [F.linear(x[:, cut], whole.weight[:, cut]) for cut in cuts]
        total = torch.stack(terms).double().sum(0) + whole.bias.double()
        most = (mesh.size() + 2) * UNIT * (torch.stack(terms).abs().sum(0) + whole.bias.abs())
        parallelize_module(whole, mesh, RowwiseParallel(input_layouts=Replicate()))
        found = whole(x)
        assert ((found - total).abs() <= most).all(), scheme
        assert ((found - y).abs() <= 2 * most).all() == (scheme == "int8-static"), scheme


class Block(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


def parallel(block: Block, mesh: DeviceMesh) -> nn.Module:
    """Sequence-parallel between blocks, gathered before the first product and scattered after the second."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(block, mesh, plan)


def check_a_block_and_its_gradients(mesh: DeviceMesh) -> None:
    """Against the float64 model with dequantized weights."""
    for scheme in ("int4", "int8", "nvfp4-wo"):
        block, x = Block(), torch.randn(2, 2 * mesh.size(), SIZE)
        bitport.quantize_(block, scheme, measure=False)
        exact = Block().double()
        exact.load_state_dict(
            {k: v.dequantize(torch.float64) if isinstance(v, QTensor) else v for k, v in block.state_dict().items()}
        )
        parallel(block, mesh)
        mine = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
        y = block(mine)
        y.to_local().square().sum().backward()
        whole = x.double().requires_grad_()
        y64 = exact(whole)
        y64.square().sum().backward()
        close(y.full_tensor(), y64)
        close(mine.grad, whole.grad.chunk(mesh.size(), 1)[mesh.get_local_rank()])
        for name in ("up.bias", "down.bias", "norm.weight"):
            grad = block.get_parameter(name).grad
            close(grad.full_tensor(), exact.get_parameter(name).grad)


def close(found: Tensor, exact: Tensor) -> None:
    """Within the error of two products of K terms and what comes between: K * 2^-24 of the largest number, with a
    margin."""
    assert exact is not None
    off, most = (found.detach() - exact).abs().max(), exact.abs().max()
    assert off <= 4 * SIZE * UNIT * most, (float(off), float(most))


def check_embeddings_and_heads(mesh: DeviceMesh) -> None:
    ids = torch.randint(0, 101, (3, 4))
    for scheme in ("int8", "int4-g32", "nvfp4-wo"):
        table = nn.Embedding(101, SIZE)
        bitport.quantize_(table, bitport.Recipe((bitport.Rule("*", scheme),)), measure=False)
        rows = table(ids)
        for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
            copied = nn.Embedding(101, SIZE, _weight=table.weight)
            copied.weight = table.weight
            parallelize_module(copied, mesh, style)
            assert isinstance(copied.weight.to_local(), QTensor)
            assert torch.equal(copied(ids), rows)
        head, x = layer(scheme, n=101), torch.randn(2, SIZE)
        y, weight = head(x), head.weight.dequantize()
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert ((head(x) - y).abs() <= bound(x, weight, SIZE)).all()


def check_inference_mode_and_bfloat16(mesh: DeviceMesh) -> None:
    """A sum of bfloat16 terms is rounded once per term and once at the end: 2^-8 of the magnitudes each."""
    whole, x = layer("int4", dtype=torch.bfloat16), torch.randn(3, SIZE).bfloat16()
    y, magnitudes = whole(x), x.abs().float() @ whole.weight.dequantize(torch.float32).abs().T
    parallelize_module(whole, mesh, RowwiseParallel(input_layouts=Replicate()))
    with torch.inference_mode():
        assert ((whole(x) - y).abs() <= (mesh.size() + 2) * 2**-8 * magnitudes).all()


def check_quantizing_what_is_sharded(mesh: DeviceMesh) -> None:
    """Codes and scales equal those of the unsharded model, also with one scale for the whole matrix."""
    for scheme, algorithm in (
        ("int4-g32", "hqq"),
        ("int8", "rtn"),
        ("nvfp4", "rtn"),
        ("fp8", "rtn"),
        ("mxfp4", "clip"),
    ):
        block, one = Block(192), Block(192)
        one.load_state_dict(block.state_dict())
        expected = bitport.quantize_(one, scheme, algorithm=algorithm)
        parallel(block, mesh)
        report = bitport.quantize_(block, scheme, algorithm=algorithm)
        assert str(report) == str(expected)
        for name in ("up.weight", "down.weight"):
            assert torch.equal(block.get_parameter(name).full_tensor(), one.get_parameter(name))
        assert [layer.scheme for layer in bitport.explain(block).layers] == [str(one.up.weight.scheme)] * 2
        bitport.dequantize_(block)
        assert torch.equal(block.down.weight.full_tensor(), one.down.weight.dequantize())


def check_what_quantizing_what_is_sharded_cannot_do(mesh: DeviceMesh) -> None:
    block = Block()
    parallel(block, mesh)
    x = [torch.randn(1, 2, SIZE)]
    refused(
        lambda: bitport.quantize_(block, "int4", algorithm="gptq", calibrate=x), "2 weights are sharded", "in one piece"
    )
    refused(lambda: bitport.quantize_(block, "int8-static", calibrate=x), "in one piece")
    refused(lambda: bitport.quantize_(block, "int4", device="cpu"), "leave out device=")
