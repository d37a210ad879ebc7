"""A plan: a recipe resolved against a model, with one choice and its reason per weight."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from bitport.errors import ArgumentError, RecipeError
from bitport.json_text import parsed
from bitport.schemes.scheme import Scheme, checked
from bitport.schemes.target import Target


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the weight ``name`` gets, and why. ``scheme`` None: it stays as it is."""

    name: str
    scheme: Scheme | None
    reason: str

    @property
    def static(self) -> bool:
        """Whether its scheme has a static input scale."""
        return self.scheme is not None and self.scheme.static


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a recipe means for one model: a :class:`Choice` for each weight, in the model's order; ``plan[name]`` is
    one. It is a recipe too, for models with all of these weights."""

    choices: tuple[Choice, ...]

    @functools.cached_property
    def _by_name(self) -> dict[str, Choice]:
        return {choice.name: choice for choice in self.choices}

    def __getitem__(self, name: str) -> Choice:
        return self._by_name[name]

    @property
    def quantized(self) -> tuple[Choice, ...]:
        """The choices with a scheme."""
        return tuple(choice for choice in self.choices if choice.scheme is not None)

    @property
    def skipped(self) -> tuple[Choice, ...]:
        """The choices without a scheme."""
        return tuple(choice for choice in self.choices if choice.scheme is None)

    def __str__(self) -> str:
        """One line per weight: ``name: scheme (reason)``."""
        return "\n".join(f"{c.name}: {c.scheme or 'left as it is'} ({c.reason})" for c in self.choices)

    __repr__ = __str__  # shown as the value of a notebook cell

    def diff(self, other: Plan) -> list[str]:
        """One line per weight whose scheme differs between the plans: ``name: this -> other``."""
        here, there = ({c.name: _described(c.scheme) for c in plan.choices} for plan in (self, other))
        names = [*here, *(name for name in there if name not in here)]
        pairs = ((name, here.get(name, "absent"), there.get(name, "absent")) for name in names)
        return [f"{name}: {mine} -> {theirs}" for name, mine, theirs in pairs if mine != theirs]

    def to_json(self) -> str:
        """JSON list of objects with name, scheme (null: none) and reason."""
        return json.dumps(
            [{"name": c.name, "scheme": c.scheme and c.scheme.to_dict(), "reason": c.reason} for c in self.choices]
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of :meth:`to_json`; RecipeError or SchemeError for anything else."""
        rows = parsed(text, "the plan", RecipeError)
        if not isinstance(rows, list):
            raise RecipeError(f"a plan is a list of choices, not {type(rows).__name__}")
        return cls(tuple(map(_choice_from, rows)))


def refuse_static(choices: Iterable[Choice], advice: str) -> None:
    """Raise ArgumentError if a choice has a static input scale, where the model is not run. ``advice``: what to do."""
    if static := [choice.name for choice in choices if choice.static]:
        more = ", ..." if len(static) > 1 else ""
        raise ArgumentError(
            f"{len(static)} weights ({static[0]}{more}) have a static input scale, which is measured by running the "
            f"model: {advice}"
        )


def static_inputs(choices: Iterable[Choice], targets: Mapping[str, Target]) -> dict[Target, str]:
    """The activation format of each target with a static input scale; ``targets`` by name."""
    return {targets[choice.name]: choice.scheme.act for choice in choices if choice.scheme and choice.scheme.static}


def _described(scheme: Scheme | None) -> str:
    if scheme is None:
        return "skip"
    return scheme.to_json() if scheme.name == "custom" else scheme.name


def _choice_from(row: Any) -> Choice:
    keys = {"name", "scheme", "reason"}
    fields = checked(row, "choice", keys, keys, RecipeError)
    for key in ("name", "reason"):
        if not isinstance(fields[key], str):
            raise RecipeError(f"choice: {key} must be a str, not {fields[key]!r}")
    scheme = fields["scheme"]
    return Choice(fields["name"], None if scheme is None else Scheme.from_dict(scheme), fields["reason"])
