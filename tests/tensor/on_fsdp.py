"""FSDP2 over quantized models: run by tests/ranks.py in several processes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # FSDP2 imports it at the first product; import it once, before the processes fork
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import bitport
from bitport.backends.cuda import few_rows
from bitport.errors import ArgumentError
from bitport.tensor import QTensor

SCHEMES = ("int4-g32", "int3-g32", "int8-tensor", "nf4", "nvfp4-wo", "int8-dyn")
K, N = 192, 131
"""N is prime, so no number of processes divides it evenly."""


class Adapted(nn.Module):
    """LoRA: a frozen layer plus the product of two small trained matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) / 10)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def adapted(scheme: str) -> nn.Sequential:
    model = nn.Sequential(Block(), Block())
    bitport.quantize_(model, scheme, measure=False)
    for block in model:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def shard(model: nn.Module, mesh: DeviceMesh, **policy: object) -> nn.Module:
    for child in model.children():
        fully_shard(child, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[Tensor]:
    """The losses; with a sharded model, those of this process's part of the batch."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def full(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def check_a_model_computes_what_it_did(mesh: DeviceMesh) -> None:
    """Identical bits enter identical products, whether weights are gathered anew each time or kept."""
    x = torch.randn(5, K)
    for scheme in SCHEMES:
        for again in (True, False):
            model = nn.Sequential(Block(), Block())
            bitport.quantize_(model, scheme, measure=False)
            y, state = model(x), model.state_dict()
            shard(model, mesh, reshard_after_forward=again)
            local = model[0].up.weight.to_local()
            assert isinstance(local, QTensor)
            assert local.shape[0] < N
            for _ in range(2):
                assert torch.equal(model(x), y), scheme
            assert all(torch.equal(tensor, state[name]) for name, tensor in full(model).items())


def check_what_is_gathered_anew_is_not_taken_for_unchanged(mesh: DeviceMesh) -> None:
    """FSDP2 does not advance the version counter, by which a CUDA kernel knows which weight it may prefetch."""
    model = nn.Sequential(Block(), Block())
    bitport.quantize_(model, "int4-g32", measure=False)
    shard(model, mesh, reshard_after_forward=True)
    x = torch.randn(5, K)
    seen = []
    few_rows._line = lambda: few_rows._Line(0, False)  # there is no CUDA stream here
    for _ in range(3):
        model(x)
        model[0].unshard()
        weight = model[0].up.weight
        seen.append((weight.qdata, weight.qdata._version))
        few_rows.waited_for(weight.qdata, weight.scale, weight.zero)
        assert not few_rows.unchanged(weight.qdata, weight.scale, weight.zero)
        model[0].reshard()
    assert all(qdata is seen[0][0] and version == seen[0][1] for qdata, version in seen)


def check_training_of_adapters(mesh: DeviceMesh) -> None:
    """QLoRA: losses and trained parameters equal, up to the order of sums, those of one process with the whole batch;
    quantized weights keep every bit."""
    x = torch.randn(6 * mesh.size(), K)
    for scheme in ("int4-g32", "nvfp4-wo", "int8-dyn"):
        one = adapted(scheme)
        frozen = {name: param.clone() for name, param in one.named_parameters() if isinstance(param, QTensor)}
        model = shard(copy.deepcopy(one), mesh)
        expected = train(one, x)
        found = train(model, x.chunk(mesh.size())[mesh.get_local_rank()])
        mean = torch.stack(found)
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / mesh.size(), torch.stack(expected), rtol=1e-5, atol=0)
        for name, tensor in full(model).items():
            if name in frozen:
                assert torch.equal(tensor, frozen[name])
            else:  # three steps of sums of a few hundred terms: a thousand ulps
                torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-4, atol=1e-6)


def check_data_parallel(mesh: DeviceMesh) -> None:
    """DistributedDataParallel reduces gradients and ignores parameters without one, provided that it does not broadcast
    them first: pass init_sync=False, or name the weights to ignore."""
    one = adapted("int4-g32")
    told, untold = copy.deepcopy(one), copy.deepcopy(one)
    names = [name for name, param in told.named_parameters() if isinstance(param, QTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(told, names)
    x = torch.randn(6 * mesh.size(), K)
    train(one, x)
    for several in (DistributedDataParallel(told), DistributedDataParallel(untold, init_sync=False)):
        train(several, x.chunk(mesh.size())[mesh.get_local_rank()])
        for name, tensor in several.module.state_dict().items():
            if isinstance(tensor, QTensor):
                assert torch.equal(tensor, one.state_dict()[name])
            else:
                torch.testing.assert_close(tensor, one.state_dict()[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(ArgumentError, match="a QTensor keeps its shape"):
        DistributedDataParallel(one)


def check_what_goes_over_the_wire(mesh: DeviceMesh) -> None:
    """The bytes of codes and scales: one more row where rows are uneven, and 8 bytes for their number."""
    for scheme in SCHEMES:
        layer = nn.Linear(K, N, bias=False)
        bitport.quantize_(layer, scheme, measure=False)
        q, heard = layer.weight, []
        fully_shard(layer, mesh=mesh)
        layer.set_custom_all_gather(Listener(heard))
        layer(torch.randn(2, K))
        rows = -(-N // mesh.size())
        cut = [part for part in (q.plain()) if part is not None and part.shape[-2] == N]
        assert heard == [sum(rows * part.nbytes // N for part in cut) + 8]
        assert heard[0] < 1.2 * q.nbytes / mesh.size() + 64


class Listener:
    """torch's own all-gather, recording the bytes that each process sends."""

    def __init__(self, heard: list[int]) -> None:
        self.heard = heard

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> object:
        self.heard.append(input_tensor.nbytes)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def check_mixed_precision_leaves_the_numbers(mesh: DeviceMesh) -> None:
    """Trained parameters are cast; of a quantized weight only the reported dtype changes."""
    x = torch.randn(5, K)
    for scheme in ("int4-g32", "fp8-wo", "nvfp4-wo"):
        model = nn.Sequential(nn.Linear(K, N))
        bitport.quantize_(model, scheme, measure=False)
        q = model[0].weight
        expected = F.linear(x.bfloat16(), q, model[0].bias.bfloat16())
        shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=False)
        y = model(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, expected)
        gathered = model[0].weight
        assert isinstance(gathered, QTensor)
        assert gathered.dtype == torch.bfloat16
        assert torch.equal(gathered.to(torch.float32), q)


