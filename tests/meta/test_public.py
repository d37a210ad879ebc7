"""What tools/public.py says of public names, which docs/reference.md shows."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .tree import PACKAGE, ROOT


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public", ROOT / "tools" / "public.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public = _loaded()
KINDS = {public.STABLE, public.BACKENDS, public.EXPERIMENTAL}
VENDORS = [PACKAGE / "backends" / "README.md", *sorted((ROOT / "examples" / "outoftree-device").rglob("*.py"))]
"""The contract of backends, and the example that follows it."""


def names(module: str) -> list[str]:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    pytest.importorskip("diffusers", reason="needs the extra: pip install 'bitport[diffusers]'")
    return list(public.names(module))


def test_a_kind_is_told_of_every_module() -> None:
    assert set(public.MODULES.values()) == KINDS
    assert set(public.SOME) <= set(public.MODULES)


def test_every_exception_is_one() -> None:
    for kind, modules in public.OTHERWISE.items():
        assert kind in KINDS
        for module, several in modules.items():
            assert set(several) <= set(names(module)), f"{module} has no such public name"
            assert public.MODULES[module] != kind, f"{several} of {module} are like the rest of it"


def test_what_stands_in_bitport_itself_is_stable() -> None:
    assert {public.standing("bitport", name) for name in names("bitport")} == {public.STABLE}


def test_a_name_of_two_modules_is_told_once() -> None:
    """The page refers to where it was first: there it must be as stable."""
    order = {public.STABLE: 0, public.BACKENDS: 1, public.EXPERIMENTAL: 2}
    first: dict[int, tuple[str, str]] = {}
    for module in public.MODULES:
        for name in names(module):
            found = getattr(importlib.import_module(module), name)
            before, told = first.setdefault(id(found), (module, public.standing(module, name)))
            assert order[told] <= order[public.standing(module, name)], f"{name}: {before}, {module}"


def imported(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if path.suffix == ".md" else [text]
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "bitport":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_what_vendors_import_is_for_them() -> None:
    found = {each for path in VENDORS for each in imported(path)}
    assert len(found) >= 5
    for module, name in sorted(found):
        assert name in names(module), f"{name} of {module} is not public"
        assert public.standing(module, name) != public.EXPERIMENTAL, f"{name} of {module} may change in any release"
