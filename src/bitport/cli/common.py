"""Shared by all verbs: declaring a verb, parsing arguments, printing results."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from bitport.arguments import bytes_of
from bitport.cache import cache_format
from bitport.errors import ArgumentError, SchemeError
from bitport.schemes import preset

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that control a terminal, or that no encoding has, but not ends of lines and tabs."""


class UsageError(ArgumentError):
    """Options that are wrong, missing or do not go together."""


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line, without the usage of thirty options before it, and the option that an unknown
    one resembles."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: error: {message}; {self.prog} --help shows what there is\n"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, left = super().parse_known_args(args, namespace)
        if left:
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(left[0].partition("=")[0], known, 1)
            self.error(f"unrecognized arguments: {' '.join(left)}" + (f" (did you mean {near[0]}?)" if near else ""))
        return found, left


def add_verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], description: str, *examples: str
) -> argparse.ArgumentParser:
    """Add a verb with its help, its examples, and the options common to all verbs."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=description.split(". ")[0].rstrip("."),
        description=textwrap.fill(description, 100),
        epilog="examples:\n" + "\n".join(f"  bitport {name} {example}".rstrip() for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb.add_argument("--debug", action="store_true", help="show where an error comes from")
    verb.set_defaults(run=run)
    return verb


def add_device(verb: argparse.ArgumentParser, *, computes: bool = True) -> None:
    kind = computing_device if computes else device
    verb.add_argument("--device", type=kind, help="a torch device, such as cuda:0 or xpu (default: cpu)")
    add_dtype(verb, "dtype to compute in (default: that of the files)")


def add_dtype(verb: argparse.ArgumentParser, what: str) -> None:
    verb.add_argument("--dtype", type=dtype, metavar=f"{{{','.join(DTYPES)}}}", help=what)


def add_cache(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--kv-cache",
        type=cache_name,
        metavar="FORMAT",
        help="quantize the key-value cache, such as int8 or int4-g32+last64 (docs/kv-cache.md; default: floats)",
    )


def add_shard_size(verb: argparse.ArgumentParser, more: str) -> None:
    verb.add_argument(
        "--shard-size",
        type=nbytes,
        default="4GB",
        metavar="SIZE",
        help=f"largest size of a file of weights{more} (default: 4GB)",
    )


def option(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make ``read`` a parser of an option: its ArgumentError or SchemeError is shown as argparse shows its own."""

    @functools.wraps(read)
    def parse(text: str) -> T:
        try:
            return read(text)
        except (ArgumentError, SchemeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


@option
def cache_name(text: str) -> str:
    cache_format(text)
    return text


@option
def scheme_name(text: str) -> str:
    preset(text)
    return text


def ending(suffix: str, what: str) -> Callable[[str], Path]:
    """A parser of names of files that end in ``suffix``; ``what`` such a file is."""

    def parse(text: str) -> Path:
        if Path(text).suffix != suffix:
            raise argparse.ArgumentTypeError(f"{text!r}: {what} is a file *{suffix}")
        return Path(text)

    return parse


def dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(DTYPES)}")
    return DTYPES[text]


def device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no torch device: {str(error).splitlines()[0]}") from error


def computing_device(text: str) -> torch.device:
    found = device(text)
    if found.type == "meta":
        raise argparse.ArgumentTypeError("meta holds no numbers; give a device that computes")
    return found


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seed(text: str) -> int:
    """Parse a seed for torch's generators, except negative ones, which are aliases of large ones."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def location(text: str) -> Path:
    if not text:  # usually an unset shell variable
        raise argparse.ArgumentTypeError("the name is empty; '.' is the directory you are in")
    return Path(text)


@option
def nbytes(text: str) -> int:
    return bytes_of(text, "it")


def counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers such as 1,64,1024."""
    return tuple(count(item) for item in text.split(","))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {path} as UTF-8 text: {error}") from error


def show(args: argparse.Namespace, data: Any, text: str) -> None:
    """Print ``data`` as JSON with --json, else ``text``, which may quote a file of others. If the reader closes the
    pipe, like head, the verb goes on: reports are still to be written."""
    try:
        print(json.dumps(finite(data), indent=2, allow_nan=False) if args.json else printable(text), flush=True)
    except BrokenPipeError:
        drop_output()


def printable(text: str) -> str:
    """``text`` with CONTROL as escapes."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def drop_output() -> None:
    """Redirect standard output to the null device, including what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def finite(data: Any) -> Any:
    """``data`` with infinity and NaN, which JSON lacks, replaced by None."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
