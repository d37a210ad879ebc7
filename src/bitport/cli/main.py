"""``bitport VERB ...``. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 1 an error of bitport (one message; ``--debug`` shows where), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bitport.checkpoint.manifest import library_version
from bitport.cli import bench, doctor, evaluate, explain, export, generate, inspect, quantize, tune
from bitport.errors import BitportError

VERBS = (quantize, inspect, explain, evaluate, generate, export, bench, tune, doctor)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bitport", description="Low-bit models, right and fast on every accelerator.")
    top.add_argument("--version", action="version", version=f"bitport {library_version()}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BitportError as error:
        if args.debug:
            raise
        print(f"bitport: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bitport: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
