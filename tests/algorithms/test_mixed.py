"""Mixed bits: the choice against brute force, the costs against their definition, the recipe on whole models."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bitport.algorithms.mixed import COSTS, costs
from bitport.algorithms.mixed_core import Option, choose
from bitport.algorithms.solving import uses_data
from bitport.errors import ArgumentError
from bitport.nn.targets import find_targets
from bitport.schemes import Recipe, Rule


def totals(options: list[list[Option]], chosen: list[int] | tuple[int, ...]) -> tuple[int, float]:
    taken = [each[at] for each, at in zip(options, chosen, strict=True)]
    return sum(each.nbytes for each in taken), math.fsum(each.error for each in taken)


def problem(seed: int, unit: int) -> tuple[list[list[Option]], int]:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    options = [
        [Option(unit * rng.randint(1, 30), rng.random() ** 4) for _ in range(rng.randint(1, 4))] for _ in range(count)
    ]
    low, high = (sum(pick(option.nbytes for option in each) for each in options) for pick in (min, max))
    return options, rng.randint(low, high + unit)


@pytest.mark.parametrize("unit", [1, 128, 4096 * 33])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_choices(seed: int, unit: int) -> None:
    options, budget = problem(seed, unit)
    every = [totals(options, each) for each in itertools.product(*(range(len(each)) for each in options))]
    nbytes, error = totals(options, choose(options, budget))
    assert nbytes <= budget
    assert error == pytest.approx(min(lost for size, lost in every if size <= budget), rel=1e-12, abs=0)


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_unit_keeps_the_budget_and_is_as_good_as_a_little_less(seed: int) -> None:
    """With s states a unit is at most budget / s + 1, and rounding up costs less than one unit for each weight."""
    options, budget = problem(seed, 997)
    nbytes, error = totals(options, choose(options, budget, states=64))
    assert nbytes <= budget
    smaller = budget - len(options) * math.ceil(budget / 64)
    if smaller >= sum(min(option.nbytes for option in each) for each in options):
        assert error <= totals(options, choose(options, smaller))[1] * (1 + 1e-12)


def test_a_coarse_unit_does_not_matter_where_the_budget_holds_everything() -> None:
    """In units of 7 bytes all weights take 5 * 8 + 4 * 7 = 68, though the 446 bytes themselves are only 63."""
    options = [[Option(10, 1.0), Option(60 - at % 2, 0.0)] for at in range(9)]
    assert choose(options, 10**9, states=64) == [1] * 9
    assert choose([[Option(1, 1.0), Option(10**15, 0.0)]], 10**15) == [1]


@pytest.mark.parametrize("wanted", [255, 256, 299])
def test_any_number_of_options(wanted: int) -> None:
    many = [Option(2 if at == wanted else 1, float(at != wanted)) for at in range(300)]
    assert choose([many[: wanted + 1], many], 4) == [wanted, wanted]


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_option_whose_outputs_are_no_numbers_comes_last(error: float) -> None:
    """Such as a float16 model that overflows. The budget is never exceeded."""
    broken, whole = [Option(1, error), Option(2, 0.1)], [Option(1, 0.5), Option(2, 0.1)]
    assert choose([broken, whole], 4) == [1, 1]
    assert choose([broken, whole], 3) == [1, 0]
    assert choose([[Option(5, error), Option(1, error)]], 3) == [1]


def test_outputs_of_zeros() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
    for param in model[1].parameters():
        nn.init.zeros_(param)
    with pytest.raises(ArgumentError, match=r"the data say nothing about 0\.weight"):
        costs(model, CANDIDATES, calibrate=BATCHES)


def test_a_budget_that_nothing_fits() -> None:
    with pytest.raises(ArgumentError, match="smallest choice takes 30 bytes, more than the 29"):
        choose([[Option(10, 1.0), Option(20, 0.0)], [Option(20, 0.0)]], 29)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.q_proj(x)) * self.k_proj(x))


class Model(nn.Module):
    """``one.weight`` and ``two.weight`` are tied; ``loud`` counts a hundred times as much as ``quiet``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.two.weight = self.one.weight
        self.quiet, self.loud = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(self.blocks(x)))
        return 0.01 * self.quiet(x) + self.loud(x)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(3)
    return Model()


