"""The option ``--report FILE``, for verbs whose results do not fit a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitport.cli.common import finite
from bitport.errors import ArgumentError, BitportError

SUFFIXES = (".html", ".json")


def add_report(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--report",
        type=report_path,
        action="append",
        default=[],
        metavar="FILE",
        help="write a report: FILE.html (one self-contained page) or FILE.json; may be given twice",
    )


def report_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in neither {' nor '.join(SUFFIXES)}")
    return path


def check_reports(args: argparse.Namespace) -> None:
    """Raise ArgumentError, before hours of work, if the folder of a report does not exist."""
    for path in args.report:
        if not path.absolute().parent.is_dir():
            raise ArgumentError(f"--report {path}: there is no folder {path.parent}; make it first")


def write_reports(args: argparse.Namespace, page: Callable[[str], str], data: Any) -> None:
    """Write the reports; ``page`` is called with the command line. Call it after printing: the disk may be full."""
    for path in args.report:
        if path.suffix == ".json":
            text = json.dumps({"command": args.command, "result": finite(data)}, indent=1, allow_nan=False) + "\n"
        else:
            text = page(args.command)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BitportError(f"--report {path} cannot be written: {error}") from error
        print(f"report: {path}", file=sys.stderr)
