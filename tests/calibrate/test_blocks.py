"""Inputs collected block by block equal those of a model whose earlier blocks are quantized, as whole runs show."""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.calibrate.blocks import blocks_of, measured
from bitport.calibrate.contexts import in_use
from bitport.calibrate.inputs import Watch
from bitport.nn import find_targets


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        self.calls += 1
        return x + scale * self.down(torch.tanh(self.up(x) + shift)), self.calls


class Careless(Block):
    """Modifies its input in place."""

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        return x.add_(scale * self.down(torch.tanh(self.up(x) + shift))), 0


class Model(nn.Module):
    """Blocks that get a mask of their own, and a head outside of them."""

    def __init__(self, block: type[Block] = Block, between: str = "") -> None:
        super().__init__()
        self.embed, self.head, self.between = nn.Embedding(11, 8), nn.Linear(8, 11), between
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).clone()
        for at, layer in enumerate(self.layers):
            shift = torch.full((16,), 0.1 * at) + ids.float().mean()
            x = layer(x, shift, scale=1.0 + at)[0]
            if self.between == "added":
                x = x + 0.5
            elif self.between == "written":
                x += 0.5
            elif self.between == "decided" and bool(x.sum() > -1e9):
                continue
            elif self.between == "twice" and at == 1:
                x = layer(x, shift)[0]
            elif self.between == "again" and at == 2 and ids.shape[1] > 5:
                x = self.layers[0](x, shift)[0]
            elif self.between == "first kept" and at == 0:
                first = x.clone()
        return self.head(x + first if self.between == "first kept" else x)


BATCHES = [torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (1, 7))]


def spoil(model: nn.Module, name: str) -> None:
    """Stand in for quantization by changing the weight clearly."""
    with torch.no_grad():
        model.get_parameter(name).mul_(0.5)


def grams(model: nn.Module, *, in_order: bool, **watched: Any) -> dict[str, Tensor]:
    targets = [target for target in find_targets(model) if target.kind == "linear"]
    found = {}
    for target, inputs in measured(model, targets, {target.name for target in targets}, BATCHES):
        assert inputs is not None
        found[target.name] = inputs.gram.clone()
        if in_order:
            spoil(model, target.name)
    return found


def expected(model: nn.Module, names: list[list[str]]) -> dict[str, Tensor]:
    """The same by running the whole model: each group is watched, then changed."""
    found = {}
    for group in names:
        with torch.no_grad(), Watch({name: model.get_parameter(name) for name in group}) as watch:
            for batch in BATCHES:
                model(batch)
        found |= {name: inputs.gram for name, inputs in watch.seen.items()}
        for name in group:
            spoil(model, name)
    return found


BLOCKS = [[f"layers.{at}.{part}.weight" for part in ("up", "down")] for at in range(3)]
EVERY = [name for group in BLOCKS for name in group]


def two(*args: Any, kind: type[Model] = Model) -> tuple[Model, Model]:
    model, same = kind(*args), kind(*args)
    same.load_state_dict(model.state_dict())
    return model, same


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.parametrize("between", ["", "decided", "first kept"])
@pytest.mark.parametrize("block", [Block, Careless])
def test_each_block_sees_what_quantized_ones_give(block: type[Block], between: str) -> None:
    """Also if the model only looks at what passes between blocks, or keeps it for later."""
    model, same = two(block, between)
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert list(found) == list(wanted)
    assert_close(found, wanted)


def test_a_block_runs_twice_on_every_batch() -> None:
    """And once on the first and the last batch, to see that the record is true. The first block also runs once per
    batch shape, to find out what all of the outputs look like."""
    model = Model()
    grams(model, in_order=True)
    assert [layer.calls - 2 for layer in model.layers] == [3 * len(BATCHES), 2 * len(BATCHES), 2 * len(BATCHES)]


def test_blocks_that_know_their_index_are_alike() -> None:
    model = Model()
    for at, layer in enumerate(model.layers):
        layer.layer_idx, layer.scale, layer.kinds = at, 0.5, ["full", "sliding"]
    grams(model, in_order=True)
    assert [layer.calls - 2 for layer in model.layers] == [3 * len(BATCHES), 2 * len(BATCHES), 2 * len(BATCHES)]


def test_no_block_runs_behind_the_last_that_is_watched() -> None:
    """The first one runs once per batch shape, and then once on each batch while watched; all run once on the first
    batch and on the last."""
    model = Model()
    targets = [target for target in find_targets(model) if target.kind == "linear"]
    taken = [target.name for target, _ in measured(model, targets, {"layers.0.up.weight"}, BATCHES)]
    assert sorted(taken) == sorted(target.name for target in targets)
    assert [layer.calls - 2 for layer in model.layers] == [2 * len(BATCHES), 0, 0]


