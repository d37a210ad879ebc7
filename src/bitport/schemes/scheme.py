"""A scheme says how a weight is stored and how the input of its matmul is rounded: data, not code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from bitport.errors import BitportError, SchemeError
from bitport.json_text import check_version, parsed
from bitport.numerics import ACTIVATIONS, STATIC, Format

VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a weight is stored, and how inputs are rounded before they are multiplied with it. That is everything one
    needs to read a checkpoint; it says nothing about devices or layouts. :func:`preset` gives schemes by name.

    ``weight``: the number format of the weight. ``act``: how each input is rounded, a key of
    :data:`bitport.numerics.ACTIVATIONS`, or "" for an input that is used as it is. ``static``: the scale that a
    whole input shares is fixed by calibration instead of being measured on every call.
    """

    weight: Format
    act: str = ""
    static: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Format):
            raise SchemeError(f"a scheme's weight is a Format, not {self.weight!r}; preset('int4') is that of a name")
        if self.act not in ("", *ACTIVATIONS):
            raise SchemeError(f"unknown activation {self.act!r}; known: {', '.join(ACTIVATIONS)}, or '' for none")
        if self.static and self.act not in STATIC:
            raise SchemeError(
                f"static is for activations with a scale for all of x ({', '.join(STATIC)}), not {self.act!r}"
            )

    @property
    def name(self) -> str:
        """The shortest name, with suffixes, for which :func:`preset` returns this scheme, or 'custom'."""
        from bitport.schemes.presets import name_of

        return name_of(self)

    def __str__(self) -> str:
        """The name; for a custom scheme a description in a similar style."""
        from bitport.schemes.presets import described

        return described(self) if self.name == "custom" else self.name

    def to_dict(self) -> dict[str, Any]:
        """The scheme and the format version as JSON-compatible types."""
        weight = dataclasses.asdict(self.weight)
        weight["block"] = list(self.weight.block)
        return {"version": VERSION, "weight": weight, "act": self.act, "static": self.static}

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text; equal schemes give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, data: Any) -> Scheme:
        """The inverse of :meth:`to_dict`. Unknown keys are refused: ignoring a field could change the values."""
        if isinstance(data, dict) and "version" in data:  # first: a later version may have other keys
            check_version(data["version"], VERSION, "the scheme", SchemeError)
        fields = checked(data, "scheme", {"version", "weight", "act", "static"}, {"version", "weight"})
        known = {f.name for f in dataclasses.fields(Format)}
        weight = dict(checked(fields["weight"], "scheme weight", known, {"dtype", "block"}))
        block = weight["block"]
        if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(type(b) is int for b in block)):
            raise SchemeError(f"scheme weight block must be two integers, not {block!r}")
        weight["block"] = tuple(block)
        for name, value in ({**weight, **fields}).items():
            kind = bool if name in ("static", "global_scale") else str
            if name not in ("version", "weight", "block") and not isinstance(value, kind):
                raise SchemeError(f"scheme: {name} must be a {kind.__name__}, not {value!r}")
        try:
            return cls(weight=Format(**weight), act=fields.get("act", ""), static=fields.get("static", False))
        except (TypeError, ValueError) as error:
            raise SchemeError(f"not a scheme: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Scheme:
        """The inverse of :meth:`to_json`; SchemeError for anything else."""
        return cls.from_dict(parsed(text, "the scheme", SchemeError))


def checked(
    data: Any, what: str, allowed: set[str], required: set[str], kind: type[BitportError] = SchemeError
) -> dict[str, Any]:
    """Return ``data`` if it is a JSON object with these keys; otherwise raise ``kind``."""
    if not isinstance(data, dict):
        raise kind(f"a {what} is an object with the keys {sorted(allowed)}, not {type(data).__name__}")
    if unknown := set(data) - allowed:
        raise kind(f"{what}: unknown keys {sorted(map(str, unknown))}; known: {sorted(allowed)}")
    if missing := required - set(data):
        raise kind(f"{what}: missing keys {sorted(missing)}")
    return data