BATCHES = list(torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1)))
CANDIDATES = ("int2-g32", "int4-g32", "int8")


def scheme_of(recipe: Recipe, model: nn.Module) -> dict[str, str]:
    return {choice.name: str(choice.scheme) for choice in recipe.resolve(find_targets(model)).quantized}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
def test_the_budget_holds_and_what_counts_gets_the_bits(model: Model, cost: str, algorithm: str) -> None:
    before = copy.deepcopy(model.state_dict())
    found = costs(model, CANDIDATES, calibrate=BATCHES, cost=cost, algorithm=algorithm)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    last = math.inf
    for bits in (3.3, 4.0, 5.3, 7.0, 9.0):
        recipe = found.recipe(bits=bits)
        other = copy.deepcopy(model)
        data = BATCHES if uses_data(algorithm, recipe) else None
        report = bitport.quantize_(other, recipe, algorithm=algorithm, calibrate=data)
        unique = {id(param): param.nbytes for param in other.parameters() if isinstance(param, bitport.QTensor)}
        assert 8 * sum(unique.values()) <= bits * found.weights
        assert len(report.quantized) == 10
        assert other.one.weight is other.two.weight
        schemes = scheme_of(recipe, model)
        lost = sum(
            each[[str(scheme) for scheme in found.candidates].index(schemes[group[0].name])].error
            for group, each in zip(found.groups, found.options, strict=True)
        )
        assert lost <= last
        last = lost
        assert Recipe.from_json(recipe.to_json()) == recipe
    assert set(schemes.values()) == {"int8"}


@pytest.mark.parametrize("cost", ["kl", "fisher"])
def test_loud_before_quiet(model: Model, cost: str) -> None:
    schemes = scheme_of(bitport.mixed(model, CANDIDATES, bits=5.0, calibrate=BATCHES, cost=cost), model)
    order = [str(each) for each in CANDIDATES]
    assert order.index(schemes["loud.weight"]) > order.index(schemes["quiet.weight"])


def test_the_cost_is_what_it_says(model: Model) -> None:
    """For one weight, in float64: the cost at the model's output, and at the weight's own output."""
    changed = copy.deepcopy(model)
    bitport.quantize_(changed, {"loud": "int2-g32"})
    x = torch.cat(BATCHES)
    exact, other = model(x).double().detach(), changed(x).double().detach()
    expected = {"kl": float((exact - other).square().sum() / exact.square().sum())}
    hidden, weight = (each.double().detach() for each in (model.two(model.one(model.blocks(x))), model.loud.weight))
    rounded = changed.loud.weight.dequantize(torch.float32).double()
    signal, noise = ((hidden @ each.t()).square().sum() for each in (weight, weight - rounded))
    expected["output"] = float(noise / signal)
    for cost, value in expected.items():
        found = costs(model, CANDIDATES, calibrate=BATCHES, cost=cost, sample=3)
        at = [group[0].name for group in found.groups].index("loud.weight")
        assert found.options[at][0].error == pytest.approx(value, rel=1e-4)


class Speaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> object:
        return type("Output", (), {"logits": self.head(x)})()


def test_predictions_are_compared_by_kl() -> None:
    model, x = Speaking(), torch.randn(2, 9, 32)
    found = costs(model, ["int2-g32"], calibrate=[x], cost="kl")
    changed = copy.deepcopy(model)
    bitport.quantize_(changed, "int2-g32")
    p, q = (each(x).logits.double().log_softmax(-1).detach() for each in (model, changed))  # type: ignore[attr-defined]
    assert found.options[0][0].error == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


