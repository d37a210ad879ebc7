"""What the texts refer to must exist, and they must say nothing about the machine they were written on."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from .tree import ROOT, TEXT, files

if sys.version_info >= (3, 11):
    import tomllib

MACHINE_PATH = re.compile(r"(?<![\w.~:-])/(?:home|root|work|workspace|Users|mnt|private)/\w+")
LINK = re.compile(r"\[[^\]`]*\]\(([^)\s]+)\)(?!`)")
COMMAND = re.compile(r"(?:^|`)\s*make ([a-z][\w-]*)", re.MULTILINE)

MARKDOWN = {path.relative_to(ROOT).as_posix(): path for path in files(".md")}


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", MARKDOWN)
def test_commands_in_texts_exist(name: str) -> None:
    assert set(COMMAND.findall(MARKDOWN[name].read_text())) - targets() == set()


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_resolve(name: str) -> None:
    path = MARKDOWN[name]
    links = [link for link in LINK.findall(path.read_text()) if "://" not in link and not link.startswith("#")]
    assert [link for link in links if not (path.parent / link.split("#")[0]).exists()] == []


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("name", MARKDOWN)
def test_links_to_headings_resolve(name: str) -> None:
    path = MARKDOWN[name]
    for link in LINK.findall(path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if anchor and "://" not in link and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("name", MARKDOWN)
def test_python_in_texts_parses(name: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", MARKDOWN[name].read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("text", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"])
def test_the_usual_texts_are_there(text: str) -> None:
    assert (ROOT / text).stat().st_size > 0


def test_no_path_of_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files(*TEXT)
        if path.stat().st_size < 1 << 20
        for match in MACHINE_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert found == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")
def test_every_marker_has_a_make_target() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    for marker in options["markers"]:
        name = marker.partition(":")[0]
        assert f"test-{name}" in targets(), f"make test-{name} is missing"
        assert f"make test-{name}" in marker, f"the marker {name!r} should say how its tests are run"
        assert f"not {name}" in options["addopts"], f"leave tests marked {name!r} out by default"


def test_help_names_the_first_commands() -> None:
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("#")]
    assert any("make demo" in line for line in lines)
    assert any("make test" in line for line in lines)


def test_ci_is_executable_and_stops_on_errors() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    assert set(re.findall(r"^step (\S+)", script.read_text(), re.MULTILINE)) <= targets()


def test_the_finder_of_paths_finds() -> None:
    assert MACHINE_PATH.search("see " + str(Path("/") / "home" / "somebody"))
    assert not MACHINE_PATH.search("https://example.com/home/page and ~/work/x and a/root/b")
