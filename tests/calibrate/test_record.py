"""Blocks that hand on more than they return: the record of their arguments, made without running them, misses that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .test_blocks import BLOCKS, EVERY, Block, Model, Opaque, assert_close, expected, grams, two


class Handing(Block):
    """Hands its output on by writing to what it is given."""

    def forward(self, given: Any, shift: Tensor) -> None:  # type: ignore[override]
        if isinstance(given, dict):
            given["x"] = super().forward(given["x"], shift)[0]
        else:
            given.x = super().forward(given.x, shift)[0]


@pytest.mark.parametrize("kind", [dict, Opaque])
def test_a_block_that_writes_to_an_object(kind: type) -> None:
    class Writing(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, shift = self.embed(ids).clone(), torch.zeros(16)
            given = {"x": x} if kind is dict else Opaque(x)
            for layer in self.layers:
                layer(given, shift)
            return self.head(given["x"] if isinstance(given, dict) else given.x)

    model, same = two(Handing, kind=Writing)
    found, wanted = grams(model, in_order=False), expected(same, [[*EVERY, "head.weight"]])
    assert_close(found, wanted)


class Adding(Block):
    def forward(self, x: Tensor, shift: Tensor, kept: Any = None) -> Any:  # type: ignore[override]
        found = super().forward(x, shift)[0]
        if kept is not None:
            kept.append(found)
        return found


@pytest.mark.parametrize("by", ["list", "hook"])
def test_an_output_that_a_block_also_leaves_elsewhere(by: str) -> None:
    """The blocks get what they always do, but what follows gets more than the last one returned."""

    class Keeping(Model):
        kept: list[Tensor]

        def forward(self, ids: Tensor) -> Tensor:
            x, shift, self.kept = self.embed(ids).clone(), torch.zeros(16), []
            for layer in self.layers:
                x = layer(x, shift, self.kept if by == "list" else None)
            return self.head(x + sum(self.kept))

    model, same = two(Adding, kind=Keeping)
    if by == "hook":
        for each in (model, same):
            for layer in each.layers:
                layer.up.register_forward_hook(lambda _, x, y, each=each: each.kept.append(y[..., :8]))  # type: ignore[union-attr]
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert_close(found, wanted)


@pytest.mark.parametrize("by", ["attribute", "key"])
def test_what_a_block_leaves_for_the_model_to_find(by: str) -> None:
    """Without it the model fails in its own code, as soon as the blocks do not run."""

    class Leaving(Block):
        def forward(self, x: Tensor, shift: Tensor, left: Any = None) -> Any:  # type: ignore[override]
            found = super().forward(x, shift)[0]
            if left is None:
                self.balance = found.mean()
            else:
                left["balance"] = found.mean()
            return found

    class Finding(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, shift, left = self.embed(ids).clone(), torch.zeros(16), None if by == "attribute" else {}
            for layer in self.layers:
                x = layer(x, shift, left)
            return self.head(x + (self.layers[0].balance if left is None else left["balance"]))

    model, same = two(Leaving, kind=Finding)
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert_close(found, wanted)


def test_an_error_of_the_model_itself_is_its_own() -> None:
    class Wrong(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.offset

    with pytest.raises(AttributeError, match="offset"):
        grams(Wrong(), in_order=True)