@pytest.mark.parametrize("between", ["added", "written"])
def test_what_a_model_does_between_blocks_is_not_lost(between: str) -> None:
    """In that case a block's inputs are those of the unchanged model."""
    model, same = two(Block, between)
    found, wanted = grams(model, in_order=True), expected(same, [EVERY])
    assert_close(found, wanted)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda kept, x: kept.copy_(x.mean((0, 1)).repeat(2)),
    "__setitem__": lambda kept, x: kept.__setitem__(slice(8), x.mean((0, 1))),
    "__ior__": lambda kept, x: kept.view(torch.int32).__ior__((x.mean((0, 1)).repeat(2) > 0) * 0x3F800000),  # 1.0
    "out": lambda kept, x: torch.mul(x.mean((0, 1)).repeat(2), 3.0, out=kept),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_tensor_of_the_model_that_an_output_is_written_to(way: str) -> None:
    class Keeping(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, kept = self.embed(ids).clone(), torch.zeros(16)
            for layer in self.layers:
                x, _ = layer(x, kept)
                WRITES[way](kept, x)
            return self.head(x)

    model, same = two(kind=Keeping)
    found, wanted = grams(model, in_order=False), expected(same, [EVERY])
    assert_close(found, wanted)


AFTER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda x, own: own + x,
    "joined": lambda x, own: torch.cat((own, x), dim=-1)[..., 4:12],
    "looked up": lambda x, own: own[0][x.argmax(-1) % 5] + x,
    "written": lambda x, own: x.mul_(own),
    "keyword": lambda x, own: F.layer_norm(x, (8,), weight=own[0, 0]),
}


@pytest.mark.parametrize("way", AFTER)
def test_what_a_model_does_with_its_own_tensors_after_the_blocks(way: str) -> None:
    """It hides nothing from them: their inputs are those that quantized ones give."""

    class Skipping(Model):
        def forward(self, ids: Tensor) -> Tensor:
            own = self.embed(ids)
            x, shift = own.clone(), torch.zeros(16)
            for layer in self.layers:
                x, _ = layer(x, shift)
            return self.head(AFTER[way](x, own))

    model, same = two(kind=Skipping)
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert_close(found, wanted)


class Flagged(Block):
    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0, first: Any = None) -> Any:
        found = super().forward(x, shift, scale)
        return (first, *found) if first else found


