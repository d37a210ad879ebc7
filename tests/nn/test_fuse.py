"""Which products and activations are fused, what is left unchanged, and that the numbers are those of float64."""

from __future__ import annotations

import copy
import inspect
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import bitport as bp
from bitport.numerics import sqnr
from bitport.ops.product import linear_then
from tests.backends.taken import compiled, takes

pytestmark = [compiled, pytest.mark.usefixtures("own_tables")]


class Gated(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96, bias), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.fc1, self.act, self.drop, self.fc2 = (
            nn.Linear(64, 96),
            nn.GELU(approximate),
            nn.Dropout(),
            nn.Linear(96, 64),
        )

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Looks(Plain):
    """Branches on the values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Twice(Plain):
    """Uses the input of the activation a second time."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        return self.fc2(self.act(y) * y)


class Residual(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.act(self.fc1(x)))


class Skips(Plain):
    """Uses another layer if given one more tensor."""

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.act(self.fc1(x))
        return self.fc2(y) if skip is None else self.drop(self.fc2(y)) * skip


class Trains(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.fc1(x))
        return self.drop(self.fc2(y)) if self.training else self.fc2(y)


class Scales(Plain):
    """Multiplies by a number that can be changed."""

    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)) * self.factor)


class Asserts(Plain):
    def forward(self, x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return super().forward(x)


APART = {"int4-g32": 35, "int8-dyn": 38 - 6, "mxfp4": 18 - 6}
"""Least SQNR in dB of the fused result against the unfused one. Where the input of the last product is rounded too, one
different bit may become a whole step, or another scale of a block: then both are roundings of the same numbers, each
with the SQNR of its type, and their distance is at most both errors together, twice one of them."""


def model(kind: nn.Module, scheme: str = "int4-g32") -> nn.Module:
    torch.manual_seed(1)
    for module in kind.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    whole = nn.ModuleDict({"mlp": kind}).bfloat16().eval()
    bp.quantize_(whole, scheme, measure=False)
    return whole


@pytest.mark.parametrize("scheme", ["int4-g32", "int8-dyn", "mxfp4"])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Gated(), "silu(gate) * .."),
        (Gated(bias=True), "silu(gate) * .."),
        (Plain(), "gelu(fc1)"),
        (Plain("tanh"), "gelu_tanh(fc1)"),
    ],
    ids=["gated", "gated-bias", "gelu", "gelu-tanh"],
)
def test_fused_is_nearer_to_the_truth(kind: nn.Module, what: str, scheme: str) -> None:
    """One rounding instead of two or three: the error over 96 x 7 results is no larger."""
    whole, x = model(copy.deepcopy(kind), scheme), torch.randn(7, 64).bfloat16()
    keys = list(whole.state_dict())
    with torch.no_grad():
        apart = takes(lambda: whole["mlp"](x), 3 if isinstance(kind, Gated) else 2)
        assert bp.fuse_activations_(whole) == [f"mlp: {what}"]
        fused = takes(lambda: whole["mlp"](x), 3 if isinstance(kind, Gated) else 2)
        again = copy.deepcopy(whole)
        assert torch.equal(again["mlp"](x), fused)
    assert list(whole.state_dict()) == keys
    assert type(whole["mlp"]) is type(kind)
    exact = bp.dequantize_(copy.deepcopy(whole), torch.float64).double()["mlp"](x.double())
    if scheme == "int4-g32":  # rounding the inputs of the next product turns small differences into steps
        assert float(sqnr(exact, fused)) > float(sqnr(exact, apart)) - 0.5
    assert float(sqnr(apart, fused)) > APART[scheme]


LEFT = {
    Looks: "its forward cannot be traced: TraceError",
    Asserts: "its forward cannot be traced: AssertionError",
    Twice: "no activation alone takes the result of a layer that can be fused",
    Residual: "its forward does not only call children and multiply their results: .*operator.add",
    Scales: "its forward does not only call children and multiply their results: .*2.0",
    Trains: "its forward does something else in training",
}


@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_what_is_not_certain_is_left_and_told(kind: type[nn.Module]) -> None:
    whole = model(kind())
    done = bp.fuse_activations_(whole)
    assert done == []
    assert len(done.left) == 1
    assert re.match(f"mlp: {LEFT[kind]}", done.left[0])
    assert "forward" not in vars(whole["mlp"])
    assert not any(module.training for module in whole.modules())


