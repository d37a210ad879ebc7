"""Recipes: which rule applies to a weight, ties, and what is refused; plans and their differences."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import json
import sys
from types import MappingProxyType
from typing import Any

import pytest

from bitport.errors import RecipeError, SchemeError
from bitport.schemes import KINDS, Choice, Plan, Recipe, Rule, Target, preset


def target(name: str, kind: str = "linear", storage: str | None = None, shape: tuple[int, ...] = (8, 8)) -> Target:
    return Target(name, "weight", kind, shape, storage or name)


MODEL = [
    target("embed", "embedding", "tied"),
    target("layers.0.attn.q"),
    target("layers.0.attn.o"),
    target("layers.0.mlp.up"),
    target("layers.0.mlp.experts", "experts", shape=(4, 8, 8)),
    target("layers.1.attn.q"),
    target("conv", "conv"),
    target("mystery", "other"),
    target("head", "linear", "tied"),
]


def chosen(recipe: Any, targets: list[Target] | None = None) -> dict[str, str]:
    plan = Recipe.of(recipe).resolve(MODEL if targets is None else targets)
    return {choice.name.removesuffix(".weight"): str(choice.scheme) for choice in plan.quantized}


UNTIED = [t for t in MODEL if t.storage != "tied"]


def test_a_name_alone_is_for_linear_experts_and_attention() -> None:
    assert set(chosen("int4", UNTIED)) == {t.module for t in UNTIED if t.kind in ("linear", "experts")}
    assert set(chosen("int4", [target(kind, kind) for kind in KINDS])) == {"linear", "experts", "attention"}


def test_the_first_rule_that_fits_decides() -> None:
    got = chosen([("layers.0.attn.*", "int8"), ("layers.*", "int4"), ("*.q", "nf4")][:2], UNTIED)
    assert got["layers.0.attn.q"] == got["layers.0.attn.o"] == "int8"
    assert got["layers.0.mlp.up"] == got["layers.1.attn.q"] == "int4"


def test_a_rule_that_comes_too_late_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"rule 'layers.0.\*' decides nothing: .* put it before '"):
        Recipe.of({"*": "int8", "layers.0.*": "int4"}).resolve(UNTIED)
    known = [target for target in UNTIED if target.kind != "other"]
    assert chosen({"layers.*": "int4", "*.q": "int8", "conv": "int8", "*": "skip"}, known)["layers.0.attn.q"] == "int4"


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        pytest.param("layers.1.*", {"layers.1.attn.q"}, id="glob"),
        pytest.param("*.q", {"layers.0.attn.q", "layers.1.attn.q"}, id="glob-end"),
        pytest.param("layers.?.attn.q", {"layers.0.attn.q", "layers.1.attn.q"}, id="glob-one"),
        pytest.param("layers.[1-9].*", {"layers.1.attn.q"}, id="glob-range"),
        pytest.param("layers.0.mlp.up.weight", {"layers.0.mlp.up"}, id="parameter-name"),
        pytest.param(
            r"re:layers\.\d+\.attn\.[qo]", {"layers.0.attn.q", "layers.0.attn.o", "layers.1.attn.q"}, id="regex"
        ),
        pytest.param(r"re:.*attn.*", {"layers.0.attn.q", "layers.0.attn.o", "layers.1.attn.q"}, id="regex-part"),
    ],
)
def test_patterns(match: str, fits: set[str]) -> None:
    assert set(chosen({match: "int8"}, UNTIED)) == fits


def test_a_regex_must_fit_the_whole_name() -> None:
    with pytest.raises(RecipeError, match="fits no weight"):
        chosen({"re:attn": "int8"}, UNTIED)


def test_patterns_mind_capitals() -> None:
    with pytest.raises(RecipeError, match="fits no weight"):
        chosen({"Layers.*": "int8"}, UNTIED)


def test_globs_fit_what_fnmatch_says() -> None:
    """Globs that match a single name, with wildcards only in brackets, are looked up instead of matched."""
    names = ["".join(parts) for parts in itertools.product(["a", "b]", "[", "*"], repeat=2)]
    for parts in itertools.product(["", "a", "b]", "[", "[!", "[*]", "[[]", "[a-c]", "*"], repeat=3):
        match = "".join(parts)
        fits = {name for name in names if any(fnmatch.fnmatchcase(each, match) for each in (name, f"{name}.weight"))}
        assert {name for name in names if Rule(match, "int8").fits(target(name))} == fits, match


def test_a_rule_for_each_weight_takes_as_many_steps_as_there_are_weights() -> None:
    """Not quadratic in their number: recipes of `mixed` have a rule for each weight."""

    def calls(weights: int) -> int:
        targets = [target(f"layers.{at}.p[0]") for at in range(weights)]
        rules = tuple(Rule(glob.escape(each.name), "int8", ("linear",)) for each in targets)
        count = 0

        def counts(*_: Any) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counts)
        try:
            plan = Recipe((Rule("layers.0.*", "skip"), *rules[1:], rules[0])).resolve(targets)
        finally:
            sys.setprofile(before)
        assert len(plan.quantized) == weights - 1
        return count

    calls(2)
    assert calls(256) < 5 * calls(64)


def test_skip_leaves_a_weight_with_a_reason() -> None:
    plan = Recipe.of([("*.o", "skip"), ("layers.*", "int8")]).resolve(UNTIED)
    assert plan["layers.0.attn.o.weight"] == Choice("layers.0.attn.o.weight", None, "rule '*.o' says skip")
    assert {choice.name for choice in plan.skipped} == {"layers.0.attn.o.weight", "conv.weight", "mystery.weight"}
    assert "no rule fits this conv weight" in plan["conv.weight"].reason
    assert "unknown type" in plan["mystery.weight"].reason


def test_a_router_is_called_one() -> None:
    """Most models have the router as an nn.Linear, so "unknown type" would be a wrong reason."""
    routers = [Target("mlp.gate", "weight", "other", (4, 64), "1"), Target("mlp.odd", "weight", "other", (4, 64), "2")]
    plan = Recipe.of({"*": "int8"}).resolve([*UNTIED, *routers])
    assert plan["mlp.gate.weight"].reason == "no rule fits this router; a rule with its name quantizes it"
    assert plan["mlp.odd.weight"].reason == "no rule fits this weight of a module of unknown type"


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.gate.weight"])
@pytest.mark.parametrize("scheme", ["int8", "skip"])
def test_a_rule_with_its_name_fits_a_router(name: str, scheme: str) -> None:
    """It fitted no weight, an error, without ("other",)."""
    router = Target("mlp.gate", "weight", "other", (4, 64), "1")
    choice = Recipe.of({name: scheme, "*": "int4"}).resolve([*UNTIED, router])["mlp.gate.weight"]
    assert (choice.scheme, repr(name) in choice.reason) == (None if scheme == "skip" else preset(scheme), True)


@pytest.mark.parametrize(
    "rule", [("*.gate", "int8"), ("re:.*gate", "int8"), ("mlp.gate", "int8", ("linear",)), ("mystery", "int8")], ids=str
)
def test_other_rules_fit_none(rule: tuple[Any, ...]) -> None:
    """A module that is not known may be unable to compute with a quantized weight, even one that is named."""
    router = Target("mlp.gate", "weight", "other", (4, 64), "1")
    with pytest.raises(RecipeError, match="fits no weight"):
        Recipe.of([rule]).resolve([*UNTIED, router])


def test_what_a_recipe_is_read_from() -> None:
    rules = Recipe((Rule("*.o", "skip"), Rule("*", "int8")))
    assert Recipe.of(MappingProxyType({"*.o": "skip", "*": "int8"})) == rules
    assert Recipe.of([("*.o", "skip", None), Rule("*", "int8")]) == rules
    assert Rule("*", "int8", ["linear"]) == Rule("*", "int8", ("linear",))
    with pytest.raises(RecipeError, match=r"from int; give .* a dict \{pattern: scheme\}, a sequence of rules"):
        Recipe.of(7)  # type: ignore[arg-type]


def test_reasons_of_a_scheme_by_its_name_speak_of_no_rule() -> None:
    """The user wrote no rule."""
    router = Target("mlp.gate", "weight", "other", (4, 64), "1")
    plan = Recipe.of("int8").resolve([*UNTIED, target("embed", "embedding"), router])
    assert plan["layers.0.attn.q.weight"].reason == "the scheme for all linear layers"
    assert plan["layers.0.mlp.experts.weight"].reason == "the scheme for all experts"
    left = "a scheme given by name leaves {} as they are"
    assert plan["conv.weight"].reason == left.format("convolutions") + "; a rule for them quantizes them"
    assert plan["embed.weight"].reason == left.format("embeddings") + "; a rule for them quantizes them"
    assert plan["mlp.gate.weight"].reason == left.format("routers") + "; a rule with its name quantizes it"
    assert plan["mystery.weight"].reason == left.format("weights of modules of unknown type")


def test_kinds_narrow_a_rule() -> None:
    assert set(chosen(Rule("*", "int8", ("experts",)), UNTIED)) == {"layers.0.mlp.experts"}
    assert "mystery" not in chosen({"*": "int8"})
    assert set(chosen(Rule("*", "int8", ("other",)))) == {"mystery"}


def test_convolutions_are_weight_only() -> None:
    plan = Recipe.of({"*": "int8-dyn"}).resolve(UNTIED)
    assert plan["conv.weight"].scheme is None
    assert "convolutions are weight-only; int8-dyn rounds its input" in plan["conv.weight"].reason
    assert chosen({"conv": "int8-dyn-wo"}, UNTIED) == {"conv": preset("int8-dyn-wo").name}


# -- tied weights ----------------------------------------------------------------------------------------------------


def test_both_names_of_a_tied_weight() -> None:
    assert chosen({"embed": "int8", "head": "int8"}) == {"embed": "int8", "head": "int8"}


@pytest.mark.parametrize("name", ["embed", "head"])
def test_one_name_of_a_tied_weight_leaves_both(name: str) -> None:
    other = {"embed": "head", "head": "embed"}[name]
    plan = Recipe.of({name: "int8", "layers.*": "int4"}).resolve(MODEL)
    assert plan[f"{name}.weight"].scheme is None
    assert (
        plan[f"{name}.weight"].reason
        == f"tied to {other}.weight, which stays as it is; a rule for that one quantizes both"
    )


def test_two_schemes_for_a_tied_weight_are_a_conflict() -> None:
    with pytest.raises(
        RecipeError, match=r"embed.weight and head.weight are one tied weight.*embed.weight: int8, head.weight: int4"
    ):
        chosen({"embed": "int8", "head": "int4"})


# -- refused ---------------------------------------------------------------------------------------------------------


def test_a_rule_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(
        RecipeError,
        match=r"rule 'heat' \(kinds: linear, .*, recurrent\) fits no weight; the model has head \(linear\), .* 1 more",
    ):
        chosen([("heat", "int8"), ("*", "int4")])
    with pytest.raises(RecipeError, match=r"kinds: attention\) fits no weight"):
        chosen(Rule("*", "int8", ("attention",)))


def test_a_rule_for_other_kinds_says_which_it_would_fit() -> None:
    """For instance a scheme for linear layers on a model of convolutions alone."""
    convolutions = [target for target in MODEL if target.kind == "conv"]
    with pytest.raises(RecipeError, match=r"^int4, a scheme .*'conv'\): \[\('\*', 'int4', \('conv',\)\)\] takes these"):
        chosen("int4", convolutions)
    assert chosen([("*", "int4", ("conv",))], convolutions) == {"conv": "int4"}
    with pytest.raises(RecipeError) as caught:
        chosen({"nowhere": "int4"}, convolutions)
    assert "would fit" not in str(caught.value)
    with pytest.raises(
        RecipeError, match=r"would fit weights of other kinds \('other'\): \[\('mystery', 'int4', \('other',\)\)\]"
    ):
        chosen({"mystery": "int4"})
    with pytest.raises(RecipeError, match=r"the model has mystery\.weight \(other\)$"):
        chosen("int4", [target for target in MODEL if target.kind == "other"])


def test_a_regular_expression_that_is_given_as_a_glob_is_recognized() -> None:
    with pytest.raises(RecipeError, match=r"It is a glob; 're:\.\*mlp\.\*' would fit some"):
        chosen({".*mlp.*": "int4"})


def test_a_part_of_the_model_that_is_given_as_a_weight_is_recognized() -> None:
    with pytest.raises(RecipeError, match=r"A pattern is for whole names; 'layers.0.attn.\*' would fit those that lie"):
        chosen({"layers.0.attn": "int8", "*": "int4"}, UNTIED)

    with pytest.raises(RecipeError) as caught:
        chosen({"layers.0.att": "int8", "*": "int4"}, UNTIED)
    assert "would fit" not in str(caught.value)


@pytest.mark.parametrize(("part", "whole"), [("q", "*.q"), ("attn", "*.attn.*")])
def test_a_part_of_a_name_is_recognized(part: str, whole: str) -> None:
    with pytest.raises(RecipeError) as caught:
        chosen({part: "int8", "*": "int4"}, UNTIED)
    assert str(caught.value).endswith(f". A pattern is for whole names; {whole!r} would fit some")
    assert "int8" in chosen({whole: "int8", "layers.*": "int4"}, UNTIED).values()


def test_a_model_without_weights_is_an_error() -> None:
    with pytest.raises(RecipeError, match="nothing to quantize"):
        chosen("int8", [])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(lambda: Rule("*", "int99"), SchemeError, "unknown scheme 'int99'", id="scheme"),
        pytest.param(lambda: Rule("re:(", "int8"), RecipeError, "no regular expression", id="regex"),
        pytest.param(
            lambda: Rule("*", "int8", ("liner",)), RecipeError, r"unknown kinds \['liner'\]; known: linear", id="kinds"
        ),
        pytest.param(lambda: Rule("*", "int8", "linear"), RecipeError, "kinds", id="kinds-as-text"),
        pytest.param(lambda: Recipe(()), RecipeError, "at least one rule", id="empty"),
        pytest.param(lambda: Recipe.of([]), RecipeError, "at least one rule", id="empty-list"),
        pytest.param(lambda: Recipe.of(3), RecipeError, "cannot read a recipe from int", id="number"),
        pytest.param(lambda: Recipe.of(None), RecipeError, "cannot read a recipe from NoneType", id="nothing"),
        pytest.param(lambda: Recipe.of([("a",)]), RecipeError, "rule", id="half-a-pair"),
        pytest.param(lambda: Recipe.of([3]), RecipeError, "rule", id="no-pair"),
        pytest.param(lambda: Recipe.of({"a": 3}), RecipeError, "scheme", id="scheme-as-a-number"),
        pytest.param(lambda: Recipe.of({3: "int8"}), RecipeError, "match|name", id="name-as-a-number"),
    ],
)
def test_what_is_no_recipe(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# -- JSON ------------------------------------------------------------------------------------------------------------

RECIPE = Recipe.of([Rule("*.o", "skip"), Rule(r"re:.*\.q", "int4-g32", ("linear",)), ("*", preset("int8"))])


def test_json_both_ways() -> None:
    assert Recipe.from_json(RECIPE.to_json()) == RECIPE


def test_json_written_by_hand() -> None:
    rules = '[{"match": "head", "scheme": "skip"}, {"match": "*", "scheme": "int4-g32", "kinds": ["linear"]}]'
    text = f'{{"version": 1, "rules": {rules}}}'
    assert Recipe.from_json(text) == Recipe.of([("head", "skip"), Rule("*", "int4-g32", ("linear",))])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="list"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("9" * 5000, id="a-long-number"),
        pytest.param("{}", id="no-version"),
        pytest.param('{"version": 2, "rules": []}', id="newer-version"),
        pytest.param('{"version": 1}', id="no-rules"),
        pytest.param('{"version": 1, "rules": []}', id="no-rule"),
        pytest.param('{"version": 1, "rules": {}}', id="rules-as-an-object"),
        pytest.param('{"version": 1, "rules": 3}', id="rules-as-a-number"),
        pytest.param('{"version": 1, "rules": [3]}', id="rule-as-a-number"),
        pytest.param('{"version": 1, "rules": [{}]}', id="rule-of-nothing"),
        pytest.param('{"version": 1, "rules": [{"match": "*"}]}', id="no-scheme"),
        pytest.param('{"version": 1, "rules": [{"match": 3, "scheme": "int8"}]}', id="match-as-a-number"),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": "int99"}]}', id="no-such-scheme"),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": 3}]}', id="scheme-as-a-number"),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kind": "linear"}]}', id="unknown-key"),
        pytest.param(
            '{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kinds": ["liner"]}]}', id="unknown-kind"
        ),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kinds": 3}]}', id="kinds-as-a-number"),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kinds": []}]}', id="no-kinds"),
        pytest.param('{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kinds": [[], 1]}]}', id="no-texts"),
        pytest.param('{"version": 1, "rules": [{"match": "re:(", "scheme": "int8"}]}', id="no-expression"),
        pytest.param('{"version": 1, "rules": [{"match": "re:a{' + 20 * "9" + '}", "scheme": "int8"}]}', id="repeated"),
        pytest.param(
            json.dumps({"version": 1, "rules": [{"match": "re:" + "(" * 20_000 + ")" * 20_000, "scheme": "int8"}]}),
            id="deep-expression",
        ),
        pytest.param(
            '{"version": 1, "more": 1, "rules": [{"match": "*", "scheme": "int8"}]}', id="unknown-key-outside"
        ),
    ],
)
def test_what_is_no_recipe_file(text: str) -> None:
    with pytest.raises((RecipeError, SchemeError)):
        Recipe.from_json(text)


@pytest.mark.parametrize("text", ['{"*": "int4"}', '[["*", "int4"]]', '{"version": 1, "rules": {"*": "int4"}}'])
def test_the_form_that_python_takes_is_told_what_a_file_has(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_json(text)
    given, example = str(caught.value).split(" is no recipe; one is ")
    assert given == repr(text)
    assert Recipe.from_json(example) == Recipe.of({"*": "int4"})


@pytest.mark.parametrize("more", [{}, {"extends": "base.json"}])
def test_a_newer_recipe_file_asks_for_a_newer_bitport(more: dict[str, str]) -> None:
    """Whatever else is unknown in it."""
    with pytest.raises(RecipeError, match=r"recipe has version 2, of a later bitport; .* up to 1: upgrade bitport"):
        Recipe.from_json(json.dumps({"version": 2, "rules": [], **more}))


# -- plans -----------------------------------------------------------------------------------------------------------


def test_plan_json_both_ways() -> None:
    plan = RECIPE.resolve(UNTIED)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(json.loads(plan.to_json())) == len(UNTIED)


def test_plan_by_name() -> None:
    plan = RECIPE.resolve(UNTIED)
    assert plan["conv.weight"].scheme == preset("int8")
    with pytest.raises(KeyError, match="nope"):
        plan["nope"]


def test_a_plan_is_a_recipe() -> None:
    """Whatever the kinds of its weights, tied or not, and with characters that mean something in a glob."""
    odd = [*MODEL, target("list.[0].*"), target("list.[1].*", "other"), Target("", "weight", "linear", (8, 8), "root")]
    recipe = [("head", "int8"), ("embed", "int8"), ("*.o", "skip"), ("*", "int4-g32", KINDS)]
    plan = Recipe.of(recipe).resolve(odd)
    again = Recipe.of(plan).resolve(odd)
    assert plan.diff(again) == []
    assert {choice.name for choice in again.skipped} == {"layers.0.attn.o.weight"}
    assert Recipe.from_json(Recipe.of(plan).to_json()).resolve(odd) == again


def test_a_plan_for_another_model_is_refused() -> None:
    plan = Recipe.of({"*": "int8"}).resolve(UNTIED)
    with pytest.raises(RecipeError, match=r"rule 'layers.1.attn.q.weight' .* fits no weight; the model has "):
        Recipe.of(plan).resolve([each for each in UNTIED if each.module != "layers.1.attn.q"])
    assert Recipe.of(plan).resolve([*UNTIED, target("more")])["more.weight"].scheme is None


def test_a_recipe_is_shown_as_its_rules() -> None:
    recipe = Recipe.of([("*.o", "skip"), ("re:l.*", "int4-g32", ("experts", "other")), ("*", "int8")])
    assert str(recipe) == repr(recipe) == "*.o: skip\nre:l.*: int4-g32 (experts, other)\n*: int8"
    assert repr(Recipe.of("int4")) == "*: int4 (linear, experts, attention)"


def test_a_plan_is_no_list_to_search() -> None:
    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    plan = Plan(tuple(Choice(Name(at), None, "") for at in range(100)))
    assert all(plan[str(at)].name == str(at) for at in range(100))
    assert Name.compared <= 300


def test_the_difference_of_two_plans() -> None:
    first = Recipe.of({"*": "int8"}).resolve(UNTIED)
    second = Recipe.of([("*.o", "skip"), ("*.up", "int4"), ("*", "int8")]).resolve([*UNTIED[:-1], target("extra")])
    assert first.diff(first) == []
    assert first.diff(second) == [
        "layers.0.attn.o.weight: int8 -> skip",
        "layers.0.mlp.up.weight: int8 -> int4",
        "mystery.weight: skip -> absent",
        "extra.weight: absent -> int8",
    ]


def test_two_schemes_without_a_name_differ() -> None:
    """Two schemes named 'custom' need not be equal."""
    import dataclasses

    one = dataclasses.replace(
        preset("int4-g32"), weight=dataclasses.replace(preset("int4-g32").weight, scale="float16")
    )
    two = dataclasses.replace(one, weight=dataclasses.replace(one.weight, block=(1, 64)))
    assert one.name == two.name == "custom"
    plans = [Plan((Choice("a.weight", scheme, ""),)) for scheme in (one, two)]
    assert len(plans[0].diff(plans[1])) == 1


def test_one_kind_in_a_file_is_a_list() -> None:
    with pytest.raises(RecipeError, match="kinds is a tuple of names, not 'linear'"):
        Recipe.from_json('{"version": 1, "rules": [{"match": "*", "scheme": "int8", "kinds": "linear"}]}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 100_000,
        "[3]",
        '[{"name": "a"}]',
        '[{"name": "a", "scheme": {}, "reason": ""}]',
        '[{"name": ["a"], "scheme": null, "reason": ""}]',
        '[{"name": "a", "scheme": null, "reason": 3}]',
        '[{"name": "a", "scheme": null, "reason": "", "more": 1}]',
    ],
)
def test_what_is_no_plan_file(text: str) -> None:
    with pytest.raises((RecipeError, SchemeError)):
        Plan.from_json(text)
