"""JSON from outside: what is ambiguous is refused, whatever it is to become."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bitport.errors import RecipeError, SchemeError
from bitport.schemes import Plan, Recipe, Scheme, preset

SCHEME = preset("int8").to_json()


@pytest.mark.parametrize(
    ("read", "text", "key", "error"),
    [
        (Scheme.from_json, SCHEME, "act", SchemeError),
        (Scheme.from_json, SCHEME, "dtype", SchemeError),
        (Recipe.from_json, '{"version": 1, "rules": [{"match": "*", "scheme": "int8"}]}', "scheme", RecipeError),
        (Recipe.from_json, '{"version": 1, "rules": [{"match": "*", "scheme": "int8"}]}', "rules", RecipeError),
        (Plan.from_json, '[{"name": "a", "scheme": null, "reason": ""}]', "scheme", RecipeError),
    ],
    ids=["scheme-act", "scheme-dtype", "recipe-scheme", "recipe-rules", "plan-scheme"],
)
def test_a_key_that_appears_twice(read: Callable[[str], object], text: str, key: str, error: type[Exception]) -> None:
    """The last would win here, and the first in other programs."""
    read(text)
    with pytest.raises(error, match=f"is not JSON: a key appears twice in one object: '{key}'"):
        read(text.replace(f'"{key}": ', f'"{key}": null, "{key}": '))