def check_fewer_rows_than_processes(mesh: DeviceMesh) -> None:
    for rows in (1, mesh.size() + 1):
        layer, x = nn.Linear(K, rows), torch.randn(3, K)
        bitport.quantize_(layer, "int4-g32", measure=False)
        y = layer(x)
        fully_shard(layer, mesh=mesh)
        assert torch.equal(layer(x), y)
        assert torch.equal(layer(x), y)


def check_a_process_alone(mesh: DeviceMesh) -> None:
    """With a single process torch gathers nothing, and looks only at the first of several parts."""
    alone = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("all", "alone"))["alone"]
    for scheme in SCHEMES:
        layer, x = nn.Linear(K, N), torch.randn(3, K)
        bitport.quantize_(layer, scheme, measure=False)
        y = layer(x)
        fully_shard(layer, mesh=alone)
        assert torch.equal(layer(x), y)
        assert torch.equal(layer(x), y)


def check_other_weights(mesh: DeviceMesh) -> None:
    """Tables, experts, convolutions, weights stored as [K, N], and act-order with scaled inputs."""
    ids, x = torch.randint(0, 101, (3, 4)), torch.randn(2, 3, K)
    permuted = nn.Linear(K, 33)
    extra = {"perm": torch.randperm(K), "pre_scale": torch.rand(K) + 0.5}
    q = bitport.quantize_tensor(permuted.weight.detach(), "int4-g32", **extra)
    permuted.weight = nn.Parameter(q, requires_grad=False)
    cases = [(nn.Embedding(101, K), ids), (nn.Conv1d(3, 10, 3), x), (Experts(), x), (Transposed(), x), (permuted, x)]
    for module, given in cases:
        bitport.quantize_(module, bitport.Recipe((bitport.Rule("*", "int4-g32", KINDS),)), measure=False)
        assert any(isinstance(param, QTensor) for param in module.parameters()), module
        y = module(given)
        fully_shard(module, mesh=mesh)
        for _ in range(2):
            assert torch.equal(module(given), y), module


