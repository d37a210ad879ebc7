"""``bitport eval``: measure the quality of a model, by itself and against the original."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitport.cli.common import UsageError, add_verb, count, location, read_text, show
from bitport.cli.reports import add_report, check_reports, write_reports
from bitport.cli.texts import add_text, as_data, as_note, how_of, tell
from bitport.evaluate.columns import columns, lowest, task_columns
from bitport.evaluate.directories import Evaluation, evaluate_directories
from bitport.evaluate.page import page
from bitport.integrations.huggingface import load_model, load_tokenizer
from bitport.integrations.lm_eval import Scores, check_installed, run_tasks
from bitport.report.text import decibels, table


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "eval",
        run,
        "Measure how good a model is. Perplexity on a text; with --against, also the KL divergence of its predictions "
        "from those of the original, how often both predict the same token, and the error of every layer; with "
        "--tasks, scores of lm-evaluation-harness. One model is in memory at a time.",
        "llama-int4 --text wiki.txt",
        "llama-int4 --against llama --text wiki.txt --max-tokens 16384 --report quality.html",
        "llama-int4 --against llama --tasks arc_easy,hellaswag --limit 200",
    )
    verb.add_argument(
        "directory", type=location, metavar="DIR", help="a Hugging Face directory, quantized by bitport or not"
    )
    verb.add_argument("--against", type=location, metavar="ORIGINAL", help="the directory of the original model")
    verb.add_argument("--verbose", action="store_true", help="with --against: one line per layer")
    verb.add_argument("--tasks", type=names, default=(), metavar="NAME,..", help="tasks of lm-evaluation-harness")
    verb.add_argument(
        "--shots", type=int, metavar="N", help="examples in the prompts of the tasks (default: as each task says)"
    )
    verb.add_argument(
        "--limit", type=count, metavar="N", help="use only the first N documents of each task (default: all)"
    )
    verb.add_argument("--task-folder", type=location, metavar="DIR", help="a folder with more task files (YAML)")
    add_text(verb, required=False)
    add_report(verb)


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def run(args: argparse.Namespace) -> int:
    if args.text is None and not args.tasks:
        raise UsageError("say what to measure: --text FILE for perplexity, --tasks NAMES for tasks, or both")
    if args.kv_cache and (args.text is None or args.tasks):
        raise UsageError("--kv-cache applies to reading a text: give it with --text FILE and without --tasks")
    check_reports(args)
    if args.tasks:
        check_installed()
    directories = [args.directory] if args.against is None else [args.against, args.directory]
    scores: dict[str, Scores] = {}

    def run_its_tasks(model: Any, directory: str | Path) -> None:
        if args.tasks:
            options = {"batch": args.batch, "shots": args.shots, "limit": args.limit, "include": args.task_folder}
            scores[str(directory)] = run_tasks(model, load_tokenizer(directory), args.tasks, **options)

    rows: list[Evaluation] = []
    if args.text is None:
        for directory in directories:
            tell(f"evaluating {directory}")
            run_its_tasks(load_model(directory, args.device, args.dtype), directory)
    else:
        text, layers = read_text(args.text), args.against is not None
        rows = list(evaluate_directories(directories, text, how_of(args), layers=layers, tell=tell, also=run_its_tasks))
    found = [as_data(row) for row in rows] or [{"model": str(directory)} for directory in directories]
    models = [{**data, "tasks": scores.get(data["model"])} for data in found]
    data = {**models[-1], "original": models[0] if len(models) > 1 else None}
    parts = [_text(rows, args)] if rows else []
    parts += [table(*task_columns(scores))] if scores else []
    show(args, data, "\n\n".join(parts))
    write_reports(args, lambda command: page(rows, scores, str(args.text), how_of(args), command), data)
    return 0


def _text(rows: Sequence[Evaluation], args: argparse.Namespace) -> str:
    lines = [table(*columns(rows)), as_note(rows, args)]
    report = rows[-1].layers
    if report is not None and args.verbose:
        lines += ["", str(report)]
    elif report is not None:
        cells = [
            (layer.name, layer.scheme, decibels(layer.sqnr) or "-", decibels(layer.output_sqnr) or "-")
            for layer in lowest(rows[-1])
        ]
        header = (f"lowest of {len(report.quantized)} layers", "scheme", "SQNR", "SQNR of output")
        lines += ["", table(header, cells) if cells else "no layer could be compared"]
    return "\n".join(lines)
