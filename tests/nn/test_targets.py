"""Which weights of a model are found, with which name and kind: no weight matrix is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import bitport as bp
from bitport.errors import ArgumentError, RecipeError
from bitport.nn import find_targets
from bitport.nn.targets import lie_transposed
from bitport.train import prepare_


class Experts(nn.Module):
    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 16, 8))
        self.is_transposed = transposed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
        self.experts = Experts()
        self.conv1 = nn.Conv1d(8, 4, 3)
        self.conv2 = nn.Conv2d(8, 4, 3)
        self.conv3 = nn.Conv3d(8, 4, 3)
        self.up = nn.ConvTranspose1d(8, 4, 3)
        self.lstm = nn.LSTM(8, 8, proj_size=4, bidirectional=True)
        self.cell = nn.GRUCell(8, 8)
        self.bilinear = nn.Bilinear(4, 4, 2)
        self.table = nn.Parameter(torch.randn(4, 8))
        self.counts = nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight


def test_every_matrix_has_its_kind() -> None:
    assert {target.name: target.kind for target in find_targets(Model())} == {
        "table": "other",
        "embed.weight": "embedding",
        "attention.in_proj_weight": "attention",
        "attention.out_proj.weight": "linear",
        "mlp.0.weight": "linear",
        "mlp.2.weight": "linear",
        "experts.gate_up": "experts",
        "conv1.weight": "conv",
        "conv2.weight": "conv",
        "conv3.weight": "conv",
        "up.weight": "conv",
        **{f"lstm.weight_{each}_l0{back}": "recurrent" for each in ("ih", "hh", "hr") for back in ("", "_reverse")},
        "cell.weight_ih": "recurrent",
        "cell.weight_hh": "recurrent",
        "bilinear.weight": "other",
        "head.weight": "linear",
    }


def test_tied_weights_share_their_storage_label() -> None:
    labels = {target.name: target.storage for target in find_targets(Model())}
    assert labels["embed.weight"] == labels["head.weight"]
    assert len(set(labels.values())) == len(labels) - 1


def test_a_module_used_twice_has_two_names() -> None:
    shared = nn.Linear(8, 8)
    found = find_targets(nn.ModuleDict({"a": shared, "b": shared}))
    assert [target.name for target in found] == ["a.weight", "b.weight"]
    assert found[0].storage == found[1].storage


def test_one_parameter_twice_in_a_module_has_two_names() -> None:
    module = nn.Module()
    module.first = module.second = nn.Parameter(torch.randn(4, 4))
    assert [target.name for target in find_targets(module)] == ["first", "second"]


def test_the_model_itself_may_be_the_layer() -> None:
    (only,) = find_targets(nn.Linear(8, 4))
    assert (only.module, only.name, only.shape) == ("", "weight", (4, 8))


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_lie_transposed(transposed: bool) -> None:
    (only,) = find_targets(Experts(transposed))
    assert (only.kind, only.transposed) == ("experts", transposed)


@pytest.mark.parametrize(
    ("gate_up", "down", "transposed"), [((3, 32, 8), (3, 8, 16), False), ((3, 8, 32), (3, 16, 8), True)]
)
@pytest.mark.parametrize("said", [None, False])
def test_shapes_tell_how_experts_lie(
    gate_up: tuple[int, ...], down: tuple[int, ...], transposed: bool, said: bool | None
) -> None:
    """Experts of Llama 4 are stored as [experts, K, N], and its modules do not say so."""
    model = Experts()
    model.gate_up, model.down = nn.Parameter(torch.randn(gate_up)), nn.Parameter(torch.randn(down))
    if said is None:
        del model.is_transposed
    told = [(target.kind, target.transposed) for target in find_targets(model)]
    assert told == [("experts", transposed and said is None)] * 2


def test_stacks_that_are_no_pair_lie_as_they_do_in_linear_layers() -> None:
    """Gate, up and down separate or in pairs, with widths that could be mistaken for each other."""
    for hidden, width in ((8, 8), (8, 16), (16, 8), (8, 4), (8, 32)):
        assert not lie_transposed([(3, width, hidden), (3, width, hidden), (3, hidden, width)])
        assert not lie_transposed([(3, 2 * width, hidden), (3, hidden, width)])


def test_lazy_modules_have_no_weights_yet() -> None:
    with pytest.raises(ArgumentError, match=r"1\.weight has no shape yet: run the model once"):
        find_targets(nn.Sequential(nn.Linear(4, 8), nn.LazyLinear(4)))


def test_subclasses_are_what_they_derive_from() -> None:
    class Mine(nn.Linear):
        pass

    assert find_targets(Mine(8, 4))[0].kind == "linear"


def test_routers_are_no_linear_layers() -> None:
    """Told by name and shape, as in files, which do not record module types."""
    model = nn.ModuleDict({"router": nn.Linear(32, 4), "gate": nn.Linear(32, 64), "proj": nn.Linear(32, 4)})
    assert {target.module: target.kind for target in find_targets(model)} == {
        "router": "other",
        "gate": "linear",
        "proj": "linear",
    }


class SparseMoe(nn.Module):
    def __init__(self, experts: str) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.add_module(experts, nn.ModuleList(Gated() for _ in range(4)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 32)


@pytest.mark.parametrize("experts", ["experts", "mlps"])
def test_the_gate_of_a_gated_mlp_is_no_router(experts: str) -> None:
    """A third of its weights stayed float. Only the gate of a block of experts chooses among them."""
    model = nn.ModuleDict({"dense": Gated(), "sparse": SparseMoe(experts)})
    kinds = {target.module: target.kind for target in find_targets(model)}
    assert [name for name, kind in kinds.items() if kind != "linear"] == ["sparse.gate"]
    assert len(kinds) == 1 + 5 * 3
    assert {layer.name for layer in bp.quantize_(model, "int4").skipped} == {"sparse.gate.weight"}


def test_attention_with_keys_of_another_size_has_three_matrices() -> None:
    found = find_targets(nn.MultiheadAttention(8, 2, kdim=4, vdim=6))
    assert {target.name: target.kind for target in found} == {
        "q_proj_weight": "attention",
        "k_proj_weight": "attention",
        "v_proj_weight": "attention",
        "out_proj.weight": "linear",
    }


@pytest.mark.parametrize("given", [{}, nn.Linear, torch.ones(2, 2)], ids=["state_dict", "class", "tensor"])
def test_what_is_no_module_is_refused(given: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"a model is a torch.nn.Module, not .* of a pipeline, give the model in it"
    ):
        find_targets(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", [bp.quantize_, prepare_])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_are_rewritten_are_left_as_they_are(verb: Any, kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"table": kind(20, 32, max_norm=1.0), "other": kind(20, 32), "head": nn.Linear(32, 20)})
    model["head"].weight = model["table"].weight
    report = str(verb(model, {"table": "int8", "*": "int8"}))
    assert "max_norm rewrites the rows that are looked up" in report
    assert "tied to table.weight, which stays as it is" in report
    assert "a rule for that one" not in report
    assert type(model["other"].weight.data) is not torch.Tensor  # type: ignore[union-attr]
    assert model["table"](torch.arange(4)[None]).norm(dim=-1).max() < 1.001


def test_recipes_fit_a_model_of_which_parts_are_compiled() -> None:
    """The names that torch.compile gives such a part were the only ones that a rule could match."""

    def build(wrap: Callable[[nn.Module], Any]) -> nn.Module:
        inner = nn.ModuleDict({"a": nn.Linear(64, 32), "b": wrap(nn.Linear(32, 64))})
        return nn.ModuleDict({"inner": wrap(inner), "head": nn.Linear(64, 8)})

    plain, compiled = build(lambda module: module), build(torch.compile)
    rules = [{"inner.a": "int4-g32", "inner.b": "int8", "*": "skip"}, {"inner.*": "int8"}, {"re:inner.[b].*": "int8"}]
    for recipe in [*rules, *(bp.plan(compiled, rule) for rule in rules)]:
        schemes = [[choice.scheme for choice in bp.plan(model, recipe).choices] for model in (plain, compiled)]
        assert schemes[0] == schemes[1]
        assert any(schemes[0])


@pytest.mark.parametrize("name", ["StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"])
def test_standardized_convolutions_of_timm_are_left_as_they_are(name: str) -> None:
    """They were quantized, and the first forward pass ended in an error, since it sees the weight in another shape."""

    def forward(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        weight = conv.weight.reshape(1, conv.out_channels, -1)
        weight = nn.functional.batch_norm(weight, None, None, training=True).reshape_as(conv.weight)
        return nn.functional.conv2d(x, weight, conv.bias)

    model = nn.Sequential(type(name, (nn.Conv2d,), {"forward": forward})(3, 8, 3), nn.Conv2d(8, 16, 3))
    assert [target.kind for target in find_targets(model)] == ["other", "conv"]
    x = torch.randn(1, 3, 8, 8)
    expected = model[0](x)
    report = bp.quantize_(model, {"*": "int8"})
    assert [layer.name for layer in report.quantized] == ["1.weight"]
    assert torch.equal(model[0](x), expected)


HOOKS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "remove_weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "remove_spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "prune.remove": (lambda layer, name: prune.l1_unstructured(layer, name, 0.3), prune.remove),
}
"""What ends it, as a report calls it -> a function that has a weight computed by a hook, and one that ends it."""


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((layer, "weight") for layer in (nn.Linear, nn.Conv1d, nn.ConvTranspose1d, nn.Embedding)),
        (nn.MultiheadAttention, "in_proj_weight"),
        (nn.LSTM, "weight_hh_l0"),
    ],
)
@pytest.mark.parametrize("way_out", HOOKS)
def test_weights_that_a_hook_computes_are_left_with_a_way_out(way_out: str, layer: Any, name: str) -> None:
    """They were only "of unknown type", although the layer is a known one."""
    hook, end = HOOKS[way_out]
    odd = hook(layer(8, 4, *((3,) if layer in (nn.Conv1d, nn.ConvTranspose1d) else ())), name)
    left = [
        choice for choice in bp.plan(nn.ModuleList([odd, nn.Linear(4, 4)]), {"*": "int8"}).choices if not choice.scheme
    ]
    assert left
    assert all(choice.name.startswith(f"0.{name}_") and way_out in choice.reason for choice in left)
    if name == "weight":  # it has no other
        with pytest.raises(RecipeError, match=f"fits no weight.*computed from it.*{way_out}"):
            bp.plan(odd, {"*": "int8"})
    end(odd, name)
    assert all(choice.scheme for choice in bp.plan(odd, {"*": "int8"}).choices)
