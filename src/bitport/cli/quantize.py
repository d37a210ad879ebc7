"""``bitport quantize``: files in, a bitport checkpoint out, tensor by tensor."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bitport.checkpoint import plan_files, quantize_files
from bitport.checkpoint.manifest import NAME as MANIFEST
from bitport.cli.common import DTYPES, add_verb, dtype_of, read_text, show
from bitport.errors import ArgumentError, RecipeError
from bitport.schemes import Recipe, Rule
from bitport.schemes.recipe import DEFAULT_KINDS


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "quantize",
        run,
        "Quantize a model on disk. Reads a Hugging Face directory or a safetensors file one tensor at a time and writes a "
        "bitport checkpoint; config.json and the tokenizer come along.",
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
        help='for modules whose name fits the glob (or, after "re:", the regular expression); "skip" leaves them as they '
        "are. Rules come before --scheme, in the order given",
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
    recipe = recipe_of(args)
    if args.dry_run:
        report = plan_files(args.source, recipe, dtype=dtype_of(args))
    else:
        _check_output(args)
        report = quantize_files(args.source, args.output, recipe, dtype=dtype_of(args))
    return 0


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
