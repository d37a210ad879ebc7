"""``bitport compare``: compare several models on one text."""

from __future__ import annotations

import argparse
from typing import Any

from bitport.cli.common import UsageError, add_verb, count, location, read_text, show
from bitport.cli.reports import add_report, check_reports, write_reports
from bitport.cli.texts import add_text, as_data, as_note, how_of, tell
from bitport.evaluate.columns import columns
from bitport.evaluate.directories import evaluate_directories
from bitport.evaluate.page import page
from bitport.report.text import table


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "compare",
        run,
        "Compare models with the first. Size, perplexity, and how far predictions are from those of the first model: "
        "KL divergence (mean and 99th percentile) and how often both predict the same token. One model is in memory at "
        "a time.",
        "llama llama-int8 llama-int4 --text wiki.txt",
        "llama llama-int4 llama-int3 --text wiki.txt --max-tokens 16384 --speed 64 --layers --report compare.html",
    )
    verb.add_argument(
        "directories",
        type=location,
        nargs="+",
        metavar="DIR",
        help="Hugging Face directories, quantized by bitport or not",
    )
    verb.add_argument("--speed", type=count, metavar="N", help="also generate N tokens and show tokens per second")
    verb.add_argument(
        "--layers", action="store_true", help="also measure the error of every layer, for --json and --report"
    )
    add_text(verb, required=True)
    add_report(verb)


def run(args: argparse.Namespace) -> int:
    check_reports(args)
    if args.kv_cache and args.speed:
        raise UsageError("--kv-cache applies to reading the text, not to --speed: give only one of them")
    text, how = read_text(args.text), how_of(args, args.speed or 0)
    rows = list(evaluate_directories(args.directories, text, how, layers=args.layers, tell=tell))
    data = [as_data(row) for row in rows]
    show(args, data, f"{table(*columns(rows))}\n{as_note(rows, args)}")
    write_reports(args, lambda command: page(rows, {}, str(args.text), how, command), data)
    return 0
