"""``bitport quantize``: quantize a model on disk into a bitport checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from bitport.algorithms import TRANSFORMS, algorithm
from bitport.algorithms.mixed import CANDIDATES, COSTS, check_size, mixed
from bitport.algorithms.solving import uses_data
from bitport.api import quantize_
from bitport.calibrate.processes import Processes
from bitport.checkpoint import save
from bitport.checkpoint.output import check_free
from bitport.checkpoint.side_files import class_name
from bitport.checkpoint.source import Source, check_apart
from bitport.cli import calibration, streamed
from bitport.cli.common import (
    UsageError,
    add_dtype,
    add_shard_size,
    add_verb,
    location,
    option,
    read_text,
    scheme_name,
    show,
)
from bitport.cli.naming import named, naming_notes
from bitport.cli.reports import add_report, check_reports, write_reports
from bitport.errors import ArgumentError
from bitport.integrations.components import spared
from bitport.integrations.huggingface import cast_parameters, empty_model, named_model, whole_model
from bitport.nn.targets import find_targets
from bitport.report import Report
from bitport.report.page import page
from bitport.schemes import Recipe, Rule
from bitport.schemes.recipe import DEFAULT_KINDS


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "quantize",
        run,
        "Quantize a model on disk. Reads a Hugging Face directory or a safetensors file one tensor at a time and "
        "writes a bitport checkpoint; config.json and the tokenizer are copied.",
        "llama --scheme int4 -o llama-int4",
        "llama --scheme int4 --rule 'lm_head=int8' --rule '*.embed_tokens=int8' -o llama-mixed",
        "llama --recipe recipe.json -o llama-mixed --dry-run",
        "llama --scheme int3 --algorithm gptq --data wiki.txt -o llama-int3",
        "llama --scheme int8-static --data wiki.txt -o llama-int8",
        "llama --scheme auto --bits 3.5 --algorithm gptq --data wiki.txt -o llama-3.5",
    )
    verb.add_argument("source", type=location, help="a Hugging Face directory, or a safetensors file")
    verb.add_argument(
        "--scheme",
        type=lambda text: text if text == "auto" else scheme_name(text),
        help="the scheme of all linear layers and experts, such as int4 or int4-g32 (docs/choosing.md); auto: one of "
        "--candidates for each weight, so that predictions on --data change least within --bits",
    )
    verb.add_argument(
        "--bits", type=float, metavar="N", help="with --scheme auto: bits per weight on average, scales included"
    )
    verb.add_argument(
        "--candidates",
        type=lambda text: tuple(map(scheme_name, text.split(","))),
        metavar="SCHEME,...",
        help=f"with --scheme auto: the schemes to choose from (default: {','.join(CANDIDATES)})",
    )
    verb.add_argument(
        "--cost",
        choices=COSTS,
        help="with --scheme auto: what a scheme costs a weight: fisher, how far predictions move, estimated from "
        "gradients; kl, the same by a run for each weight and scheme; output, how far its own outputs move "
        f"(default: {COSTS[0]})",
    )
    verb.add_argument("--recipe", type=location, metavar="FILE", help="a JSON file with rules (docs/formats.md)")
    verb.add_argument(
        "--rule",
        type=rule,
        action="append",
        default=[],
        metavar="PATTERN=SCHEME",
        help='the scheme of modules whose name matches a glob (or, after "re:", a regular expression); "skip" leaves '
        "them as they are. May be given several times: the first match decides, then --scheme",
    )
    verb.add_argument(
        "--algorithm",
        type=option(algorithm),
        default="rtn",
        metavar="NAME[+NAME..]",
        help="how weights are rounded: rtn (to nearest, the default), clip (the best of several ranges), hqq (a fit "
        "for small errors of most), gptq (keeps the outputs on --data close), signround (improves on gptq, slower). "
        f"Transforms of the model may come first: {', '.join(TRANSFORMS)}, as in awq+gptq",
    )
    streamed.add_arguments(verb)
    verb.add_argument("-o", "--output", type=location, metavar="DIR", help="the directory to write")
    add_shard_size(verb, "")
    add_dtype(verb, "cast float tensors to this dtype first (default: as they are)")
    verb.add_argument("--overwrite", action="store_true", help="replace the checkpoint in the output directory")
    verb.add_argument("--dry-run", action="store_true", help="print what would be done, and write nothing")
    verb.add_argument(
        "--in-memory",
        action="store_true",
        help="load the whole model with transformers instead of reading its files piece by piece",
    )
    verb.add_argument("--verbose", action="store_true", help="one line per tensor")
    add_report(verb)


def rule(text: str) -> tuple[str, str]:
    pattern, equals, named = text.rpartition("=")
    if not equals or not pattern or not named:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=SCHEME, such as 'lm_head=int8' or '*.mlp.*=skip'")
    return pattern, named if named == "skip" else scheme_name(named)


def run(args: argparse.Namespace) -> int:
    with Processes.of_torchrun() as processes:
        return quantized(args, processes)


def quantized(args: argparse.Namespace, processes: Processes) -> int:
    recipe = None if args.scheme == "auto" else recipe_of(args)
    check_reports(args)
    if not args.dry_run:
        _check_output(args)
    _check_auto(args)
    runs = recipe is None or uses_data(args.algorithm, recipe)
    whole = recipe is None or args.in_memory
    streamed.check_options(args, runs=runs, in_memory=whole)
    args.device = streamed.device_of(args, processes)
    if (part := class_name(args.source)) and (runs or whole):
        raise ArgumentError(
            f"{args.source} is a {part} of diffusers, which is quantized from its files and without data; its pipeline "
            f"runs where inputs are looked at: quantize_(pipe.transformer, .., calibrate=lambda model: pipe(prompt)), "
            f"then save_model of bitport.integrations.huggingface"
        )
    if processes.world > 1 and (whole or not runs):
        raise ArgumentError(
            f"several processes ({processes.world}) share the batches on which a model is run from its files, as for "
            "gptq; start only one for anything else"
        )
    if recipe is None or args.in_memory:
        report = in_memory(args, recipe, runs)
    elif runs:
        report = streamed.calibrated(args, recipe, processes)
    else:
        report = from_files(args, recipe, part)
    if processes.first:
        _show(args, report)
    return 0


def _check_auto(args: argparse.Namespace) -> None:
    auto = args.scheme == "auto"
    if auto != (args.bits is not None):
        raise UsageError("--scheme auto and --bits belong together: the bits that a weight may take on average")
    if auto and (args.dry_run or args.recipe):
        raise UsageError("--scheme auto measures the model: give no --recipe and no --dry-run")
    if not auto and args.candidates:
        raise UsageError("--candidates goes with --scheme auto and --bits, which choose among them")
    if not auto and args.cost:
        raise UsageError("--cost goes with --scheme auto and --bits, which choose by it")


def _show(args: argparse.Namespace, report: Report) -> None:
    end = "dry run: nothing was written" if args.dry_run else f"written to {args.output}"
    output = None if args.output is None else str(args.output)
    data = {"dry_run": args.dry_run, "output": output, **report.as_data()}
    show(args, data, f"{report if args.verbose else report.summary()}\n{end}")
    write_reports(args, lambda command: page(report, args.source.name, command), data)


def from_files(args: argparse.Namespace, recipe: Recipe, part: str | None) -> Report:
    """Quantize tensor by tensor, without running the model. ``part``: its class, if it is a component of diffusers."""
    Source(args.source)  # raises for broken files, which would otherwise become a note
    model, notes = named(args.source)
    notes += ["what each weight is was guessed from its name"] if notes else []
    advice = "--in-memory quantizes the model in the form it has"
    if part:
        advice = f"{part}.from_pretrained(.., quantization_config=BitportConfig(..)) quantizes the form it has"
        if model is None:
            notes.append("what this model keeps in float32 is not known, so that is quantized too")
        else:
            recipe = spared(recipe, model, find_targets(model))
    notes += naming_notes(model, args.source, lambda made: Source(args.source, arrangement=made).tensors, advice)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return streamed.without_data(args, recipe, model)


def in_memory(args: argparse.Namespace, recipe: Recipe | None, runs: bool) -> Report:
    """Quantize the model as loaded by transformers: for models whose files name or split their weights differently, and
    for algorithms that change the whole model. ``recipe`` None: find a mixed-precision one first. ``runs``: whether
    the model is run on data."""
    files = Source(args.source)
    if args.dry_run and recipe is not None:
        model = empty_model(args.source) if runs else named_model(args.source)
        if args.dtype is not None:
            cast_parameters(model, args.dtype)
        return quantize_(model, recipe, algorithm=args.algorithm, measure=False)
    model = whole_model(args.source, args.dtype, causal=runs)
    if args.device.type != "cpu":
        model.to(args.device)
        model.tie_weights()  # PyTorch unties parameters that move to a device from outside
    candidates = args.candidates or CANDIDATES
    options = {"bits": args.bits, "rules": [Rule(*given) for given in args.rule]}
    if recipe is None:
        check_size(model, candidates, **options)
    else:
        recipe.resolve(find_targets(model))  # report rules that match nothing before preparing data
    batches = [each.to(args.device) for each in calibration.batches(args, model)] if runs else None
    if recipe is None:
        assert batches is not None
        cost = args.cost or COSTS[0]
        recipe = mixed(model, candidates, calibrate=batches, algorithm=args.algorithm, cost=cost, **options)
    data = batches if uses_data(args.algorithm, recipe) else None
    report = quantize_(model, recipe, algorithm=args.algorithm, calibrate=data)
    if batches is not None:
        report = dataclasses.replace(report, calibration=calibration.described(args))
    save(model, args.output, overwrite=args.overwrite, shard_size=args.shard_size, carry=files.others(args.dtype))
    return report


def recipe_of(args: argparse.Namespace) -> Recipe:
    rules = [Rule(*given) for given in args.rule]
    if args.recipe and args.scheme:
        raise UsageError("give --scheme or --recipe, not both; rules of --rule come before those of either")
    if args.recipe:
        rules += Recipe.from_json(read_text(args.recipe)).rules
    elif args.scheme:
        rules += [Rule("*", args.scheme, DEFAULT_KINDS)]
    if not rules:
        raise UsageError("say how to quantize: --scheme int4, --recipe FILE or --rule PATTERN=SCHEME")
    return Recipe(tuple(rules))


def _check_output(args: argparse.Namespace) -> None:
    if args.output is None:
        raise UsageError("say where to write: -o DIR, or --dry-run to write nothing")
    check_apart(args.source, args.output)
    check_free(args.output, resume=args.resume, overwrite=args.overwrite)