def test_what_hardly_moves_the_predictions_is_measured_too() -> None:
    """Log probabilities near -8 have errors e of a few roundings, and their differences d are near sqrt(2 KL): relative
    to the KL, as in tests/evaluate/test_divergence.py, that is 2 e / d. As p (log p - log q), each term would have an
    error p e, and the sum one larger than itself."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 4096), torch.randn(64, 32)
    given = nn.Module()
    given.head, given.forward = model, lambda x: SimpleNamespace(logits=0.1 * model(x))
    found = costs(given, ["int8"], calibrate=[x], cost="kl")
    exact = 0.1 * model(x)
    bitport.quantize_(given, "int8")
    p, q = (logits.double().log_softmax(-1).detach() for logits in (exact, 0.1 * model(x)))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert kl < 1e-7
    assert found.options[0][0].error == pytest.approx(kl, rel=2 * (4 * 8 * 2**-24) / math.sqrt(2 * kl))


def test_weights_together_and_rules(model: Model) -> None:
    found = costs(
        model,
        CANDIDATES,
        calibrate=BATCHES,
        rules=[Rule("loud", "int4-g32"), Rule("quiet", "skip")],
        together=[("*.q_proj", "*.k_proj")],
    )
    names = [{target.name for target in group} for group in found.groups]
    assert {f"blocks.0.{name}.weight" for name in ("q_proj", "k_proj")} in names
    assert {"one.weight", "two.weight"} in names
    assert len(names) == 5
    for bits in (3.5, 4.0, 5.0, 6.0):
        schemes = scheme_of(found.recipe(bits=bits), model)
        assert schemes["blocks.1.q_proj.weight"] == schemes["blocks.1.k_proj.weight"]
        assert schemes["loud.weight"] == "int4-g32"
        assert "quiet.weight" not in schemes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"bits": 3.0, "nbytes": 100}, "either bits= or nbytes=", id="two sizes"),
        pytest.param({}, "either bits= or nbytes=", id="no size"),
        pytest.param({"bits": 1.0}, r"smallest choice takes 2\.\d\d bits .* the 1.0 that", id="too small"),
        pytest.param({"nbytes": 100}, "smallest choice .* more than the 100", id="too few bytes"),
        pytest.param({"bits": 0.0}, "above 0, not 0.0", id="no bits"),
        pytest.param({"bits": float("nan")}, "above 0, not nan", id="bits that are no number"),
        pytest.param(
            {"bits": 4.0, "cost": "magic"}, "unknown cost 'magic'; known: fisher, kl, output", id="unknown cost"
        ),
        pytest.param({"bits": 4.0, "candidates": ()}, "no candidate", id="no candidate"),
        pytest.param({"bits": 4.0, "candidates": "int4"}, "several schemes, .* not 'int4'", id="one name"),
        pytest.param({"bits": 4.0, "candidates": ("int8-static",)}, "static input scale", id="static"),
        pytest.param({"bits": 4.0, "calibrate": []}, "holds no batch", id="no data"),
        pytest.param({"bits": 4.0, "sample": 0}, "sample=0: .* at least one batch", id="no batch to look at"),
    ],
)
def test_problems(model: Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bitport.mixed(model, **{"calibrate": BATCHES, **options})  # type: ignore[arg-type]


def test_outputs_that_tell_nothing() -> None:
    class Choice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(super().forward(x)).argmax(-1)

    chooses, batches = Choice(nn.Linear(32, 32)), [torch.randn(9, 32)]
    with pytest.raises(ArgumentError, match=r'Choice gives Tensor without floats, .* or cost="output"'):
        bitport.mixed(chooses, ("int4", "int8"), bits=9, calibrate=batches)
    bitport.mixed(chooses, ("int4", "int8"), bits=9, calibrate=batches, cost="output")


@pytest.mark.parametrize("size", [{"bits": 2.1}, {"nbytes": 5000}], ids=["bits", "bytes"])
def test_what_nothing_fits_is_told_before_anything_is_measured(model: Model, size: dict[str, float]) -> None:
    def calibrate(model: nn.Module) -> None:
        raise AssertionError("the model was run")

    with pytest.raises(ArgumentError, match="smallest choice"):
        bitport.mixed(model, calibrate=calibrate, **size)  # type: ignore[arg-type]


def test_its_options_are_those_of_the_costs() -> None:
    own, measured = (inspect.signature(each).parameters for each in (bitport.mixed, costs))
    assert {name: own[name].default for name in measured} == {name: it.default for name, it in measured.items()}
    assert own.keys() - measured.keys() == {"bits", "nbytes"}


def test_a_model_that_is_quantized(model: Model) -> None:
    other = copy.deepcopy(model)
    bitport.quantize_(other, "int4-g32")
    with pytest.raises(ArgumentError, match="quantized already"):
        bitport.mixed(other, bits=4.0, calibrate=BATCHES)


def test_a_weight_of_which_the_data_tell_nothing_and_that_one_scheme_keeps() -> None:
    """Whole numbers up to 127, which int8 holds as they are, and fewer bits do not."""
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    numbers = torch.arange(-63.0, 65.0).reshape(2, 64).repeat(32, 1)
    numbers[:, 0] = 127
    model["unused"].weight = nn.Parameter(numbers)
    with pytest.raises(ArgumentError, match=r"the data say nothing about unused\.weight"):
        costs(model, CANDIDATES, calibrate=BATCHES)


@pytest.mark.parametrize("cost", COSTS)
def test_a_weight_of_which_the_data_tell_nothing(cost: str) -> None:
    """It would get the fewest bits. If other weights share its scheme, they decide; otherwise a rule must."""
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match=r"the data say nothing about unused\.weight: .* or rules for these"):
        costs(model, CANDIDATES, calibrate=BATCHES, cost=cost)
    assert len(costs(model, CANDIDATES, calibrate=BATCHES, cost=cost, rules=[Rule("unused", "int8")]).groups) == 1
    assert len(costs(model, CANDIDATES, calibrate=BATCHES, cost=cost, together=[["*"]]).groups) == 1


@pytest.mark.parametrize("cost", ["kl", "fisher"])
@pytest.mark.parametrize("factor", [torch.nan, torch.inf])
@pytest.mark.parametrize("logits", [False, True])
def test_outputs_that_are_no_numbers(logits: bool, factor: float, cost: str) -> None:
    """Every candidate would cost the same, and each weight would get the first that fits."""
    layer = nn.Linear(64, 64)
    model = nn.ModuleDict({"layer": layer})
    model.forward = lambda x: SimpleNamespace(logits=layer(x) * factor) if logits else layer(x) * factor  # type: ignore
    with pytest.raises(ArgumentError, match="the outputs of the unquantized model hold NaN or infinity on batch 1"):
        bitport.mixed(model, ("int4", "int8"), bits=6, cost=cost, calibrate=[torch.zeros(0, 64), torch.randn(2, 64)])


@pytest.mark.parametrize("cost", ["kl", "fisher"])
def test_words_that_are_ruled_out_cost_nothing(cost: str) -> None:
    """Their logits are -inf both before and after."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 30)

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.head(x).index_fill(-1, torch.arange(3), -math.inf))

    torch.manual_seed(0)
    model = Masked()
    found = [option.error for option in costs(model, CANDIDATES, calibrate=BATCHES, cost=cost).options[0]]
    assert found == sorted(found, reverse=True)
    assert 0 < found[-1] < found[0] < 1


@pytest.mark.parametrize("cost", COSTS)
def test_costs_are_those_of_the_model_in_use(cost: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 8)).train()
    both = (model, copy.deepcopy(model).eval())
    first, second = (costs(each, CANDIDATES, calibrate=BATCHES, cost=cost) for each in both)
    assert first.options == second.options
