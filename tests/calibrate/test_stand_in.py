"""Blocks of one class are recorded without running each, and their outputs may differ in shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.calibrate.blocks import measured
from bitport.calibrate.inputs import Watch
from bitport.nn import find_targets


class Reshaping(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, 4)).reshape(self.count, -1, 4)


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _then(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), last)


def _pooling(*size: int | None) -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.AdaptiveAvgPool2d(size))


LIKE: dict[str, tuple[tuple[int, ...], list[nn.Module]]] = {
    "setting": ((2, 4, 12), [nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, stride=2, padding=1), nn.Linear(6, 2)]),
    "number": ((2, 6, 4), [Reshaping(2), Reshaping(4), nn.Flatten(1), nn.Linear(12, 2)]),
    "part": ((5, 12), [_then(nn.ReLU()), _then(nn.Unflatten(1, (4, 3))), nn.Linear(3, 2)]),
    "no weights": ((5, 12), [nn.Unflatten(-1, (3, 4)), nn.Flatten(1), nn.Unflatten(-1, (4, 3)), nn.Linear(3, 2)]),
    "open setting": ((5, 4, 6), [_pooling(None, 6), _pooling(None, 2), nn.Linear(2, 2)]),
    "function": ((5, 12), [Apply(torch.relu), Apply(lambda x: x[:, :3]), nn.Linear(3, 2)]),
}


@pytest.mark.parametrize("differs", LIKE)
def test_blocks_of_one_class_whose_outputs_differ_in_shape(differs: str) -> None:
    shape, blocks = LIKE[differs]
    assert_same_inputs(nn.Sequential(*blocks), [torch.randn(shape), torch.randn(shape)])


class Cutting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor, cut: bool) -> Tensor:
        return self.layer(x)[:, :3] if cut else self.layer(x)


def test_blocks_whose_outputs_differ_by_a_flag() -> None:
    class Flagging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([Cutting(), Cutting()]), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[1](self.layers[0](x, False), True))

    assert_same_inputs(Flagging(), [torch.randn(5, 12), torch.randn(5, 12)])


def assert_same_inputs(model: nn.Module, batches: list[Tensor]) -> None:
    """Of blocks in turn, as of the whole model: nothing is quantized."""
    targets = [target for target in find_targets(model) if target.kind == "linear"]
    watch = Watch({target.name: model.get_parameter(target.name) for target in targets})
    with torch.no_grad(), watch:
        for batch in batches:
            model(batch)
    for target, inputs in measured(model, targets, watch.seen, batches):
        assert inputs is not None
        torch.testing.assert_close(inputs.gram, watch.seen[target.name].gram)
