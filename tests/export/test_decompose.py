"""Exported programs without bitport's ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitport as bp
from bitport.export import decomposed


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp4", "nf4"])
def test_it_holds_no_op_of_bitport(scheme: str) -> None:
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 32), nn.ReLU()).eval()
    bp.quantize_(model, {"0": "int8", "*": scheme}, measure=False)
    layout = model[1].weight.bits_layout
    rows = torch.export.Dim("rows", min=2, max=8)
    program = decomposed(model, (torch.arange(3),), ({0: rows},))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in called if "bitport" in name]
    ids = torch.tensor([3, 1, 15, 0])
    torch.testing.assert_close(program.module()(ids), model(ids), rtol=1e-5, atol=1e-5)
    assert model[1].weight.bits_layout == layout
