"""Costs estimated by gradients: against the distances themselves, and what becomes of the model."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.algorithms import curvature, mixed
from bitport.algorithms.mixed import costs
from bitport.errors import ArgumentError

PROBES = 4000
NEAR = 5 * math.sqrt(2 / PROBES)
"""Five standard errors of a mean of squares of normal numbers."""
BATCHES = list(torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1)))


def errors(model: nn.Module, scheme: str, **options: object) -> dict[str, float]:
    found = costs(model, [scheme], calibrate=BATCHES, **options)  # type: ignore[arg-type]
    return {group[0].name: each[0].error for group, each in zip(found.groups, found.options, strict=True)}


class Speaking(nn.Module):
    """Predicts one of 40 words at each of 5 places, of which each sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 40)

    def forward(self, x: Tensor) -> SimpleNamespace:
        hidden = self.last(torch.tanh(self.first(x))).cumsum(-2)
        return SimpleNamespace(logits=3 * self.head(hidden))


class Plain(Speaking):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).logits


class Experts(nn.Module):
    """The first sees every token, the second those of a sequence from the third on."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 32, 48) / 7)

    def forward(self, x: Tensor) -> Tensor:
        late = (torch.arange(x.shape[-2]) > 1)[:, None]
        return torch.tanh(F.linear(x, self.up[0])) + late * F.linear(x, self.up[1])


@pytest.mark.parametrize("kind", [Speaking, Plain])
def test_small_changes_cost_what_they_move(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """The third order, which the estimate leaves out, is smaller than the second by the size of the change: at eight
    bits that is 1 % or less."""
    torch.manual_seed(0)
    model = kind()
    exact = errors(model, "int8", cost="kl", sample=len(BATCHES))
    monkeypatch.setattr(curvature, "PROBES", PROBES)
    assert errors(model, "int8") == pytest.approx(exact, rel=NEAR)


def test_few_bits_cost_about_what_they_move() -> None:
    """64 probes are off by 18 % for each weight, and by 6 % for the sum of ten. At four bits the rest is of the third
    order."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh())])
    exact, estimated = (errors(model, "int4-g32", sample=4, cost=cost) for cost in ("kl", "fisher"))
    assert sum(estimated.values()) == pytest.approx(sum(exact.values()), rel=0.2)


def test_weights_as_layers_store_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, three in one, and in stacks of experts."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = conv1d(48, 64)
            self.attention = nn.MultiheadAttention(48, 3, batch_first=True)
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.mlp(x)
            return self.experts(self.attention(hidden, hidden, hidden, need_weights=False)[0])

    torch.manual_seed(0)
    model = Layers()
    batches = [each[None] for each in BATCHES]
    exact = costs(model, ["int8"], calibrate=batches, cost="kl", sample=4)
    monkeypatch.setattr(curvature, "PROBES", PROBES)
    estimated = costs(model, ["int8"], calibrate=batches)
    assert len(exact.options) == 4
    for one, other in zip(exact.options, estimated.options, strict=True):
        assert other[0].error == pytest.approx(one[0].error, rel=NEAR)


def test_nothing_of_the_model_changes() -> None:
    """Frozen weights stay frozen, gradients that are there remain, and hooks of an optimizer are not called."""
    model = Speaking()
    model.first.requires_grad_(False)
    model(BATCHES[0]).logits.sum().backward()
    model.head.weight.register_post_accumulate_grad_hook(lambda param: pytest.fail("as in training"))
    before = {name: (param.requires_grad, param.grad) for name, param in model.named_parameters()}
    kept = copy.deepcopy(before), copy.deepcopy(model.state_dict())
    first, second = (errors(model, "int4-g32") for _ in range(2))
    assert first == second
    for name, param in model.named_parameters():
        assert param.grad is before[name][1]
        assert param.requires_grad == before[name][0]
        if param.grad is not None:
            assert torch.equal(param.grad, kept[0][name][1])
    assert all(torch.equal(value, kept[1][name]) for name, value in model.state_dict().items())


def test_gradients_reach_through_quantized_layers() -> None:
    torch.manual_seed(0)
    model = Speaking()
    bitport.quantize_(model, {"head": "int8"})
    rules = [bitport.Rule("head", "int8")]
    assert set(errors(model, "int4-g32", rules=rules)) == {"first.weight", "last.weight"}


def test_models_without_gradients_are_told_before_anything_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sealed(Speaking):
        forward = torch.no_grad()(Speaking.forward)

    with torch.inference_mode():
        model = Speaking()
    with monkeypatch.context() as patched:
        patched.setattr(mixed, "apply", lambda *_, **__: pytest.fail("rounded"))
        with pytest.raises(ArgumentError, match=r"outputs of Sealed have no gradient .*: take cost='kl'"):
            errors(Sealed(), "int4-g32")
        with pytest.raises(ArgumentError, match=r"made in inference mode .*: take cost='kl'"):
            errors(model, "int4-g32")
    assert errors(model, "int4-g32", cost="kl")
