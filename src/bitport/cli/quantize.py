"""``bitport quantize``: files in, a bitport checkpoint out, tensor by tensor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from bitport.checkpoint import plan_files, quantize_files
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.checkpoint.source import Source
from bitport.cli.common import DTYPES, add_verb, dtype_of, read_text, show
from bitport.errors import ArgumentError, RecipeError
from bitport.report import LayerReport, Report
from bitport.report.text import size, table
from bitport.schemes import Recipe, Rule, Scheme, Target
from bitport.schemes.recipe import DEFAULT_KINDS


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "quantize",
        run,
        "Quantize a model on disk. Reads a Hugging Face directory or a safetensors file one tensor at a time and "
        "writes a bitport checkpoint; config.json and the tokenizer come along.",
        "llama --scheme int4 -o llama-int4",
        "llama --scheme int4 --rule 'lm_head=int8' --rule '*.embed_tokens=int8' -o llama-mixed",
        "llama --recipe recipe.json -o llama-mixed --dry-run",
    )
    verb.add_argument("source", type=Path, help="a Hugging Face directory, or a safetensors file")
    verb.add_argument("--scheme", help="for all linear layers and experts, such as int4 or int4-g32 (bitport.PRESETS)")
    verb.add_argument("--recipe", type=Path, help="a JSON file with rules, as Recipe.to_json writes")
    verb.add_argument(
        "--rule",
        type=rule,
        action="append",
        default=[],
        metavar="PATTERN=SCHEME",
        help='for modules whose name fits the glob (or, after "re:", the regular expression); "skip" leaves them as '
        "they are. Rules come before --scheme, in the order given",
    )
    verb.add_argument("-o", "--output", type=Path, help="the directory to write")
    verb.add_argument("--dtype", choices=DTYPES, help="cast float tensors to this dtype first (default: keep)")
    verb.add_argument("--overwrite", action="store_true", help="replace the checkpoint in the output directory")
    verb.add_argument("--dry-run", action="store_true", help="print what would be done, and write nothing")
    verb.add_argument("--verbose", action="store_true", help="one line per tensor")


def rule(text: str) -> tuple[str, str]:
    pattern, equals, scheme = text.rpartition("=")
    if not equals or not pattern or not scheme:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=SCHEME, such as 'lm_head=int8' or '*.mlp.*=skip'")
    return pattern, scheme


def run(args: argparse.Namespace) -> int:
    recipe, dtype = recipe_of(args), dtype_of(args)
    if args.dry_run:
        report = predicted(args.source, recipe, dtype)
    else:
        _check_output(args)
        report = quantize_files(args.source, args.output, recipe, dtype=dtype)
    verb = "would be written" if args.dry_run else f"written to {args.output}"
    output = None if args.output is None else str(args.output)
    data = {"dry_run": args.dry_run, "output": output, **json.loads(report.to_json())}
    show(args, data, f"{report if args.verbose else summary(report)}\n{verb}")
    return 0


def predicted(source: Path, recipe: Recipe, dtype: torch.dtype | None) -> Report:
    """The report of quantize_files without its errors, from the headers of the files alone."""
    plan = plan_files(source, recipe)
    files = Source(source)
    targets = {target.name: target for target in files.targets()}
    layers: dict[str, LayerReport] = {}
    before = after = 0
    for name, held in files.tensors.items():
        if name in files.tied:
            continue
        count = math.prod(held.shape)
        cast = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
        nbytes, kept = count * held.dtype.itemsize, count * cast.itemsize
        if name in targets:
            choice = plan[name]
            if choice.scheme is not None:
                kept = _quantized_bytes(targets[name], choice.scheme, cast)
            scheme = None if choice.scheme is None else str(choice.scheme)
            layers[name] = LayerReport(name, scheme, choice.reason, nbytes, kept)
        before, after = before + nbytes, after + kept
    for alias, name in files.tied.items():
        if alias in targets:
            layers[alias] = dataclasses.replace(layers[name], name=alias, reason=plan[alias].reason)
    return Report(tuple(layers[choice.name] for choice in plan.choices), before, after)


def _quantized_bytes(target: Target, scheme: Scheme, dtype: torch.dtype) -> int:
    batch = math.prod(target.shape[:-2]) if target.kind == "experts" else 1
    rows, columns = target.shape[-2:] if target.kind == "experts" else (target.shape[0], math.prod(target.shape[1:]))
    return batch * scheme.weight.nbytes(rows, columns, dtype)


def summary(report: Report) -> str:
    """One line per scheme, and per reason of what is left."""
    groups: dict[tuple[str, str], list[LayerReport]] = {}
    for layer in report.layers:
        groups.setdefault((layer.scheme or "-", "" if layer.scheme else layer.reason), []).append(layer)
    rows = []
    for (scheme, reason), layers in groups.items():
        errors = [layer.sqnr for layer in layers if layer.sqnr is not None]
        sizes = f"{size(sum(x.bytes_before for x in layers))} -> {size(sum(x.bytes_after for x in layers))}"
        rows.append((scheme, f"{len(layers)}", sizes, f"{min(errors):.1f} dB" if errors else "", reason))
    total = f"all tensors: {size(report.bytes_before)} -> {size(report.bytes_after)}"
    return table(("scheme", "weights", "size", "lowest SQNR", "why not"), rows) + "\n" + total


def recipe_of(args: argparse.Namespace) -> Recipe:
    rules = [Rule(*given) for given in args.rule]
    if args.recipe and args.scheme:
        raise RecipeError("give --scheme or --recipe, not both; rules of --rule come before those of either")
    if args.recipe:
        rules += Recipe.from_json(read_text(args.recipe)).rules
    elif args.scheme:
        rules += [Rule("*", args.scheme, DEFAULT_KINDS)]
    if not rules:
        raise RecipeError("say how to quantize: --scheme int4, --recipe FILE or --rule PATTERN=SCHEME")
    return Recipe(tuple(rules))


def _check_output(args: argparse.Namespace) -> None:
    if args.output is None:
        raise ArgumentError("say where to write: -o DIR, or --dry-run to write nothing")
    if args.output.exists() and not args.output.is_dir():
        raise ArgumentError(f"{args.output} is a file; give a directory")
    if (args.output / MANIFEST).exists() and not args.overwrite:
        raise ArgumentError(f"{args.output} holds a checkpoint already; --overwrite replaces it")
