"""``bitport quantize`` from files to files: tensor by tensor, or block by block with calibration data."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitport.calibrate.processes import Processes
from bitport.checkpoint.quantize import ADVICE, QuantizeRun, estimate, planned
from bitport.checkpoint.source import Source
from bitport.cli import calibration, common
from bitport.cli.common import UsageError, count, location, nbytes, seed
from bitport.cli.dry_run import predicted
from bitport.errors import CheckpointError
from bitport.integrations.huggingface import empty_model
from bitport.integrations.transformers_names import arrangement
from bitport.ops.device import computing_device
from bitport.report import Report
from bitport.report.memory import Memory
from bitport.schemes import Recipe
from bitport.stream import KEEP, Stream

TOKENS = 65536
ON_DATA, FROM_FILES = ("data", "data_tokens", "data_seed", "activations"), ("resume", "memory_limit", "activations")
"""Options that only apply if the model runs on data, and if it is streamed from its files."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--data",
        type=location,
        metavar="PATH",
        help='calibration data: a UTF-8 text, a .jsonl file (the "text" of each line), a directory of these or of '
        ".parquet or .arrow files, or token ids in a .safetensors or .npy file (default: text that the model "
        "generates token by token, which takes long)",
    )
    verb.add_argument(
        "--data-tokens", type=count, metavar="N", help=f"use at most N tokens of the data (default: {TOKENS})"
    )
    verb.add_argument(
        "--data-seed",
        type=seed,
        metavar="N",
        help="pick the tokens at random, with this seed (default: the first ones)",
    )
    verb.add_argument(
        "--activations",
        choices=KEEP,
        help=f"where to keep the activations between two blocks of the model (default: {KEEP[0]})",
    )
    verb.add_argument(
        "--memory-limit",
        type=nbytes,
        metavar="SIZE",
        help="refuse to start a run that needs more memory than this, such as 4GiB (default: what the machine allows)",
    )
    verb.add_argument(
        "--device",
        type=common.computing_device,
        default=torch.device("cpu"),
        help="a torch device to run the model and choose codes on, such as cuda:0 or xpu (default: cpu). Without a "
        "number, several processes take one each",
    )
    verb.add_argument("--resume", action="store_true", help="continue an interrupted run in the output directory")


def check_options(args: argparse.Namespace, *, runs: bool, in_memory: bool) -> None:
    """Raise ArgumentError for an option that would have no effect; fill in defaults of the others."""
    if not runs and (given := _given(args, ON_DATA)):
        raise UsageError(
            f"{given}: for algorithms that look at inputs and schemes with a static input scale, not for "
            f"{args.algorithm.name} without such"
        )
    if in_memory and (given := _given(args, FROM_FILES)):
        why = "--scheme auto" if args.scheme == "auto" else "--in-memory"
        raise UsageError(f"{given}: not with {why}, which keeps the whole model in memory from beginning to end")
    args.data_tokens = args.data_tokens or TOKENS
    args.activations = args.activations or KEEP[0]


def device_of(args: argparse.Namespace, processes: Processes) -> torch.device:
    """The device of --device, as far as possible another one for each process of this machine unless it has a number;
    DeviceError if it is not here."""
    given: torch.device = args.device
    found = computing_device(given)
    if processes.world == 1 or given.type == "cpu" or given.index is not None:
        return found
    module = getattr(torch, given.type, None)
    count = module.device_count() if hasattr(module, "device_count") else 1
    return torch.device(given.type, int(os.environ["LOCAL_RANK"]) % count)


