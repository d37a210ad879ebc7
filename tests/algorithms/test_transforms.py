"""What every transform promises: the float model computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitport
from bitport.algorithms import TRANSFORMS
from bitport.errors import ArgumentError
from bitport.numerics import sqnr

from .families import batch_of, model_of, output


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_not_quantized_computes_what_it_did(name: str, family: str) -> None:
    """The other weights absorb the change: quantizing one layer of each block to eight bits changes little. Its two
    factors are rounded in steps of 1/127 of their largest number, some three times the usual one: 43 dB each. A change
    that is not undone leaves less than 10 dB."""
    model = model_of(family)
    before = output(model, family)
    report = bitport.quantize_(
        model, {"*.q_proj": "int8-dyn", "*": "skip"}, algorithm=name, calibrate=[batch_of(family, 4)]
    )
    assert len(report.quantized) == 2
    assert name in " ".join(row.note for row in report.quantized)
    assert sqnr(before, output(model, family)) > 30


@pytest.mark.parametrize("cut", [slice(None), slice(8, None)], ids=["all", "a part"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_in_the_same_memory_are_refused(name: str, cut: slice) -> None:
    """A change of one would be a change of the other, which nothing undoes."""
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32))
    model[3].weight = nn.Parameter(model[1].weight.detach()[cut])
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ArgumentError, match=r"1.weight and 3.weight are two parameters in the same memory"):
        bitport.quantize_(model, "int8-dyn", algorithm=name, calibrate=[torch.randn(4, 16)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_parameters_side_by_side_in_one_storage_are_apart(name: str) -> None:
    """Also those that lie in each other's gaps."""
    model = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32))
    memory = torch.randn(64, 16), torch.randn(32, 32)
    model[1].weight, model[3].weight = map(nn.Parameter, memory[0].split(32))
    model[2].weight = nn.Parameter(memory[1][::2])
    model[0].weight = nn.Parameter(memory[1][1, :16])
    report = bitport.quantize_(model, "int8-dyn", algorithm=name, calibrate=[torch.randn(4, 16)])
    assert len(report.quantized) == 3
