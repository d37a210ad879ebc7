"""Write docs/reference.md, every public name with its signature and docstring, and docs/cli.md. ``make reference``.

The pages are what users may rely on: a test compares them with the code (``--check``), so that a change of a name or a
signature is seen.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands

DOCS = Path(__file__).parents[1] / "docs"
MODULES = (
    *("bitport", "bitport.schemes", "bitport.algorithms", "bitport.checkpoint", "bitport.stream", "bitport.interop"),
    *("bitport.train", "bitport.train.optim", "bitport.cache", "bitport.nn", "bitport.evaluate", "bitport.report"),
    *("bitport.export", "bitport.integrations.huggingface", "bitport.integrations.transformers"),
    *("bitport.integrations.kv_cache", "bitport.integrations.lm_eval", "bitport.ops", "bitport.layouts"),
    *("bitport.conformance", "bitport.errors"),
)
"""In the order of the page: what most users need, then what those need who bring kernels and devices."""

HIDDEN = ("_", "fsdp_")
"""Beginnings of names that are for PyTorch and for bitport itself."""
WIDTH = 110
HEAD = """# Reference

Every name to rely on; others may change with any version. `make reference` writes this page from the docstrings.
"""


def page() -> str:
    return "\n".join([HEAD, *(line for name in MODULES for line in _module(name))]).rstrip() + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n"
    yield _prose(module) + "\n"
    for public in sorted(module.__all__):
        value = getattr(module, public)
        where = getattr(value, "__module__", name)
        yield f"### {public}\n"
        if name != "bitport" and public in importlib.import_module("bitport").__all__:
            yield f"[As above](#{public.lower()}).\n"
        elif inspect.isclass(value):
            yield from _class(public, value)
        elif callable(value) and where.startswith("bitport"):
            yield f"```python\n{_signature('def ' + public, value)}: ...\n```\n"
            yield _prose(value) + "\n"
        elif keys := [key for key in value if isinstance(key, str)]:
            yield f"{', '.join(f'`{key}`' for key in keys)}.\n"
        else:
            yield f"A {type(value).__name__}.\n"


def _class(name: str, cls: type) -> Iterator[str]:
    if not issubclass(cls, Exception) and "*args" not in (signature := _signature(name, cls)):
        yield f"```text\n{signature}\n```\n"
    if said := _prose(cls):
        yield said + "\n"
    fields = [f"- `{field}`: {said}" for field, said in _fields(cls)] if _is_record(cls) else []
    told = {key: member for key, member in vars(cls).items() if not key.startswith(HIDDEN) and _prose(member)}
    values = [f"- `{key}`: {_first(member)}" for key, member in told.items() if isinstance(member, property)]
    methods = [
        f"- `{_signature(key, member, width=None)}`: {_first(member)}"
        for key, member in told.items()
        if inspect.isroutine(member)
    ]
    if fields or values or methods:
        yield "\n".join([*fields, *values, *methods]) + "\n"


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or getattr(cls, "_is_protocol", False)


def _first(value: Any) -> str:
    """The first paragraph of its docstring, on a line."""
    return _prose(value).split("\n\n")[0].replace("\n", " ")


def _fields(cls: type) -> Iterator[tuple[str, str]]:
    """Those with a text behind them, which is there in the source alone."""
    for node in _tree(cls.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            for field, behind in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(behind, ast.Expr):
                    target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
                    if isinstance(behind.value, ast.Constant) and isinstance(target, ast.Name):
                        yield target.id, _markdown(inspect.cleandoc(str(behind.value.value))).replace("\n", " ")


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())


def _signature(name: str, value: Any, width: int | None = WIDTH) -> str:
    """On one line where it fits ``width``."""
    signature = inspect.signature(getattr(value, "__func__", value))
    parts, keywords = [], False
    for each in signature.parameters.values():
        if each.kind == each.KEYWORD_ONLY and not keywords:
            parts.append("*")
        keywords |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        if each.name not in ("self", "cls"):
            parts.append(_parameter(each))
    end = ")" if signature.return_annotation is signature.empty else f") -> {_type(signature.return_annotation)}"
    if inspect.isclass(value):
        end = ")"
    text = f"{name}({', '.join(parts)}{end}"
    if width is None or len(text) <= width:
        return text
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


def _parameter(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    said = "" if each.annotation is each.empty else f": {_type(each.annotation)}"
    if each.default is each.empty:
        return stars + each.name + said
    default = repr(each.default).replace("'", '"')
    if callable(each.default) or default.startswith("<"):
        default = getattr(each.default, "__name__", "...")
    return each.name + said + (" = " if said else "=") + default


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", str(annotation))


def _prose(value: Any) -> str:
    said = getattr(value, "__doc__", None) or ""
    said = said.strip() if inspect.ismodule(value) else inspect.cleandoc(said)  # which would strip what is indented
    made = re.match(rf"{getattr(value, '__name__', '-')}\(", said)  # by dataclass or NamedTuple
    return "" if made else _markdown(said)


def _markdown(said: str) -> str:
    said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said)
    said = re.sub(r"::\n", ":\n", said.replace("``", "`"))
    return re.sub(r"^(`\w+`(, `\w+`)*: )", r"- \1", said, flags=re.MULTILINE)


def main() -> int:
    stale = 0
    for name, made in (("reference.md", page()), ("cli.md", commands.page())):
        path = DOCS / name
        if sys.argv[1:] == ["--check"]:
            written = path.read_text()
            changed = difflib.unified_diff(written.splitlines(), made.splitlines(), "written", name, lineterm="")
            print("\n".join(changed))
            stale |= written != made
        else:
            path.write_text(made)
            print(f"wrote docs/{name}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
