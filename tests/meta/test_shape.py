"""How the house is built: small files, one idea each, said at the top; tests where one looks for them."""

from __future__ import annotations

import ast
import importlib
import statistics
from pathlib import Path

import pytest

from .tree import PACKAGE, ROOT, modules

LONGEST, MEDIAN = 500, 150

OTHER_TESTS = {"meta", "bench", "examples", "native"}
"""Test folders for what is not a folder of bitport."""

PUBLIC = (
    "bitport",
    "bitport.algorithms",
    "bitport.cache",
    "bitport.checkpoint",
    "bitport.conformance",
    "bitport.export",
    "bitport.interop",
    "bitport.layouts",
    "bitport.ops",
    "bitport.schemes",
    "bitport.train",
    "bitport.train.optim",
)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_module_is_long() -> None:
    folders = [ROOT / name for name in ("src", "bench", "examples", "tests", "tools") if (ROOT / name).exists()]
    long = {path.relative_to(ROOT).as_posix(): lines(path) for folder in folders for path in folder.rglob("*.py")}
    assert {name: count for name, count in long.items() if count > LONGEST} == {}


def test_the_median_module_is_short() -> None:
    assert statistics.median(count for path in PACKAGE.rglob("*.py") if (count := lines(path))) < MEDIAN


def test_every_module_says_what_it_is() -> None:
    assert [path for path, tree in modules().items() if tree.body and not ast.get_docstring(tree)] == []


def test_test_folders_mirror_the_source() -> None:
    folders = {path.parent.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    strange = {name for name in folders - {"."} - OTHER_TESTS if not (PACKAGE / name).is_dir()}
    assert strange == set(), "name a test folder after the folder of src/bitport that it tests"


def test_every_part_has_tests() -> None:
    parts = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    untested = {name for name in parts if not list((ROOT / "tests" / name).glob("test_*.py"))}
    assert untested == set()


def test_public_names_are_frozen() -> None:
    """The names users may rely on, in one file: a change of it is a decision, and goes into the changelog."""
    frozen = (Path(__file__).parent / "public_names.txt").read_text().splitlines()
    offered = [f"{module}.{name}" for module in PUBLIC for name in sorted(importlib.import_module(module).__all__)]
    assert offered == frozen


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_exist(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []
