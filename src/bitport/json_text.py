"""JSON that comes from outside, and may be damaged or hostile."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from bitport.errors import BitportError


def parsed(text: str | bytes, name: str, kind: type[BitportError]) -> Any:
    """The value in ``text``; ``kind`` is raised if it is no JSON. ``name``: what should hold it, for the error."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (TypeError, ValueError, RecursionError) as error:
        raise kind(f"{name} is not JSON: {error}") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError for a duplicate key, which programs resolve differently."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"a key appears twice in one object: {reprlib.repr(key)}")
        found[key] = value
    return found
