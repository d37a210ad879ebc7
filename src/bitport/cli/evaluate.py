"""``bitport eval``: perplexity of one or several models."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from bitport.cli.common import add_device, add_verb, count, dtype_of, read_text, show
from bitport.errors import ArgumentError
from bitport.evaluate import perplexity
from bitport.evaluate.measure import size_of
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids
from bitport.report.text import size, table
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class Evaluation:
    model: str
    schemes: tuple[str, ...]
    nbytes: int
    bits_per_weight: float
    perplexity: float
    change_percent: float
    """Against the first model."""
    scored: int
    seconds: float


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "eval",
        run,
        "Measure perplexity on a text. Lower is better; several models give a table that compares each with the first.",
        "llama --text wiki.txt",
        "llama llama-int8 llama-int4 --text wiki.txt --max-tokens 16384",
    )
    verb.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="a Hugging Face directory")
    verb.add_argument("--text", type=Path, required=True, help="a text file in UTF-8")
    verb.add_argument("--window", type=count, default=512, help="tokens that the model sees at once (default: 512)")
    verb.add_argument(
        "--stride", type=count, help="tokens between starts of windows; a smaller one gives context (default: window)"
    )
    verb.add_argument("--max-tokens", type=count, help="take only the first N tokens of the text (default: all)")
    verb.add_argument("--batch", type=count, default=1, help="windows to run at once (default: 1)")
    add_device(verb)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.text)
    rows: list[Evaluation] = []
    for directory in args.directories:
        print(f"evaluating {directory}", file=sys.stderr)
        rows.append(_evaluate(directory, text, args, rows[0].perplexity if rows else None))
    data = [dataclasses.asdict(row) for row in rows]
    cells = [
        (
            row.model,
            ", ".join(row.schemes) or "-",
            size(row.nbytes),
            f"{row.bits_per_weight:.2f}",
            f"{row.perplexity:.4f}",
            f"{row.change_percent:+.2f} %",
        )
        for row in rows
    ]
    text = table(("model", "schemes", "size", "bits/weight", "perplexity", "change"), cells)
    show(args, data, f"{text}\n{rows[0].scored} tokens scored, windows of {args.window}")
    return 0


def _evaluate(directory: Path, text: str, args: argparse.Namespace, base: float | None) -> Evaluation:
    model = load_model(directory, args.device, dtype_of(args))
    positions = getattr(model.config, "max_position_embeddings", args.window)
    if args.window > positions:
        raise ArgumentError(
            f"{directory} knows {positions} positions; --window {args.window} is more, give at most that"
        )
    tokens = token_ids(load_tokenizer(directory), text)[: args.max_tokens]
    start = time.perf_counter()
    result = perplexity(logits_of(model), tokens, window=args.window, stride=args.stride, batch=args.batch)
    seconds = time.perf_counter() - start
    schemes = dict.fromkeys(str(param.scheme) for param in model.parameters() if isinstance(param, QTensor))
    measured = size_of(model)
    return Evaluation(
        str(directory),
        tuple(schemes),
        measured.nbytes,
        measured.bits_per_weight,
        result.value,
        100 * (result.value / (base or result.value) - 1),
        result.scored,
        seconds,
    )
