"""``bitport export``: a language model as a program that runs without Python."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bitport.cli.common import DTYPES, add_verb, count, dtype_of, show
from bitport.errors import ArgumentError
from bitport.export import package
from bitport.export.compile import LEVELS
from bitport.integrations.huggingface import load_model
from bitport.integrations.program import causal_lm
from bitport.report.text import size, table


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "export",
        run,
        "Compile a language model into a package that runs without Python. It has two methods, prefill for a prompt "
        "and decode for one token, and keeps keys and values in tensors of the caller; see docs/deploy.md.",
        "llama-int4 -o llama.pt2",
        "llama-int4 -o llama.pt2 --weights llama.weights --level x86-64-v3",
    )
    verb.add_argument("directory", type=Path, help="a Hugging Face directory, quantized by bitport or not")
    verb.add_argument("-o", "--output", type=Path, required=True, help="the package to write, a .pt2 file")
    verb.add_argument("--weights", help="put the weights into a file of this name beside the package")
    verb.add_argument(
        "--capacity", type=count, help="positions of the cache (default: what the model knows, at most 2048)"
    )
    verb.add_argument("--level", choices=LEVELS, help="instruction set to compile for (default: that of this machine)")
    verb.add_argument("--dtype", choices=DTYPES, help="dtype to compute in (default: that of the files)")
    verb.add_argument("--overwrite", action="store_true", help="replace the output file")


def run(args: argparse.Namespace) -> int:
    if args.output.exists() and not args.overwrite:
        raise ArgumentError(f"{args.output} exists already; --overwrite replaces it")
    model = load_model(args.directory, dtype=dtype_of(args))
    methods, meta = causal_lm(model, args.capacity)
    print(f"compiling {', '.join(methods)}: a minute or so", file=sys.stderr)
    manifest = package(methods, args.output, weights=args.weights, level=args.level, meta=meta)
    where = args.output.with_name(args.weights) if args.weights else args.output
    nbytes = os.path.getsize(args.output)
    data = {"output": str(args.output), "bytes": nbytes, "manifest": manifest}
    found = manifest["methods"].items()
    rows = [[name, size(entry["code"]["size"]), len(entry["constants"])] for name, entry in found]
    text = table(["method", "code", "weights used"], rows)
    stored = f"weights: {size(manifest['weights']['size'])} in {where}"
    show(args, data, f"{text}\n{stored}\nwritten to {args.output}, {size(nbytes)}")
    return 0
