"""A block that a model holds under several names is one block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitport.calibrate.blocks import Walk
from bitport.calibrate.place import Whole
from bitport.calibrate.store import InMemory
from bitport.nn import find_targets


class Several(nn.Module):
    """The last layer has a second name, and a part of it is used outside too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 8)}) for _ in range(2))
        for layer in self.layers:
            layer.forward = layer["up"].forward
        self.last, self.head = self.layers[-1], self.layers[-1]["up"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layers[0](x)))


def test_a_second_name_of_a_block_is_not_outside_of_it() -> None:
    model = Several()
    walk = Walk(model, find_targets(model), (), [torch.randn(3, 8)], Whole(), InMemory())
    assert {name: [each.name for each in own] for name, own in walk.targets.items()} == {
        f"layers.{at}": [f"layers.{at}.up.weight"] for at in range(2)
    }
    assert [each.name for each in walk.rest] == ["head.weight"]
