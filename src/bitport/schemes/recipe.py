"""A recipe: ordered rules that give each weight of a model its scheme. The first rule that fits decides."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bitport.errors import RecipeError
from bitport.schemes.plan import Choice, Plan
from bitport.schemes.presets import preset
from bitport.schemes.scheme import Scheme, parsed

VERSION = 1
KINDS = ("linear", "experts", "attention", "embedding", "conv", "other")
DEFAULT_KINDS = ("linear", "experts", "attention")
PLURALS = {
    "linear": "linear layers",
    "experts": "experts",
    "attention": "attention projections",
    "embedding": "embeddings",
    "conv": "convolutions",
    "other": "weights of modules of unknown type",
}

# A glob that fits one name: no wildcard, or each in brackets, as glob.escape writes it.
ONE_NAME = re.compile(r"(?:[^*?[]|\[[*?[]\])*")
ROUTER = re.compile(r"(.*\.)?(router(\.\w+)?|gate(\.wg)?)")


def is_router(module: str, shape: Sequence[int]) -> bool:
    """Whether a matrix [N, K] of ``module`` chooses among experts, which are fewer than channels. It is small, decides
    much, and is "other", be it an nn.Linear or, as in most models, not."""
    return shape[0] < shape[1] and ROUTER.fullmatch(module) is not None


@dataclasses.dataclass(frozen=True)
class Target:
    """One weight a recipe may quantize: the parameter ``param`` of the module ``module``.

    ``kind`` is one of :data:`KINDS`; ``transposed`` tells that the weight lies as [.., K, N]. Targets that share one
    parameter (a head tied to its embedding) carry the same ``storage`` label.
    """

    module: str
    param: str
    kind: str
    shape: tuple[int, ...]
    storage: str
    transposed: bool = False
    unfit: str = ""
    """Why no rule can quantize it; empty if rules can."""

    @property
    def name(self) -> str:
        """The name of the parameter in the model, such as "model.layers.0.mlp.up_proj.weight"."""
        return f"{self.module}.{self.param}" if self.module else self.param

    def weight(self, model: nn.Module) -> Tensor:
        return getattr(model.get_submodule(self.module), self.param)

    def put(self, model: nn.Module, weight: Tensor) -> None:
        """Set it under this name only: a tied one has to be put under each of its names."""
        setattr(model.get_submodule(self.module), self.param, weight)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Weights of modules whose name fits ``match`` (a glob; a regular expression after "re:") get ``scheme``
    ("skip": stay as they are). ``kinds`` narrows the rule to kinds of module; None takes every kind but "other" (the
    matrix of a module that bitport does not know, whose forward may not take a quantized one)."""

    match: str
    scheme: Scheme | str
    kinds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise RecipeError(f"a rule's match is a pattern of module names, not {self.match!r}")
        if not isinstance(self.scheme, (str, Scheme)):
            raise RecipeError(
                f"rule {self.match!r}: its scheme is a preset name, a Scheme or 'skip', not {self.scheme!r}"
            )
        if isinstance(self.kinds, str):
            raise RecipeError(f"rule {self.match!r}: kinds is a tuple of names, not {self.kinds!r}")
        if isinstance(self.scheme, str) and self.scheme != "skip":
            object.__setattr__(self, "scheme", preset(self.scheme))
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(self.kinds))
            if not self.kinds:
                raise RecipeError(f"rule {self.match!r}: kinds is empty; leave it out for all kinds, or name some")
            if unknown := set(self.kinds) - set(KINDS):
                raise RecipeError(f"rule {self.match!r}: unknown kinds {sorted(unknown)}; known: {', '.join(KINDS)}")
        if self.match.startswith("re:"):
            try:
                _ = self._pattern
            except re.error as error:
                raise RecipeError(f"rule {self.match!r} is no regular expression: {error}") from error

    @functools.cached_property
    def _name(self) -> str | None:
        """The only name that fits; None where several may."""
        if self.match.startswith("re:") or not ONE_NAME.fullmatch(self.match):
            return None
        return re.sub(r"\[(.)\]", r"\1", self.match)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.match[3:] if self.match.startswith("re:") else fnmatch.translate(self.match))

    def fits(self, target: Target) -> bool:
        """Whether ``target`` is of one of the kinds, and the whole name of its module, or its own, fits the pattern."""
        if target.kind not in (self.kinds or KINDS[:-1]):
            return False
        names = (target.module, target.name)
        return any(map(self._pattern.fullmatch, names)) if self._name is None else self._name in names


