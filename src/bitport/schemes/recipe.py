"""A recipe: ordered rules that assign a scheme to each weight of a model. The first matching rule wins."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fnmatch
import functools
import glob
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import shorten
from typing import Any

from bitport.errors import RecipeError, shortened
from bitport.json_text import check_version, parsed
from bitport.schemes.experts import is_router
from bitport.schemes.plan import Choice, Plan
from bitport.schemes.presets import preset
from bitport.schemes.scheme import Scheme, checked
from bitport.schemes.target import KINDS, Target, bare, by_storage

VERSION = 1
EXAMPLE = '{"version": 1, "rules": [{"match": "*", "scheme": "int4"}]}'
DEFAULT_KINDS = ("linear", "experts", "attention")
PLURALS = {
    "linear": "linear layers",
    "experts": "experts",
    "attention": "attention projections",
    "embedding": "embeddings",
    "conv": "convolutions",
    "recurrent": "recurrent layers",
    "other": "weights of modules of unknown type",
}

# A glob that matches a single name: it has no wildcard, or only ones in brackets, as glob.escape writes them.
ONE_NAME = re.compile(r"(?:[^*?[]|\[[*?[]\])*")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Assign ``scheme`` ("skip": leave unquantized) to weights of modules whose name matches ``match``, a glob or,
    after "re:", a regular expression. ``kinds`` restricts the rule to kinds of weights; None means every kind but
    "other" (a matrix of a module unknown to bitport, whose forward may not support a quantized one), and a router if
    ``match`` is its name."""

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
        if isinstance(self.kinds, str) or not isinstance(self.kinds, Iterable | None):
            raise RecipeError(f"rule {self.match!r}: kinds is a tuple of names, not {self.kinds!r}")
        if isinstance(self.scheme, str) and self.scheme != "skip":
            object.__setattr__(self, "scheme", preset(self.scheme))
        if self.kinds is not None:
            object.__setattr__(self, "kinds", tuple(self.kinds))
            if not self.kinds:
                raise RecipeError(f"rule {self.match!r}: kinds is empty; leave it out for all kinds, or name some")
            if unknown := [kind for kind in self.kinds if kind not in KINDS]:
                raise RecipeError(f"rule {self.match!r}: unknown kinds {unknown}; known: {', '.join(KINDS)}")
        if self.match.startswith("re:"):
            try:
                _ = self._pattern
            except (re.error, OverflowError, RecursionError) as error:
                raise RecipeError(f"rule {self.match!r} is no regular expression: {error}") from error

    @functools.cached_property
    def _name(self) -> str | None:
        """The only name that matches; None if several may."""
        if self.match.startswith("re:") or not ONE_NAME.fullmatch(self.match):
            return None
        return bare(re.sub(r"\[(.)\]", r"\1", self.match))

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.match[3:] if self.match.startswith("re:") else fnmatch.translate(self.match))

    def fits(self, target: Target) -> bool:
        """Whether ``target`` has one of the kinds, and the pattern matches its full name or that of its module."""
        named = self.kinds is None and self._name is not None and is_router(target.module, target.shape)
        if not named and target.kind not in (self.kinds or KINDS[:-1]):
            return False
        if self._name is not None:
            return self._name in target.names
        return any(map(self._pattern.fullmatch, target.names))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which weights get which scheme: the first of ``rules`` that fits a weight decides. Weights that fit none stay
    as they are; a rule that fits no weight of the model is an error."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not self.rules:
            raise RecipeError("a recipe needs at least one rule")
        if wrong := [rule for rule in self.rules if not isinstance(rule, Rule)]:
            raise RecipeError(f"a recipe is made of bitport.Rule, not {wrong[0]!r}; Recipe.of takes other forms too")

    @property
    def static(self) -> bool:
        """Whether some rule gives a scheme with a static input scale."""
        return any(isinstance(rule.scheme, Scheme) and rule.scheme.static for rule in self.rules)

    @classmethod
    def of(cls, spec: RecipeLike) -> Recipe:
        """A recipe from any accepted form: a preset name or scheme (for linear layers, attention projections and
        experts; embeddings, convolutions and recurrent layers need a rule), a dict ``{pattern: scheme}``, a rule, a
        sequence of rules, (pattern, scheme) pairs and (pattern, scheme, kinds) triples, a plan (a rule for each weight
        that it names), or a recipe."""
        if isinstance(spec, Recipe):
            return spec
        if isinstance(spec, Plan):
            return cls(tuple(Rule(glob.escape(each.name), each.scheme or "skip", KINDS) for each in spec.choices))
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
            f", a sequence of rules or (pattern, scheme) pairs, a Plan, or a Recipe"
        )

    def __str__(self) -> str:
        """One line per rule: ``pattern: scheme``, and the kinds that it is limited to."""
        limits = ("" if rule.kinds in (None, KINDS) else f" ({', '.join(rule.kinds or ())})" for rule in self.rules)
        return "\n".join(f"{rule.match}: {rule.scheme}{limit}" for rule, limit in zip(self.rules, limits, strict=True))

    __repr__ = __str__  # shown as the value of a notebook cell

    def resolve(self, targets: Sequence[Target]) -> Plan:
        """The plan for ``targets``. Every rule must match at least one target; tied weights get one joint decision."""
        if not targets:
            raise RecipeError(
                "nothing to quantize: no Linear, Embedding, Conv, recurrent, attention or expert weight was found"
            )
        fitting = self._fitting(targets)
        used = set(itertools.chain(*fitting))
        for at, rule in enumerate(self.rules):
            if at not in used:
                what = f"{rule.scheme}, a scheme given by name," if _is_by_name(rule) else f"rule {rule.match!r}"
                raise RecipeError(
                    f"{what} (kinds: {', '.join(rule.kinds or KINDS[:-1])}) fits no weight; "
                    f"the model has {_preview(targets, rule.match)}{_otherwise(targets, rule) or _noted(targets, rule)}"
                )
        self._check_order(fitting)
        choices = [self._decide(target, fits) for target, fits in zip(targets, fitting, strict=True)]
        return Plan(tuple(_tied(targets, choices)))

    def _fitting(self, targets: Sequence[Target]) -> list[list[int]]:
        """For each target, the indices of the rules that match it, in order. A recipe may have a rule per weight, so
        rules for a single name are looked up in a dict, and only the others are tried on every target."""
        several: list[int] = []
        named: dict[str, list[int]] = collections.defaultdict(list)
        for at, rule in enumerate(self.rules):
            (several if rule._name is None else named[rule._name]).append(at)
        found = []
        for target in targets:
            tried = sorted({*several, *itertools.chain(*(named.get(name, ()) for name in target.names))})
            found.append([at for at in tried if self.rules[at].fits(target)])
        return found

    def _check_order(self, fitting: Sequence[Sequence[int]]) -> None:
        """Raise RecipeError for a rule that never decides because '*' comes before it."""
        first = {self.rules[fits[0]] for fits in fitting if fits}
        behind = {at for fits in fitting if fits and self.rules[fits[0]].match == "*" for at in fits[1:]}
        for at in sorted(behind):
            if self.rules[at] not in first:
                raise RecipeError(
                    f"rule {self.rules[at].match!r} decides nothing: the first rule that fits a weight decides, and "
                    "'*' comes before it; put it before '*'"
                )

    def _decide(self, target: Target, fits: Sequence[int]) -> Choice:
        """``fits``: the indices of the matching rules."""
        rule = self.rules[fits[0]] if fits else None
        if rule and isinstance(rule.scheme, str):
            return Choice(target.name, None, f"rule {rule.match!r} says skip")
        if target.unfit:
            return Choice(target.name, None, target.unfit)
        if rule:
            assert isinstance(rule.scheme, Scheme)
            if 0 in target.shape:
                return Choice(target.name, None, "it is empty")
            if target.kind == "conv" and rule.scheme.act:
                return Choice(target.name, None, f"convolutions are weight-only; {rule.scheme} rounds its input")
            said = f"the scheme for all {PLURALS[target.kind]}" if _is_by_name(rule) else f"rule {rule.match!r}"
            return Choice(target.name, rule.scheme, f"{said}; {target.note}" if target.note else said)
        return Choice(target.name, None, self._left(target))

    def _left(self, target: Target) -> str:
        """Why no rule fits ``target``."""
        by_name, plural = any(map(_is_by_name, self.rules)), PLURALS[target.kind]
        if target.kind != "other":
            if by_name:
                return f"a scheme given by name leaves {plural} as they are; a rule for them quantizes them"
            return f"no rule fits this {target.kind} weight"
        what, more = "weight of a module of unknown type", target.note
        if is_router(target.module, target.shape):
            what, plural, more = "router", "routers", "a rule with its name quantizes it"
        left = f"a scheme given by name leaves {plural} as they are" if by_name else f"no rule fits this {what}"
        return f"{left}; {more}" if more else left

    def to_json(self) -> str:
        """The recipe file of docs/formats.md, with all schemes written out."""
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
        """The inverse of :meth:`to_json`; a rule's scheme may also be a preset name, for files written by hand."""
        data = parsed(text, "the recipe", RecipeError)
        try:
            version = data.get("version") if isinstance(data, dict) else None
            if version is not None:
                check_version(version, VERSION, "the recipe", RecipeError)
            if version is None or not isinstance(data.get("rules"), list):
                raise RecipeError(f"{shorten(text, 60)!r} is no recipe; one is {EXAMPLE}")
            if unknown := set(data) - {"version", "rules"}:
                raise RecipeError(f"recipe: unknown keys {sorted(unknown)}; known: rules, version")
            return cls(tuple(_rule_from(rule) for rule in data["rules"]))
        except TypeError as error:
            raise RecipeError(f"not a recipe: {error!r}") from error


