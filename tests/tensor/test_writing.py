"""Writing into a QTensor changes it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from bitport.errors import ArgumentError, UnsupportedError
from bitport.tensor import QTensor

Make = Callable[..., QTensor]


def test_copy_into_a_narrowed_part(make: Make) -> None:
    """As vLLM fills a fused weight: param.narrow(...).copy_(shard)."""
    q, k = make("int4-g32", 64, 64), make("int4-g32", 32, 64)
    for layout in ("plain", "cpu_tiles"):
        fused = make("int4-g32", 96, 64).to_layout(layout)
        fused.narrow(0, 0, 64).copy_(q)
        fused.narrow(0, 64, 32).copy_(k)
        assert torch.equal(fused.dequantize(), torch.cat([q.dequantize(), k.dequantize()]))
    experts = make("int4-g32", 3, 64, 64)
    experts[1].copy_(q)
    assert torch.equal(experts.dequantize()[1], q.dequantize())


def test_a_write_that_would_be_lost_is_refused(make: Make) -> None:
    packed = make("int4-g32", 96, 64).to_layout("cpu_tiles")
    with pytest.raises(ArgumentError, match="copy of a part of a packed tensor"):
        packed.narrow(0, 0, 48).copy_(make("int4-g32", 48, 64))
    copied = packed[:48].clone()
    copied.copy_(packed[48:])
    assert torch.equal(copied, packed[48:])
    experts = make("int4-g32", 3, 96, 64).to_layout("cpu_tiles")
    for view in (packed[:48].unsqueeze(0), experts[:, :64][1], experts[:, :64][1:].mT, packed[:, :32]):
        with pytest.raises(ArgumentError, match="copy of a part of a packed tensor"):
            view.copy_(view.clone())


def test_copy_takes_no_less_and_no_more(make: Make, full: QTensor) -> None:
    with pytest.raises(ArgumentError, match="perm"):
        make().copy_(full)
    with pytest.raises(ArgumentError, match="perm"):
        full.clone().copy_(make())
    with pytest.raises(ArgumentError, match="scheme and shape must be equal"):
        make().copy_(make("int4-g32", 32, 96))


def test_copy_rounds_no_scale(make: Make) -> None:
    """bfloat16 scales cannot hold the values of float32 ones."""
    with pytest.raises(ArgumentError, match=r"torch.bfloat16.*torch.float32.*assign=True"):
        make(dtype=torch.bfloat16).copy_(make())


def test_data_can_be_replaced(make: Make) -> None:
    q, other = nn.Parameter(make(), requires_grad=False), make("int8", 32, 48)
    x = torch.randn(2, q.shape[1])
    assert F.linear(x, q).shape == (2, q.shape[0])
    q.data = other
    assert torch.equal(q, other)
    assert q.shape == (32, 48)
    assert torch.equal(F.linear(x[:, :48], q), F.linear(x[:, :48], other))
    with pytest.raises(ArgumentError, match="can only be another one"):
        q.data = torch.zeros(32, 48)


def test_data_that_is_a_slice_of_a_packed_tensor(make: Make) -> None:
    """Writes to such a copy are refused, and no longer once other data takes its place."""
    packed, plain = make("int4-g32", 96, 64).to_layout("cpu_tiles"), make("int4-g32", 48, 64)
    q = nn.Parameter(make("int4-g32", 48, 64), requires_grad=False)
    q.data = packed[:48]
    with pytest.raises(ArgumentError, match="copy of a part of a packed tensor"):
        q.copy_(plain)
    q.data = plain.clone()
    q.copy_(packed[48:])
    assert torch.equal(q, packed[48:])


def test_a_part_can_be_replaced(make: Make) -> None:
    q, x = make(), torch.randn(2, 96)
    before = F.linear(x, q)
    q.scale = q.scale * 2
    assert torch.equal(F.linear(x, q), 2 * before)


def test_its_own_value_may_be_written_into_a_quantized_weight(make: Make) -> None:
    q = make(dtype=torch.bfloat16)
    value = q.dequantize()
    assert q.copy_(value.double()) is q
    assert torch.equal(q.dequantize(), value)
    for other in (value + 1, value[0], torch.empty(64, 96, device="meta")):
        with pytest.raises(ArgumentError, match="float tensor cannot be copied"):
            q.copy_(other)
    with pytest.raises(UnsupportedError, match="sub"):
        q - value


@pytest.mark.parametrize("make_mean", [get_ema_multi_avg_fn, get_swa_multi_avg_fn, lambda: None])
def test_a_mean_over_time_leaves_what_is_quantized(make: Make, make_mean: Callable[[], Any]) -> None:
    """Without a function AveragedModel subtracts, adds and copies tensor by tensor on the CPU."""
    model = nn.Linear(96, 64)
    model.weight = nn.Parameter(make("int4-g32", 64, 96), requires_grad=False)
    average = AveragedModel(model, multi_avg_fn=make_mean())
    for step in (0, 1):
        model.bias.data.fill_(step)
        average.update_parameters(model)
    assert torch.equal(average.module.weight, model.weight)
    assert 0 < average.module.bias.unique().item() < 1
    model.weight = nn.Parameter(make("int4-g32", 64, 96), requires_grad=False)
    with pytest.raises(ArgumentError, match="must be the same in an average and in its model"):
        average.update_parameters(model)
