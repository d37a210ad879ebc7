"""Options and output of verbs that run models on a text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from bitport.cli.common import UsageError, add_cache, add_device, count, location
from bitport.errors import ArgumentError
from bitport.evaluate.directories import Evaluation, How
from bitport.evaluate.perplexity import check_windows


def add_text(verb: argparse.ArgumentParser, *, required: bool) -> None:
    verb.add_argument("--text", type=location, required=required, metavar="FILE", help="a text file in UTF-8")
    verb.add_argument(
        "--window", type=count, default=512, metavar="N", help="tokens that the model sees at once (default: 512)"
    )
    verb.add_argument(
        "--stride",
        type=count,
        metavar="N",
        help="tokens from one window to the next; fewer than --window give each token more context (default: window)",
    )
    verb.add_argument(
        "--max-tokens", type=count, metavar="N", help="use only the first N tokens of the text (default: all)"
    )
    verb.add_argument("--batch", type=count, default=1, metavar="N", help="windows to run at once (default: 1)")
    verb.add_argument(
        "--scratch",
        type=location,
        metavar="DIR",
        help="folder for a file with the logits of the first model, with which others are compared (default: the "
        "system's temporary folder)",
    )
    add_cache(verb)
    add_device(verb)


def how_of(args: argparse.Namespace, new_tokens: int = 0) -> How:
    try:
        check_windows(args.window, args.stride, args.batch)
    except ArgumentError as error:
        raise UsageError(str(error)) from error
    return How(
        window=args.window,
        stride=args.stride,
        max_tokens=args.max_tokens,
        batch=args.batch,
        device=args.device,
        dtype=args.dtype,
        scratch=args.scratch,
        new_tokens=new_tokens,
        kv_cache=args.kv_cache,
    )


def tell(line: str) -> None:
    print(line, file=sys.stderr)


def as_data(row: Evaluation) -> dict[str, Any]:
    """The row as JSON-compatible data; layers have the form of quantize's report."""
    return {**dataclasses.asdict(dataclasses.replace(row, layers=None)), "layers": row.layers and row.layers.as_data()}


def as_note(rows: Sequence[Evaluation], args: argparse.Namespace) -> str:
    what = f"{rows[0].scored} tokens scored, windows of {args.window}"
    what += f"; keys and values in {args.kv_cache}" if args.kv_cache else ""
    return what + ("; KL in nats per token, from the first model" if len(rows) > 1 else "")
