"""The repository as these tests see it: its modules as syntax trees, its text files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "bitport"
TREES = ("src", "tests", "bench", "docs", "examples", "native", "tools", ".ci")
"""Top folders that belong to the project; the rest (environments, caches, builds) does not."""

TEXT = (".py", ".md", ".toml", ".txt", ".json", ".cpp", ".cc", ".h", ".sh", ".yml", ".yaml", "")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Map the path (relative to the package) of every module of bitport to its syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(), str(path)) for path in paths}


def part(path: str) -> str:
    """The part of bitport that a module belongs to: "ops/linear.py" -> "ops", "api.py" -> "api"."""
    return path.split("/")[0].removesuffix(".py")


def dotted(node: ast.AST) -> str:
    """Return a.b.c for an attribute chain on a name, "" for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def imported(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (dotted module or name, line) for every import of a module, at any nesting level."""
    package = ["bitport", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)


def files(*suffixes: str) -> Iterator[Path]:
    """Yield the project's files with one of ``suffixes``, including those in the root folder."""
    tops = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    nested = (path for name in TREES if (ROOT / name).is_dir() for path in (ROOT / name).rglob("*"))
    for path in (*sorted(tops), *sorted(nested)):
        parts = path.relative_to(ROOT).parts
        generated = any(each in ("__pycache__", "build", "dist") or each.endswith(".egg-info") for each in parts)
        if path.is_file() and path.suffix in suffixes and not generated:
            yield path


def table(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table in a page of docs whose first column is called ``first``."""
    rows = (ROOT / "docs" / page).read_text().split(f"| {first} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows.splitlines()[2:]]
