"""Write docs/reference.md (every public name with its signature and docstring), docs/cli.md, and what other libraries
call a scheme in docs/choosing.md: ``make reference``.

Users may rely on what these pages list. A test compares them with the code (``--check``), so that no change to a name
or a signature goes unnoticed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import itertools
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import commands
import public
import torch

from bitport.schemes.elsewhere import ELSEWHERE

DOCS = Path(__file__).parents[1] / "docs"
HIDDEN = ("_", "fsdp_")
"""Beginnings of names that are for PyTorch and for bitport itself."""
PROPERTIES = (property, functools.cached_property)
WIDTH = 110
HEAD = f"""# Reference

{public.POLICY}

`make reference` writes this page from the docstrings, and from `tools/public.py` what is public and how stable it is.
"""


def page() -> str:
    body = "\n".join(line for name in public.MODULES for line in _module(name))
    return "\n".join([HEAD, *_contents(body), "", body]).rstrip() + "\n"


def _contents(body: str) -> Iterator[str]:
    """A line for each module, with links as GitHub names headings: those that come again are numbered."""
    seen: Counter[str] = Counter()
    rows: list[list[str]] = []
    for mark, title in re.findall(r"^(##|###) (.+)$", re.sub(r"^```.*?^```", "", body, flags=re.M | re.S), re.M):
        slug = re.sub(r"[^\w-]", "", title.lower())
        anchor = f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1
        if mark == "##":
            module, standing = title, public.MODULES[title]
            rows.append([f"[{title}](#{anchor}) | {standing}"])
        else:
            own = public.standing(module, title)
            rows[-1].append(f"[`{title}`](#{anchor})" + (f" ({own})" if own != standing else ""))
    yield from ("| module | | names |", "|---|---|---|")
    for first, *others in rows:
        yield f"| {first} | {', '.join(others)} |"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n"
    yield f"*{public.MODULES[name].capitalize()}.*\n"
    yield _prose(module) + "\n"
    for each in sorted(public.names(name)):
        value = getattr(module, each)
        yield f"### {each}\n"
        if _is_told(value, each, name):
            yield f"[As above](#{each.lower()}).\n"
            continue
        if (standing := public.standing(name, each)) != public.MODULES[name]:
            yield f"*{standing.capitalize()}.*\n"
        if isinstance(value, dict | tuple):
            yield _of_constant(each, value) + "\n"
            if keys := [key for key in value if isinstance(key, str)]:
                yield f"{', '.join(f'`{key}`' for key in keys)}.\n"
        elif typing.get_origin(value):  # to Python 3.10 some are classes too
            yield _of_constant(each, value) + "\n"
            written = _type(value)
            if isinstance(value, types.UnionType) and len(f"{each} = {written}") > WIDTH:
                written = "\n    | ".join(["(", *map(_type, typing.get_args(value))]).replace("| ", "", 1) + "\n)"
            yield f"```python\n{each} = {written}\n```\n"
        elif inspect.isclass(value):
            yield from _class(each, value)
        elif inspect.isfunction(value):
            if not _prose(value):
                raise SystemExit(f"{name}.{each} is public and has no docstring: say what a caller cannot see")
            yield f"```python\n{_signature('def ' + each, value)}: ...\n```\n"
            yield _prose(value) + "\n"


def _is_told(value: Any, name: str, module: str) -> bool:
    """Whether a module that comes before ``module`` has it too."""
    before = itertools.takewhile(lambda each: each != module, public.MODULES)
    return any(name in public.names(each) and getattr(importlib.import_module(each), name) is value for each in before)


def _class(name: str, cls: type) -> Iterator[str]:
    if not issubclass(cls, Exception) and "*args" not in (signature := _signature(name, cls)):
        yield f"```text\n{signature}\n```\n"
    if said := _prose(cls):
        yield said + "\n"
    fields = [f"- `{field}`: {said}" for field, said in _fields(cls)] if _is_record(cls) else []
    told = {key: it for key, it in vars(cls).items() if not key.startswith(HIDDEN) and not _is_implied(cls, key)}
    values = [_member(_value(key, it), it) for key, it in told.items() if isinstance(it, PROPERTIES)]
    routines = {key: it for key, it in told.items() if inspect.isroutine(it) and not isinstance(it, PROPERTIES)}
    methods = [_member(_signature(key, it, width=None), it) for key, it in routines.items()]
    if fields or values or methods:
        yield "\n".join([*fields, *values, *methods]) + "\n"


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or hasattr(cls, "_fields") or getattr(cls, "_is_protocol", False)


def _is_implied(cls: type, key: str) -> bool:
    """Whether it is the default of a field, or says nothing of its own beside a base class, or a protocol of the same
    part of bitport."""
    if dataclasses.is_dataclass(cls) and key in {each.name for each in dataclasses.fields(cls)}:
        return True
    part = vars(importlib.import_module(cls.__module__.rpartition(".")[0])).values()
    protocols = [each for each in part if getattr(each, "_is_protocol", False) and each is not cls]
    return not _prose(vars(cls)[key]) and any(hasattr(each, key) for each in (*cls.__mro__[1:], *protocols))


def _member(written: str, value: Any) -> str:
    said = _first(value)
    return f"- `{written}`" + (f": {said}" if said else "")


def _value(key: str, value: Any) -> str:
    getter = value.fget if isinstance(value, property) else value.func
    kind = inspect.signature(getter).return_annotation
    return key if kind is inspect.Signature.empty else f"{key}: {_type(kind)}"


def _first(value: Any) -> str:
    """The first paragraph of its docstring, on a line."""
    return _prose(value).split("\n\n")[0].replace("\n", " ")


def _fields(cls: type) -> Iterator[tuple[str, str]]:
    """Those with a text behind them, which is there in the source alone."""
    for node in _tree(cls.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            yield from ((name, said.replace("\n", " ")) for name, said in _behind(node.body))


def _of_constant(name: str, value: Any) -> str:
    """The text behind its assignment, wherever that is."""
    modules = {key: vars(module) for key, module in sys.modules.items() if key.startswith("bitport")}
    homes = [key for key, there in modules.items() if there.get(name) is value]
    for home in sorted(homes):
        if said := dict(_behind(_tree(home).body)).get(name):
            return said
    raise SystemExit(f"{name} in {homes} is public and has no text behind it: say what it is")


def _behind(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Name -> the text behind its assignment."""
    for field, behind in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign | ast.Assign) and isinstance(behind, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            if isinstance(behind.value, ast.Constant) and isinstance(target, ast.Name):
                yield target.id, _markdown(inspect.cleandoc(str(behind.value.value)))


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
    if forward := getattr(annotation, "__forward_arg__", None):
        return str(forward)
    if typing.get_origin(annotation) or annotation is torch.dtype:
        return re.sub(
            r"\b(?:\w+\.)+(?=[A-Z])", "", str(annotation).removeprefix("<class '").removesuffix("'>")
        ).replace("'", '"')
    return getattr(annotation, "__name__", str(annotation))


def _prose(value: Any) -> str:
    said = getattr(value, "__doc__", None) or ""
    said = said.strip() if inspect.ismodule(value) else inspect.cleandoc(said)  # which would strip what is indented
    made = re.match(rf"{getattr(value, '__name__', '-')}\(", said)  # by dataclass or NamedTuple
    return "" if made else _markdown(said)


def _markdown(said: str) -> str:
    said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said)
    said = re.sub(r"::\n", ":\n", said.replace("``", "`"))
    return re.sub(r"^(`\w+`(, `\w+`)*: )", r"- \1", said, flags=re.MULTILINE)


def choosing() -> str:
    """docs/choosing.md as it is, with its last table, which is that of ELSEWHERE."""
    header = "| library | there | scheme | algorithm |\n|---|---|---|---|\n"
    text, _ = (DOCS / "choosing.md").read_text().split(header)
    rows, before = [], ""
    for library, setting, schemes, methods in ELSEWHERE:
        cells = "" if library == before else library, setting, _quoted(schemes, ", "), _quoted(methods, " or ")
        rows.append("| " + " | ".join(cells) + " |\n")
        before = library
    return (text + header + "".join(rows)).replace("|  |", "| |")


def _quoted(names: str, between: str) -> str:
    return between.join(f"`{name}`" for name in names.split(between) if name)


def main() -> int:
    stale = 0
    for name, made in (("reference.md", page()), ("cli.md", commands.page()), ("choosing.md", choosing())):
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