def _given(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The given ones of the options ``names``, as text. 0 counts as given; None and the False of a flag do not."""
    held = [name for name in names if getattr(args, name) is not None and getattr(args, name) is not False]
    return ", ".join(f"--{name.replace('_', '-')}" for name in held)


def calibrated(args: argparse.Namespace, recipe: Recipe, processes: Processes) -> Report:
    """Quantize by running the model on data. Of several processes only the first prints messages."""
    model = empty_model(args.source)
    if args.dry_run:
        return _predicted(args, recipe, model)
    if args.data is None:
        calibration.check_loadable(args)
        _rehearsed(args, recipe, empty_model(args.source))  # report errors before the model generates text
    if processes.first:
        print(f"calibration: {calibration.described(args)}", file=sys.stderr)
    stream = _stream(args, recipe, model, calibration.batches(args, model), args.output, processes)
    if processes.first:
        if not stream.output.fresh:
            steps = f"{stream.output.resumed} of {len(stream.walk.order) + 1}" if stream.walk else "all"
            print(f"resumed: {steps} steps are done", file=sys.stderr)
        _tell(stream.memory)
    return dataclasses.replace(stream.run(), calibration=calibration.described(args))


def without_data(args: argparse.Namespace, recipe: Recipe, model: Any | None) -> Report:
    """Quantize without data. ``model``: the empty model of the source, if it could be built."""
    known = _known(args.source, model)
    if args.dry_run:
        files = Source(args.source)
        files.ask(**known)
        report = predicted(files, recipe, args.dtype, args.algorithm)
        memory = estimate(files, planned(files, recipe), args.dtype, args.algorithm, args.device)
        memory.check(args.memory_limit, ADVICE)
        _tell(memory)
        return dataclasses.replace(report, memory_estimate=memory.total)
    limits = {"memory_limit": args.memory_limit, "resume": args.resume, "overwrite": args.overwrite}
    how = {"algorithm": args.algorithm, "dtype": args.dtype, "shard_size": args.shard_size, "device": args.device}
    run = QuantizeRun(args.source, args.output, recipe, **how, **limits, **known)
    if run.output.resumed:
        done, every = len(run.output.names), len(run.files.stored)
        print(f"resumed: {done} of {every} tensors are done", file=sys.stderr)
    _tell(run.memory)
    return run.run()


def _known(source: Path, model: Any | None) -> dict[str, Any]:
    """Arguments of QuantizeRun about the model, including its arrangement, unless the files cannot be arranged so."""
    if model is None:
        return {"model": None}
    try:
        Source(source, arrangement=arrangement(model))
    except CheckpointError:  # already reported in a note
        return {"model": model}
    return {"model": model, "arrangement": arrangement(model)}


def _tell(memory: Memory | None) -> None:
    if memory:
        print(f"memory: {memory}", file=sys.stderr)


def _predicted(args: argparse.Namespace, recipe: Recipe, model: Any) -> Report:
    """The report of a run with --data-tokens tokens, including its memory estimate, without running it."""
    memory = _rehearsed(args, recipe, model).memory
    assert memory is not None
    _tell(memory)
    files = Source(args.source, arrangement=arrangement(model))
    files.ask(model)
    report = predicted(files, recipe, args.dtype, args.algorithm)
    return dataclasses.replace(report, memory_estimate=memory.total)


def _rehearsed(args: argparse.Namespace, recipe: Recipe, model: Any) -> Stream:
    """Plan a run with --data-tokens tokens and check that it fits in memory."""
    with tempfile.TemporaryDirectory() as folder:
        return _stream(args, recipe, model, calibration.placeholders(args, model), Path(folder))


def _stream(
    args: argparse.Namespace,
    recipe: Recipe,
    model: Any,
    batches: Sequence[Any],
    target: Path,
    processes: Processes | None = None,
) -> Stream:
    return Stream(
        model,
        args.source,
        target,
        recipe,
        batches=batches,
        algorithm=args.algorithm,
        dtype=args.dtype,
        device=args.device,
        activations=args.activations,
        memory_limit=args.memory_limit,
        resume=args.resume,
        overwrite=args.overwrite,
        shard_size=args.shard_size,
        processes=processes,
        arrangement=arrangement(model),
    )
