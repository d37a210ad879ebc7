"""``bitport tune``: measure on this machine which kernel is fastest for each number of rows, once for all processes."""

from __future__ import annotations

import argparse
from typing import Any

from bitport import plugins
from bitport.cli.common import add_verb, show


def add_parser(verbs: Any) -> None:
    add_verb(
        verbs,
        "tune",
        run,
        "Measure which kernels are the fastest on this machine. Takes a minute; run it while the machine is idle. The "
        "result is stored in the user's cache folder (or BITPORT_CACHE) and used from then on; bitport explain shows "
        "where it decides.",
        "",
        "--json",
    )


def run(args: argparse.Namespace) -> int:
    found: dict[str, list[str]] = {}
    for backend, line in plugins.tune():
        found.setdefault(backend, []).append(line)
        if not args.json:
            print(f"{backend}: {line}", flush=True)
    if args.json or not found:
        show(args, found, "no backend here has anything to measure")
    return 0
