"""``bitport export``: compile a language model to run without Python, or export it for another runtime."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bitport.checkpoint.dtypes import name_of
from bitport.cli.common import UsageError, add_dtype, add_verb, cache_name, count, ending, location, show
from bitport.errors import ArgumentError
from bitport.export import executorch, onnx, package
from bitport.export.level import LEVELS
from bitport.export.package import target_of
from bitport.integrations.huggingface import load_model
from bitport.integrations.program import causal_lm
from bitport.integrations.runtimes import with_past, with_state
from bitport.report.text import size, table

OUTPUTS = (
    (("-o", "--output"), ".pt2", "a package", "the package to write, a .pt2 file"),
    (("--executorch",), ".pte", "a program of ExecuTorch", "a .pte program to write, lowered to XNNPACK"),
    (("--onnx",), ".onnx", "an ONNX model", "an .onnx model to write, for ONNX Runtime"),
)
"""(options, suffix, what the file is, help)."""


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "export",
        run,
        "Compile a language model into a package that runs without Python. The package has two methods, prefill for a "
        "prompt and decode for one token; the caller holds the key-value cache. Or write the model for ExecuTorch or "
        "ONNX Runtime, without rounding again. See docs/deploy.md.",
        "llama-int4 -o llama.pt2",
        "llama-int4 -o llama.pt2 --weights llama.weights --level x86-64-v3",
        "llama-int4-int8 --executorch llama.pte",
        "llama-int4 --onnx llama.onnx",
    )
    verb.add_argument("directory", type=location, help="a Hugging Face directory, quantized by bitport or not")
    output = verb.add_mutually_exclusive_group(required=True)
    for options, suffix, what, about in OUTPUTS:
        output.add_argument(*options, type=ending(suffix, what), metavar="FILE", help=about)
    verb.add_argument("--weights", metavar="NAME", help="put the weights of a package into a file NAME next to it")
    verb.add_argument(
        "--capacity",
        type=count,
        metavar="N",
        help="tokens that the cache can hold (default: as many as the model supports, at most 2048); ONNX models have "
        "no limit",
    )
    verb.add_argument(
        "--kv-cache",
        type=cache_name,
        metavar="FORMAT",
        help="quantize the key-value cache of a package, such as int8 or int4-g32 (docs/kv-cache.md; default: floats)",
    )
    verb.add_argument(
        "--level", choices=LEVELS, help="instruction set to compile a package for (default: that of this machine)"
    )
    add_dtype(verb, "dtype to compute in (default: that of the files; float32 in other runtimes)")
    verb.add_argument(
        "--standard", action="store_true", help="use only standard operators in an ONNX model, for other runtimes"
    )
    verb.add_argument("--overwrite", action="store_true", help="replace the output file and that of --weights")


def run(args: argparse.Namespace) -> int:
    target: Path = args.output or args.executorch or args.onnx
    beside = target.parent / (args.weights or "")
    if there := [path for path in (target, beside) if path.exists() and path != target.parent and not args.overwrite]:
        raise ArgumentError(f"{there[0]} exists already; --overwrite replaces it")
    if args.standard and not args.onnx:
        raise UsageError("--standard goes with --onnx")
    if not args.output:
        return _for_runtime(args, target)
    target_of(args.output, args.weights)
    model = load_model(args.directory, dtype=args.dtype)
    methods, meta = causal_lm(model, args.capacity, kv_cache=args.kv_cache)
    print(f"compiling {', '.join(methods)}: a minute or so", file=sys.stderr)
    manifest = package(methods, args.output, weights=args.weights, level=args.level, meta=meta)
    where = args.output.with_name(args.weights) if args.weights else args.output
    nbytes = os.path.getsize(args.output)
    data = {"output": str(args.output), "bytes": nbytes, "manifest": manifest}
    found = manifest["methods"].items()
    rows = [[name, size(entry["code"]["size"]), entry["constants"]["count"]] for name, entry in found]
    text = table(["method", "code", "weights used"], rows)
    stored = f"weights: {size(manifest['weights']['size'])} in {where}"
    show(args, data, f"{text}\n{stored}\nwritten to {args.output}, {size(nbytes)}")
    return 0


def _for_runtime(args: argparse.Namespace, target: Path) -> int:
    unfit = {"--weights": args.weights, "--level": args.level, "--kv-cache": args.kv_cache}
    unfit |= {"--capacity": args.capacity if args.onnx else None}
    if given := [option for option, value in unfit.items() if value is not None]:
        raise UsageError(f"{', '.join(given)}: not for {'ONNX' if args.onnx else 'ExecuTorch'}, leave it out")
    if args.dtype not in (None, torch.float32):
        raise UsageError(f"ExecuTorch and ONNX Runtime compute in float32, not {name_of(args.dtype)}")
    model = load_model(args.directory, dtype=torch.float32)
    print("exporting: a minute or so", file=sys.stderr)
    if args.onnx:
        method, inputs, outputs = with_past(model)
        named: dict[str, Any] = {"inputs": inputs, "outputs": outputs, "standard": args.standard}
        report = onnx(method.module, method.args, target, method.dynamic_shapes, **named)
        rows = [[name, found, ""] for name, found in report["operators"].items()]
    else:
        method = with_state(model, args.capacity)
        report = executorch(method.module, method.args, target, method.dynamic_shapes)
        rows = [[name, found, "XNNPACK"] for name, found in report["taken"].items()]
        rows += [[name, found, ""] for name, found in report["left"].items()]
    files = ", ".join(f"{target.with_name(name)} ({size(nbytes)})" for name, nbytes in report["files"].items())
    show(args, {"output": str(target), **report}, f"{table(['operator', 'count', 'by'], rows)}\nwritten to {files}")
    return 0