KINDS = ("linear", "embedding", "conv", "experts", "other")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, 40, K))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].expand(2, 5, K).transpose(0, 1) @ self.experts.transpose(-1, -2)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        value = torch.randn(2 * K, 40)
        q = bitport.quantize_tensor(value, "int4-g32", transposed=True)
        self.weight = nn.Parameter(q, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1) @ self.weight


def check_offload(mesh: DeviceMesh) -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, K)
    bitport.quantize_(model, "int4-g32", measure=False)
    y = model(x)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert torch.equal(model(x), y)
    assert torch.equal(model(x), y)


def check_a_state_dict_can_be_loaded(mesh: DeviceMesh) -> None:
    """Also that of another model, by copy and by assignment, after weights were used."""
    x = torch.randn(3, K)
    for scheme in ("int4-g32", "nvfp4-wo"):
        one, other = (nn.Sequential(Block(), Block()) for _ in range(2))
        for model in (one, other):
            bitport.quantize_(model, scheme, measure=False)
        y = one(x)
        shard(one, mesh)
        shard(other, mesh)
        for assign in (False, True):
            fresh = copy.deepcopy(one.state_dict())
            other(x)
            other.load_state_dict(fresh, assign=assign)
            assert torch.equal(other(x), y)


def check_verbs(mesh: DeviceMesh) -> None:
    """quantize_ and dequantize_ must come before fully_shard; explain needs unsharded weights, as products do."""
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU())
    fully_shard(model, mesh=mesh)
    with pytest.raises(ArgumentError, match="use quantize_ first and fully_shard afterwards"):
        bitport.quantize_(model, "int4-g32")
    with pytest.raises(ArgumentError, match="use dequantize_ first and fully_shard afterwards"):
        bitport.dequantize_(model)
    model = nn.Sequential(nn.Linear(K, N))
    bitport.quantize_(model, "int4-g32", measure=False)
    expected = bitport.explain(model)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"call unshard\(\)"):
        bitport.explain(model)
    assert isinstance(model, FSDPModule)
    model.unshard()
    assert str(bitport.explain(model)) == str(expected)


def check_columns(mesh: DeviceMesh) -> None:
    """To shard by columns, FSDP2 allocates a buffer that no piece of a quantized tensor fits into."""
    layer = nn.Linear(K, 32, bias=False)
    bitport.quantize_(layer, "int4-g32", measure=False)
    with pytest.raises(ArgumentError, match="a quantized tensor cannot be copied into a float one"):
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda param: Shard(1))


def check_blocks_of_rows(mesh: DeviceMesh) -> None:
    layer = nn.Linear(K, 32 * mesh.size() - 1)
    bitport.quantize_(layer, "fp8-b32x32-wo", measure=False)
    x = torch.randn(3, K)
    y = layer(x)
    fully_shard(layer, mesh=mesh)
    assert torch.equal(layer(x), y)
    parted = nn.Linear(K, 32 * mesh.size() + 1)
    bitport.quantize_(parted, "fp8-b32x32-wo", measure=False)
    with pytest.raises(ArgumentError, match="multiples of 32"):
        fully_shard(parted, mesh=mesh)