RecipeLike = (
    str
    | Scheme
    | Recipe
    | Plan
    | Rule
    | Mapping[str, str | Scheme]
    | Sequence[Rule | tuple[str, str | Scheme] | tuple[str, str | Scheme, Sequence[str] | None]]
)
"""What :meth:`Recipe.of` and all arguments called ``recipe`` accept."""


def _is_by_name(rule: Rule) -> bool:
    """Whether :meth:`Recipe.of` made the rule from a bare scheme, so that messages should not show its pattern."""
    return rule.match == "*" and rule.kinds == DEFAULT_KINDS


def _rule_of(pair: Any) -> Rule:
    if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
        raise RecipeError(f"a rule is (pattern, scheme) or (pattern, scheme, kinds), not {pair!r}")
    return Rule(*pair)


def _rule_from(data: Any) -> Rule:
    checked(data, "rule", {"match", "scheme", "kinds"}, {"match", "scheme"}, RecipeError)
    scheme = data["scheme"]
    return Rule(data["match"], scheme if isinstance(scheme, str) else Scheme.from_dict(scheme), data.get("kinds"))


def _tied(targets: Sequence[Target], choices: Sequence[Choice]) -> list[Choice]:
    """Make one decision for all names of a tied parameter, so that it stays tied: one scheme, or unquantized."""
    decided = {choice.name: choice for choice in choices}
    for group in by_storage(targets).values():
        found = [decided[target.name] for target in group]
        wanted = {choice.scheme for choice in found}
        if len(wanted) == 1:
            continue
        if len(wanted - {None}) > 1:
            names = " and ".join(choice.name for choice in found)
            asked = ", ".join(f"{choice.name}: {choice.scheme or 'skip'}" for choice in found)
            raise RecipeError(f"{names} are one tied weight, but the rules ask for {asked}")
        left = ", ".join(choice.name for choice in found if choice.scheme is None)
        more = "" if any(target.unfit for target in group) else "; a rule for that one quantizes both"
        for choice in found:
            if choice.scheme is not None:
                decided[choice.name] = Choice(choice.name, None, f"tied to {left}, which stays as it is{more}")
    return list(decided.values())


