"""A plan: a recipe resolved on a model. One choice per weight, with its reason."""

from __future__ import annotations

import dataclasses
import json

from bitport.schemes.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Choice:
    """``scheme`` None: the weight stays as it is."""

    name: str
    scheme: Scheme | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    choices: tuple[Choice, ...]

    def __getitem__(self, name: str) -> Choice:
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(name)

    @property
    def quantized(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.scheme is not None)

    @property
    def skipped(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.scheme is None)

    def diff(self, other: Plan) -> list[str]:
        """One line per weight that the two plans treat differently: ``name: this -> other``."""
        here, there = ({c.name: str(c.scheme or "skip") for c in plan.choices} for plan in (self, other))
        names = [*here, *(name for name in there if name not in here)]
        pairs = ((name, here.get(name, "absent"), there.get(name, "absent")) for name in names)
        return [f"{name}: {mine} -> {theirs}" for name, mine, theirs in pairs if mine != theirs]

    def to_json(self) -> str:
        return json.dumps(
            [
                {"name": c.name, "scheme": c.scheme and c.scheme.to_dict(), "reason": c.reason}
                for c in self.choices
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        rows = json.loads(text)
        return cls(
            tuple(Choice(r["name"], r["scheme"] and Scheme.from_dict(r["scheme"]), r["reason"]) for r in rows)
        )