@dataclasses.dataclass(frozen=True)
class Recipe:
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not self.rules:
            raise RecipeError("a recipe needs at least one rule")

    @property
    def static(self) -> bool:
        """Whether some rule gives a scheme with a static input scale."""
        return any(isinstance(rule.scheme, Scheme) and rule.scheme.static for rule in self.rules)

    @classmethod
    def of(cls, spec: RecipeLike) -> Recipe:
        """A recipe from what a user may give: a preset name or scheme (for linear layers, attention projections and
        experts; embeddings and convolutions need a rule), a dict ``{pattern: scheme}``, a rule, a sequence of rules,
        (pattern, scheme) pairs and (pattern, scheme, kinds) triples, or a recipe."""
        if isinstance(spec, Recipe):
            return spec
        if isinstance(spec, (str, Scheme)):
            return cls((Rule("*", spec, DEFAULT_KINDS),))
        if isinstance(spec, Rule):
            return cls((spec,))
        if isinstance(spec, Mapping):
            return cls(tuple(Rule(match, scheme) for match, scheme in spec.items()))
        if isinstance(spec, Iterable):
            return cls(tuple(rule if isinstance(rule, Rule) else _rule_of(rule) for rule in spec))
        raise RecipeError(
            f"cannot read a recipe from {type(spec).__name__}; give a preset name, a Scheme, a dict {{pattern: scheme}}"
            f", a sequence of rules or (pattern, scheme) pairs, or a Recipe"
        )

    def resolve(self, targets: Sequence[Target]) -> Plan:
        """What each target gets. Every rule must fit at least one target; tied weights get one decision."""
        if not targets:
            raise RecipeError("nothing to quantize: no Linear, Embedding, Conv, attention or expert weight was found")
        fitting = self._fitting(targets)
        used = set(itertools.chain(*fitting))
        for at, rule in enumerate(self.rules):
            if at not in used:
                what = f"{rule.scheme}, a scheme given by name," if _is_by_name(rule) else f"rule {rule.match!r}"
                raise RecipeError(
                    f"{what} (kinds: {', '.join(rule.kinds or KINDS[:-1])}) fits no weight; "
                    f"the model has {_preview(targets, rule.match)}{_otherwise(targets, rule)}"
                )
        self._check_order(fitting)
        choices = [self._decide(target, fits) for target, fits in zip(targets, fitting, strict=True)]
        return Plan(tuple(_tied(targets, choices)))

    def _fitting(self, targets: Sequence[Target]) -> list[list[int]]:
        """For each target the positions of the rules that fit it, in order. A recipe may have a rule for each weight:
        rules that name one are looked up, and the others alone are tried on every target."""
        several: list[int] = []
        named: dict[str, list[int]] = collections.defaultdict(list)
        for at, rule in enumerate(self.rules):
            (several if rule._name is None else named[rule._name]).append(at)
        found = []
        for target in targets:
            tried = sorted({*several, *named.get(target.module, ()), *named.get(target.name, ())})
            found.append([at for at in tried if self.rules[at].fits(target)])
        return found

    def _check_order(self, fitting: Sequence[Sequence[int]]) -> None:
        """RecipeError for a rule that comes too late, behind one for everything."""
        first = {self.rules[fits[0]] for fits in fitting if fits}
        behind = {at for fits in fitting if fits and self.rules[fits[0]].match == "*" for at in fits[1:]}
        for at in sorted(behind):
            if self.rules[at] not in first:
                raise RecipeError(
                    f"rule {self.rules[at].match!r} decides nothing: the first rule that fits a weight decides, and "
                    "'*' comes before it; put it before '*'"
                )

    def _decide(self, target: Target, fits: Sequence[int]) -> Choice:
        """``fits``: the positions of the rules that fit."""
        if fits:
            rule = self.rules[fits[0]]
            if isinstance(rule.scheme, str):
                return Choice(target.name, None, f"rule {rule.match!r} says skip")
            if 0 in target.shape:
                return Choice(target.name, None, "it is empty")
            if target.unfit:
                return Choice(target.name, None, target.unfit)
            if target.kind == "conv" and rule.scheme.act:
                return Choice(target.name, None, f"convolutions are weight-only; {rule.scheme} rounds its input")
            said = f"the scheme for all {PLURALS[target.kind]}" if _is_by_name(rule) else f"rule {rule.match!r}"
            return Choice(target.name, rule.scheme, said)
        router = is_router(target.module, target.shape)
        if any(map(_is_by_name, self.rules)):
            left = f"a scheme given by name leaves {'routers' if router else PLURALS[target.kind]} as they are"
            more = "" if target.kind == "other" else "; a rule for them quantizes them"
            return Choice(target.name, None, left + more)
        what = f"{target.kind} weight" if target.kind != "other" else "weight of a module of unknown type"
        return Choice(target.name, None, f"no rule fits this {'router' if router else what}")

    def to_json(self) -> str:
        """The recipe file of docs/formats.md, its schemes in full."""
        rules = [
            {
                "match": rule.match,
                "scheme": rule.scheme if isinstance(rule.scheme, str) else rule.scheme.to_dict(),
                "kinds": None if rule.kinds is None else list(rule.kinds),
            }
            for rule in self.rules
        ]
        return json.dumps({"version": VERSION, "rules": rules}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Reads :meth:`to_json`; a rule's scheme may also be a preset name, so that people can write the file."""
        data = parsed(text, "recipe", RecipeError)
        try:
            if not isinstance(data, dict) or "version" not in data:
                raise RecipeError(f"a recipe file is an object with version {VERSION} and rules")
            if data["version"] != VERSION or isinstance(data["version"], bool):
                raise RecipeError(
                    f"recipe version {data['version']!r}; this bitport reads version {VERSION}: upgrade bitport"
                )
            if unknown := set(data) - {"version", "rules"}:
                raise RecipeError(f"recipe: unknown keys {sorted(unknown)}; known: rules, version")
            return cls(tuple(_rule_from(rule) for rule in data["rules"]))
        except (KeyError, TypeError) as error:
            raise RecipeError(f"not a recipe: {error!r}") from error


RecipeLike = (
    str
    | Scheme
    | Recipe
    | Rule
    | Mapping[str, str | Scheme]
    | Sequence[Rule | tuple[str, str | Scheme] | tuple[str, str | Scheme, Sequence[str] | None]]
)
"""What :meth:`Recipe.of` takes, and whatever has a ``recipe``."""


def static_inputs(choices: Iterable[Choice], targets: Mapping[str, Target]) -> dict[Target, str]:
    """How each input with a static scale is rounded; ``targets`` by name."""
    return {targets[choice.name]: choice.scheme.act for choice in choices if choice.scheme and choice.scheme.static}


def _is_by_name(rule: Rule) -> bool:
    """Whether it is what :meth:`Recipe.of` makes of a scheme alone, so that its pattern says nothing to the user."""
    return rule.match == "*" and rule.kinds == DEFAULT_KINDS


def _rule_of(pair: Any) -> Rule:
    if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
        raise RecipeError(f"a rule is (pattern, scheme) or (pattern, scheme, kinds), not {pair!r}")
    return Rule(*pair)


def _rule_from(data: dict[str, Any]) -> Rule:
    if unknown := set(data) - {"match", "scheme", "kinds"}:
        raise RecipeError(f"rule: unknown keys {sorted(unknown)}; known: match, scheme, kinds")
    scheme = data["scheme"]
    return Rule(data["match"], scheme if isinstance(scheme, str) else Scheme.from_dict(scheme), data.get("kinds"))


def _tied(targets: Sequence[Target], choices: list[Choice]) -> list[Choice]:
    """One parameter under several names is quantized once, or not at all: it stays tied."""
    by_storage: dict[str, list[int]] = {}
    for index, target in enumerate(targets):
        by_storage.setdefault(target.storage, []).append(index)
    for group in by_storage.values():
        wanted = {choices[index].scheme for index in group}
        if len(wanted) == 1:
            continue
        names = [choices[index].name for index in group]
        schemes = {scheme for scheme in wanted if scheme is not None}
        if len(schemes) > 1:
            asked = ", ".join(f"{choices[index].name}: {choices[index].scheme or 'skip'}" for index in group)
            raise RecipeError(f"{' and '.join(names)} are one tied weight, but the rules ask for {asked}")
        left = ", ".join(choices[index].name for index in group if choices[index].scheme is None)
        more = "" if any(targets[index].unfit for index in group) else "; a rule for that one quantizes both"
        for index in group:
            if choices[index].scheme is not None:
                reason = f"tied to {left}, which stays as it is{more}"
                choices[index] = Choice(choices[index].name, None, reason)
    return choices


def _otherwise(targets: Sequence[Target], rule: Rule) -> str:
    """What to do where the rule would fit weights of other kinds, or as a regular expression."""
    known = KINDS[:-1] if rule.match == "*" else KINDS
    fits = {target.kind for target in targets if dataclasses.replace(rule, kinds=known).fits(target)}
    if fits:
        kinds = ", ".join(repr(kind) for kind in KINDS if kind in fits)
        wider = f"({rule.match!r}, {str(rule.scheme)!r}, ({kinds},))"
        return f". It would fit weights of other kinds ({kinds}): [{wider}] takes these"
    try:
        expression = dataclasses.replace(rule, match=f"re:{rule.match}")
    except RecipeError:
        return ""
    return f". It is a glob; {expression.match!r} would fit some" if any(map(expression.fits, targets)) else ""


def _preview(targets: Sequence[Target], like: str, limit: int = 8) -> str:
    """Those whose names are closest to ``like``."""
    near = sorted(targets, key=lambda each: -difflib.SequenceMatcher(None, like, each.module).ratio())[:limit]
    names = (target.name if target.kind == "other" else target.module or "(root)" for target in near)
    shown = ", ".join(f"{name} ({target.kind})" for name, target in zip(names, near, strict=True))
    return shown + (f" and {len(targets) - limit} more" if len(targets) > limit else "")
