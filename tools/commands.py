"""Generate docs/cli.md: every verb of ``bitport`` with its options, as argparse knows them. Run by ``make reference``.

argparse's own help text differs between Python versions, so the page is built from the parser's actions instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from bitport.cli import main
from bitport.cli.doctor import VARIABLES

SHARED = ("json", "debug")
"""Options that every verb has."""
HEAD = """# The command line

`make reference` generates this page; `bitport VERB --help` says the same.

Results go to standard output, progress and errors to standard error. The exit code is 0 for success, 1 for an error of
bitport or the system, 2 for options that are wrong, missing or do not go together, 130 when interrupted (Ctrl-C,
SIGTERM). Every verb takes `--json`, which prints the result as JSON, and `--debug`, which shows where an error comes
from.
"""


def page() -> str:
    verbs = next(action for action in main.parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
    return "\n".join([HEAD, *(line for verb in verbs.values() for line in _verb(verb)), *_variables()]) + "\n"


def _verb(verb: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {verb.prog}\n"
    yield f"{verb.description}\n"
    examples = [line.strip() for line in (verb.epilog or "").splitlines()[1:]]
    yield "\n".join(["```sh", *examples, "```\n"])
    listed = [each for each in verb._actions if each.dest not in ("help", *SHARED)]
    if listed:
        yield "\n".join(f"- `{_named(each)}`: {_said(verb, each)}" for each in listed) + "\n"
    for group in verb._mutually_exclusive_groups:
        names = [f"`{each.option_strings[-1]}`" for each in group._group_actions]
        yield f"{'Exactly' if group.required else 'At most'} one of {', '.join(names)}.\n"


def _named(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    taken: Any = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else None)
    return f"{names} {taken or action.dest.upper()}{' ..' if action.nargs in ('*', '+') else ''}"


def _said(verb: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Its help, in which names between words and stars would be set in italics."""
    return verb._get_formatter()._expand_help(action).replace("*", r"\*").replace("_", r"\_")


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "`bitport doctor` prints those that are set, and warns of unknown ones that begin with BITPORT.\n"
    rows = [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    yield "\n".join(["| variable | what it does |", "|---|---|", *rows])
