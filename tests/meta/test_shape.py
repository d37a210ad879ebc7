"""Structure of the repository: small files with one idea each, stated at the top; tests where one looks for them."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from .tree import PACKAGE, ROOT, modules

LONGEST, MEDIAN = 500, 150

OTHER_TESTS = {"meta", "bench", "examples", "native"}
"""Test folders that do not correspond to a folder of bitport."""


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


def test_the_reference_is_that_of_the_code() -> None:
    """Two pages list the names users may rely on, their signatures, and the command-line options. Changing one is a
    decision, and belongs in the changelog."""
    for package, extra in (("transformers", "hf"), ("diffusers", "diffusers")):
        pytest.importorskip(package, reason=f"needs the extra: pip install 'bitport[{extra}]'")
    command = [sys.executable, "tools/reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"make reference, and see what changes:\n{done.stdout}{done.stderr}"