@torch.no_grad()
def test_other_calls_run_the_forward_as_it_was() -> None:
    """Also by name, and in training."""
    whole, x, skip = model(Skips()), torch.randn(7, 64).bfloat16(), torch.randn(64).bfloat16()
    mlp = whole["mlp"]
    apart, skipped = mlp(x), mlp(x, skip)
    done = bp.fuse_activations_(whole)
    assert (done, done.left) == (["mlp: gelu(fc1)"], [])
    assert torch.equal(mlp(x, skip), skipped)
    assert torch.equal(mlp(skip=skip, x=x), skipped)
    assert torch.equal(mlp(x, None), apart)
    fused = takes(lambda: mlp(x=x), 2)
    assert torch.equal(fused, mlp(x))
    assert float(sqnr(apart, fused)) > APART["int4-g32"]
    assert inspect.signature(mlp.forward) == inspect.signature(Skips().forward)
    whole.train()
    assert torch.equal(mlp(x), fused)


def test_hooks_are_kept() -> None:
    whole, seen = model(Plain()), []
    whole["mlp"].fc1.register_forward_hook(lambda *args: seen.append(1))
    assert (done := bp.fuse_activations_(whole)) == []
    assert done.left == [f"mlp: {LEFT[Twice]}; fc1: hooks or a forward of its own"]
    whole = model(Plain())
    whole["mlp"].fc1.register_full_backward_hook(lambda *args: seen.append(3))
    assert bp.fuse_activations_(whole) == []
    whole = model(Plain())
    whole["mlp"].register_forward_hook(lambda *args: seen.append(2))
    assert bp.fuse_activations_(whole)
    whole["mlp"](torch.randn(2, 64).bfloat16())
    assert seen == [2]


def test_what_comes_later_is_called() -> None:
    whole, x, seen = model(Plain()), torch.randn(2, 64).bfloat16(), []
    assert bp.fuse_activations_(whole)
    fc1 = whole["mlp"].fc1
    fused, hook = whole["mlp"](x), fc1.register_forward_hook(lambda *args: seen.append(1))
    whole["mlp"](x)
    assert seen == [1]
    hook.remove()

    class Adapted(nn.Module):
        """A wrapper such as adapters use, which exposes the weight of its layer."""

        weight, bias = fc1.weight, fc1.bias

        def forward(self, x: Tensor) -> Tensor:
            return 2 * fc1(x)

    whole["mlp"].fc1 = Adapted()
    assert torch.equal(whole["mlp"](x), whole["mlp"].fc2(nn.functional.gelu(2 * fc1(x))))
    whole["mlp"].fc1 = fc1
    assert torch.equal(whole["mlp"](x), fused)


def test_global_hooks_are_called() -> None:
    whole, x, seen = model(Plain()), torch.randn(2, 64).bfloat16(), []
    assert bp.fuse_activations_(whole)
    fused = whole["mlp"](x)
    hook = register_module_forward_hook(lambda module, *args: seen.append(module))
    try:
        y = whole["mlp"](x)
        assert whole["mlp"].fc1 in seen
        assert bp.fuse_activations_(model(Plain())) == []
    finally:
        hook.remove()
    seen.clear()
    torch.testing.assert_close(y, fused)
    assert torch.equal(whole["mlp"](x), fused)
    assert not seen


def test_floats_and_what_is_fused_already_are_left() -> None:
    assert (done := bp.fuse_activations_(Plain())) == []
    assert done.left == []
    whole = model(Plain())
    assert bp.fuse_activations_(whole)
    assert (done := bp.fuse_activations_(whole)) == []
    assert done.left == ["mlp: its forward was replaced or generated before"]


def test_gradients_and_tracing() -> None:
    whole = model(Gated())
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    (wanted,) = torch.autograd.grad(whole["mlp"](x).sum(), x)
    bp.fuse_activations_(whole)
    (grad,) = torch.autograd.grad(whole["mlp"](x).sum(), x)
    assert torch.equal(grad, wanted)
    torch.compiler.reset()
    run = torch.compile(whole["mlp"], fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (3, 6):
            y = torch.randn(rows, 64, dtype=torch.bfloat16)
            run(y)
            assert torch.equal(takes(lambda y=y: run(y), 3), whole["mlp"](y))


def test_a_factor_of_another_shape_or_dtype() -> None:
    """Broadcast and type promotion work as in the unfused operators."""
    weight = bp.quantize_tensor(torch.randn(96, 64).bfloat16(), bp.preset("int4-g32"))
    x = torch.randn(3, 64).bfloat16()
    for times in (torch.randn(96).bfloat16(), torch.randn(3, 96)):
        y = linear_then(x, weight, None, "silu", times)
        assert torch.equal(y, nn.functional.silu(nn.functional.linear(x, weight)) * times)
