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


def check_version(given: Any, newest: int, name: str, kind: type[BitportError]) -> None:
    """Raise ``kind`` unless ``given`` is a version of a file from 1, the first, to ``newest``: files of all earlier
    versions are read (docs/formats.md). ``name``: what has that version, for the error."""
    if type(given) is not int or given < 1:
        shown = reprlib.repr(given)
        raise kind(f"{name} has version {shown}: 'version' must be a whole number from 1; fetch or write it again")
    if given > newest:
        raise kind(
            f"{name} has version {given}, of a later bitport; this one reads versions up to {newest}: upgrade bitport"
        )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError for a duplicate key, which programs resolve differently."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"a key appears twice in one object: {reprlib.repr(key)}")
        found[key] = value
    return found
