"""Build the program as a package, with a file of inputs and eager-mode results for each method.

``python -m bench.voxtral.build int4 FOLDER``, in a separate process so that its memory is released.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import bitport
from bench.voxtral.program import VOXTRAL, Program, Sizes, inputs, module_of, program
from bitport.export import Method, package
from bitport.export.trace import dense, exported
from bitport.report.memory import peak
from bitport.schemes import preset

PARTS = ("audio_encoder", "token_embedding", "text_decoder")
BASE = "bf16"
PREPACKED = "bf16-prepacked"
"""bf16 as compiled by torch with freezing: weights in the order of oneDNN's kernels."""
PROGRAM = "program.pt2"
FREEZING = {"freezing": True, "aot_inductor.package": True, "cpp.dynamic_threads": True}
CPU = torch.device("cpu")
SIZES = ("frames", "audio_layers", "layers", "words")
"""Sizes that the command line may change."""


def schemes_of(name: str) -> dict[str, str]:
    """Part -> scheme, from one for all three parts, or three joined by "+"."""
    given = (BASE if name == PREPACKED else name).split("+")
    if len(given) not in (1, len(PARTS)):
        raise SystemExit(f"{name!r}: give one scheme, or one for each of {', '.join(PARTS)} with '+' between them")
    return dict(zip(PARTS, given * len(PARTS) if len(given) == 1 else given, strict=False))


def built(sizes: Sizes, name: str, algorithm: str = "hqq", device: torch.device = CPU) -> Program:
    """Build the program, quantizing each layer as soon as it has its weights."""
    schemes = schemes_of(name)

    def treat(layer: str, module: nn.Module) -> None:
        scheme = schemes[layer.partition(".")[0]]
        if scheme == BASE or not isinstance(module, (nn.Linear, nn.Embedding)):
            return
        chosen = preset(scheme)
        if isinstance(module, nn.Embedding):  # a lookup has no input to round
            chosen = dataclasses.replace(chosen, act="", static=False)
        bitport.quantize_(
            nn.ModuleDict({"it": module}), {"it": chosen}, algorithm=algorithm, measure=False, progress=False
        )

    return program(sizes, device, treat)


def methods_of(made: Program) -> dict[str, Method]:
    """The methods; the prompt may have any length, the other sizes are fixed."""
    length = torch.export.Dim("length", min=2, max=made.sizes.length)
    cache = made.text_decoder.cache()
    chosen = {}
    for method, given in inputs(made, CPU).items():
        args = (*given, cache) if method.startswith("text_") else given
        shapes = {
            "token_embedding": ({1: length},),
            "text_prefill": ({1: length}, {0: length}, [None] * len(cache)),
        }.get(method)
        chosen[method] = Method(module_of(made, method), args, shapes)
    return chosen


def record(method: Method, path: Path, everything: bool) -> None:
    """Write the arguments and the eager-mode output, as the runner reads them. It creates caches, which are zeros,
    itself if a manifest has their sizes; otherwise ``everything`` is required."""
    args = pytree.tree_map(torch.clone, method.args)
    leaves = enumerate(pytree.tree_leaves(args) if everything else args)
    tensors = {f"input.{at}": value.clone() for at, value in leaves if isinstance(value, torch.Tensor)}
    with torch.inference_mode():
        save_file({**tensors, "output.0": method.module(*args)}, path)


def prepacked(chosen: dict[str, Method], path: Path) -> None:
    """A package of torch's own, in which each library holds the weights of its method, packed by oneDNN."""
    from torch._inductor.package import package_aoti

    made: dict[str, Any] = {}
    for name, method in chosen.items():
        program = exported(dense(method))
        args, kwargs = program.example_inputs
        with torch.no_grad():
            made[name] = torch._inductor.aot_compile(program.module(check_guards=False), args, kwargs, options=FREEZING)
    package_aoti(str(path), made)


def build(sizes: Sizes, name: str, folder: Path, algorithm: str) -> dict[str, float]:
    """Build in ``folder``; returns the seconds of each step, and the peak memory in bytes up to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen = name == PREPACKED
    start = time.perf_counter()
    made = built(sizes, name, algorithm)
    ready, ready_peak = time.perf_counter(), peak()
    chosen = methods_of(made)
    for method, each in chosen.items():
        record(each, folder / f"{method}.safetensors", frozen)
    recorded, recorded_peak = time.perf_counter(), peak()
    if frozen:
        prepacked(chosen, folder / PROGRAM)
    else:
        package(chosen, folder / PROGRAM, examples=False)
    seconds = {"build_s": ready - start, "record_s": recorded - ready, "export_s": time.perf_counter() - recorded}
    return {**seconds, "build_peak": ready_peak, "record_peak": recorded_peak, "export_peak": peak()}


def sizes_of(options: argparse.Namespace) -> Sizes:
    given = {name: getattr(options, name) for name in SIZES}
    return dataclasses.replace(VOXTRAL, **{name: value for name, value in given.items() if value is not None})


def add_sizes(parser: argparse.ArgumentParser) -> None:
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"full size: {getattr(VOXTRAL, name)}")
    parser.add_argument("--algorithm", default="hqq", help="how codes and scales are chosen (default: hqq)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="bf16, a scheme, or one for each part: int8+int4+int4")
    parser.add_argument("folder", type=Path)
    add_sizes(parser)
    options = parser.parse_args()
    print(json.dumps(build(sizes_of(options), options.name, options.folder, options.algorithm)))


if __name__ == "__main__":
    main()