def _otherwise(targets: Sequence[Target], rule: Rule) -> str:
    """Advice if the rule would match weights of other kinds, or would match as the name of a part of the model, as a
    regular expression, or as the last or a middle part of names."""
    known = KINDS[:-1] if rule.match == "*" else KINDS
    fits = {target.kind for target in targets if dataclasses.replace(rule, kinds=known).fits(target)}
    if fits:
        kinds = ", ".join(repr(kind) for kind in KINDS if kind in fits)
        wider = f"({rule.match!r}, {str(rule.scheme)!r}, ({kinds},))"
        return f". It would fit weights of other kinds ({kinds}): [{wider}] takes these"
    if rule.match.startswith("re:"):
        return ""
    part = dataclasses.replace(rule, match=f"{rule.match}.*")
    if any(map(part.fits, targets)):
        return f". A pattern is for whole names; {part.match!r} would fit those that lie in it"
    try:
        expression = dataclasses.replace(rule, match=f"re:{rule.match}")
    except RecipeError:
        return ""
    if any(map(expression.fits, targets)):
        return f". It is a glob; {expression.match!r} would fit some"
    for wider in (f"*.{rule.match}", f"*.{rule.match}.*"):
        if any(map(dataclasses.replace(rule, match=wider).fits, targets)):
            return f". A pattern is for whole names; {wider!r} would fit some"
    return ""


def _noted(targets: Sequence[Target], rule: Rule) -> str:
    """What is noted of the first weight that the rule names and that has a note."""
    named = dataclasses.replace(rule, kinds=KINDS)
    noted = (target for target in targets if target.note and named.fits(target))
    return next((f". {target.name}: {target.note}" for target in noted), "")


def _preview(targets: Sequence[Target], like: str) -> str:
    """The targets, those with names closest to ``like`` first, for an error message."""
    near = sorted(targets, key=lambda each: -difflib.SequenceMatcher(None, like, each.module).ratio())
    names = (target.name if target.kind == "other" else target.module or "(root)" for target in near)
    return shortened((f"{name} ({target.kind})" for name, target in zip(names, near, strict=True)), 8)
