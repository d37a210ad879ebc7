"""``bitport VERB ...``. Results go to standard output, progress and errors to standard error.

Exit codes: 0 success, 1 an error of bitport or of the system (one message; ``--debug`` shows the traceback), 2 options
that are wrong, missing or do not go together, 130 interrupted, by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from bitport.cli import bench, compare, convert, doctor, evaluate, explain, export, generate, inspect, quantize, tune
from bitport.cli.common import Parser, UsageError, drop_output, printable
from bitport.errors import BitportError
from bitport.report.versions import library_version

VERBS = (quantize, convert, inspect, explain, evaluate, compare, generate, export, bench, tune, doctor)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="bitport", description="Low-bit models, right and fast on every accelerator.")
    top.add_argument("--version", action="version", version=f"bitport {library_version()}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    args.command = shlex.join(["bitport", *(sys.argv[1:] if argv is None else argv)])
    _print_anything()
    try:
        with _ended_as_interrupted(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as head, closed the pipe
        drop_output()
        return 0
    except (BitportError, OSError) as error:  # any verb may hit a full disk
        if args.debug:
            raise
        print(printable(f"bitport: error: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("bitport: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """Interrupt the verb on SIGTERM, by which schedulers end a process; by default it would leave behind whatever it is
    writing. Where the process handles SIGTERM in its own way it stays so."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Those of bitport as its errors are shown, without a line of its source."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        text = printable(f"bitport: warning: {message}\n")
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    print(text, end="", file=file or sys.stderr)


def _print_anything() -> None:
    """Print characters that the terminal's encoding lacks as escapes, and what goes to a closed stream (``>&-``)
    nowhere, instead of failing after hours of work."""
    if None in (sys.stdout, sys.stderr):
        nowhere = open(os.devnull, "w")  # noqa: SIM115  (stays open as long as the process)
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