@pytest.mark.parametrize("flag", [True, "all"])
def test_a_block_that_returns_more_if_a_flag_says_so(flag: Any) -> None:
    class Flagging(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, shift = self.embed(ids).clone(), torch.zeros(16)
            for at, layer in enumerate(self.layers):
                x = layer(x, shift, first=flag if at == 1 else type(flag)())[-2]
            return self.head(x)

    model, same = two(Flagged, kind=Flagging)
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert_close(found, wanted)


class Writing(Block):
    """Modifies its second input in place."""

    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        found = super().forward(x, shift, scale)
        shift.add_(1.0)
        return found


class Modifying(Model):
    """Blocks modify what the next ones get too; with ``careless`` ones, what they return is not looked at."""

    def forward(self, ids: Tensor) -> Tensor:
        x, shift = self.embed(ids).clone(), torch.zeros(16)
        for layer in self.layers:
            y, _ = layer(x, shift)
            x = x if isinstance(layer, Careless) else y
        return self.head(x)


@pytest.mark.parametrize("block", [Writing, Careless])
def test_an_input_that_a_block_modifies_for_others(block: type[Block]) -> None:
    model, same = two(block, kind=Modifying)
    found, wanted = grams(model, in_order=False), expected(same, [EVERY])
    assert_close(found, wanted)


class Opaque:
    """What pytree does not look into."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Opened(Block):
    """Takes one, or gives one."""

    takes = gives = False

    def forward(self, x: Any, shift: Tensor, scale: float = 1.0) -> Any:
        x, count = super().forward(x.x if self.takes else x, shift, scale)
        return Opaque(x) if self.gives else x, count


@pytest.mark.parametrize("side", ["takes", "gives"])
def test_tensors_that_lie_in_an_object(side: str) -> None:
    block = type(side, (Opened,), {side: True})

    class Wrapping(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, shift = self.embed(ids).clone(), torch.ones(16)
            for layer in self.layers:
                x = layer(Opaque(x), shift)[0] if side == "takes" else layer(x, shift)[0].x
            return self.head(x)

    model, same = two(block, kind=Wrapping)
    found, wanted = grams(model, in_order=False), expected(same, [EVERY])
    assert_close(found, wanted)


DECISIONS: dict[str, Callable[[Tensor], object]] = {
    "__bool__": lambda x: bool(x.any()),
    "__int__": lambda x: int(x.abs().max() * 1e6),
    "__float__": lambda x: float(x.sum()),
    "__index__": lambda x: [False, True][x.any().long()],
    "__contains__": lambda x: 0.0 not in x,
    "__array__": lambda x: np.asarray(x).any(),
    "__dlpack__": lambda x: np.from_dlpack(x).any(),
    "data_ptr": lambda x: ctypes.c_float.from_address(x.data_ptr()).value,
    "numpy": lambda x: x.numpy().any(),
    "tolist": lambda x: any(x.flatten().tolist()),
    "item": lambda x: x.sum().item(),
    "equal": lambda x: not torch.equal(x, torch.zeros_like(x)),
    "allclose": lambda x: not torch.allclose(x, torch.zeros_like(x)),
    "is_nonzero": lambda x: torch.is_nonzero(x.sum()),
}


@pytest.mark.parametrize("way", DECISIONS)
def test_a_model_that_decides_by_the_output_of_a_block(way: str) -> None:
    """Zeros, which stand for the output while the blocks are found, would decide otherwise."""

    class Deciding(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x, shift = self.embed(ids).clone(), torch.zeros(16)
            for layer in self.layers:
                x, _ = layer(x, shift)
                if DECISIONS[way](x):
                    shift = shift + 1.0
            return self.head(x)

    model, same = two(kind=Deciding)
    found, wanted = grams(model, in_order=True), expected(same, [*BLOCKS, ["head.weight"]])
    assert_close(found, wanted)


@pytest.mark.parametrize("between", ["twice", "again"])
def test_a_block_that_is_called_twice(between: str) -> None:
    """For every batch, or only for a later one."""
    model, same = two(Block, between)
    found, wanted = grams(model, in_order=True), expected(same, [[*EVERY, "head.weight"]])
    assert_close(found, wanted)


def test_blocks_are_the_children_of_the_outermost_lists() -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)]), "b": nn.Linear(2, 2)})
    assert blocks_of(model) == ["a.0", "a.1"]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))) == ["0", "1"]
    assert blocks_of(nn.Linear(2, 2)) == []
    both = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    both["b"] = nn.Sequential(both["a"][1], nn.Linear(2, 2))
    assert blocks_of(both) == ["a.0", "a.1", "b.1"]


def test_only_what_is_wanted_is_measured() -> None:
    model = Model()
    targets = find_targets(model)
    got = {target.name: inputs for target, inputs in measured(model, targets, {"layers.1.up.weight"}, BATCHES)}
    assert set(got) == {target.name for target in targets}
    assert [name for name, inputs in got.items() if inputs is not None] == ["layers.1.up.weight"]


def test_whoever_quantizes_keeps_the_modes_of_torch() -> None:
    model = Model()
    targets = find_targets(model)
    modes = [torch.is_grad_enabled() for _ in measured(model, targets, {"layers.1.up.weight"}, BATCHES)]
    assert modes == [True] * len(targets)


def test_a_model_is_left_as_it_was() -> None:
    model = Model().train()
    model.config = type("Config", (), {"use_cache": True})()
    grams(model, in_order=False)
    assert model.training
    assert model.config.use_cache
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_forward_of_one_module_alone_stays() -> None:
    """Libraries that move weights to a device for each call put one there."""
    model, same = two()
    for layer in (*model.layers, *same.layers):
        layer.forward = functools.partial(layer.forward, scale=0.25)  # type: ignore[method-assign]
    put = [layer.forward for layer in model.layers]
    for each in (model, same):
        each.forward = functools.partial(without_scale, each)  # type: ignore[method-assign]
    found, wanted = grams(model, in_order=False), expected(same, [EVERY])
    assert [layer.forward for layer in model.layers] == put
    assert_close(found, wanted)


def without_scale(model: Model, ids: Tensor) -> Tensor:
    x, shift = model.embed(ids).clone(), torch.zeros(16)
    for layer in model.layers:
        x = layer(x, shift)[0]
    return model.head(x)


def test_a_decoder_within_a_model_uses_no_cache_either() -> None:
    """As in models with images, whose own config does not say whether a cache is used."""
    model = nn.Sequential(Model())
    model[0].config = type("Config", (), {"use_cache": True})()
    with in_use(model):
        assert not model[0].config.use_cache
    assert model[0].config.use_cache


class Moving(nn.Module):
    """Modules that behave differently in training: a dropout, and the statistics of a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)) for _ in "ab")
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_calibration_sees_the_model_as_it_is_used() -> None:
    model = Moving()
    model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    other, batches, drawn = copy.deepcopy(model).eval(), [torch.randn(20, 8)], torch.get_rng_state()
    state = copy.deepcopy(model.state_dict())
    ours, theirs = (
        {target.name: inputs for target, inputs in measured(each, targets, names, batches)}
        for each in (model, other)
        for targets in [find_targets(each)]
        for names in [{target.name for target in targets}]
    )
    for name in theirs:
        assert torch.equal(ours[name].gram, theirs[name].gram)  # type: ignore[union-attr]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert torch.equal(drawn, torch.get_rng_state())


def test_whoever_stops_has_the_model_as_it_was() -> None:
    model = Moving().train()
    model.config = type("Config", (), {"use_cache": True})()
    targets = find_targets(model)
    work = measured(model, targets, {targets[0].name}, [torch.randn(20, 8)])
    next(iter(work))
    assert model.training
    assert model.config.use_cache
