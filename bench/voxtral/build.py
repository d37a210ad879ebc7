"""The program as a package, and for each method a file of inputs and of what they give in eager mode.

``python -m bench.voxtral.build int4 FOLDER`` in a process of its own: its memory goes with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

import bitport
from bench.voxtral.program import VOXTRAL, Program, Sizes, inputs, module_of, program
from bitport.export import Method, package
from bitport.schemes import preset

PARTS = ("audio_encoder", "token_embedding", "text_decoder")
BASE = "bf16"
SIZES = ("frames", "audio_layers", "layers", "words")
"""What the command line may change."""


def schemes_of(name: str) -> dict[str, str]:
    """Part -> scheme: one for all three parts, or three with "+" between them."""
    given = name.split("+")
    if len(given) not in (1, len(PARTS)):
        raise SystemExit(f"{name!r}: give one scheme, or one for each of {', '.join(PARTS)} with '+' between them")
    return dict(zip(PARTS, given * len(PARTS) if len(given) == 1 else given, strict=False))


def built(sizes: Sizes, name: str, algorithm: str = "hqq") -> Program:
    """Quantized layer by layer, as soon as a layer has its weights."""
    schemes = schemes_of(name)

    def treat(layer: str, module: nn.Module) -> None:
        scheme = schemes[layer.partition(".")[0]]
        if scheme == BASE or not isinstance(module, (nn.Linear, nn.Embedding)):
            return
        chosen = preset(scheme)
        if isinstance(module, nn.Embedding):  # a lookup rounds no input
            chosen = dataclasses.replace(chosen, act="", static=False)
        bitport.quantize_(
            nn.ModuleDict({"it": module}), {"it": chosen}, algorithm=algorithm, measure=False, progress=False
        )

    return program(sizes, torch.device("cpu"), treat)


def methods_of(made: Program) -> dict[str, Method]:
    """The prompt may have any length; the other sizes are fixed."""
    length = torch.export.Dim("length", min=2, max=made.sizes.length)
    cache = made.text_decoder.cache()
    chosen = {}
    for method, given in inputs(made, torch.device("cpu")).items():
        args = (*given, cache) if method.startswith("text_") else given
        shapes = {
            "token_embedding": ({1: length},),
            "text_prefill": ({1: length}, {0: length}, [None] * len(cache)),
        }.get(method)
        chosen[method] = Method(module_of(made, method), args, shapes)
    return chosen


def record(method: Method, path: Path) -> None:
    """The arguments, and the output in eager mode, as the runner reads them; it makes caches, zeros, itself."""
    args = pytree.tree_map(torch.clone, method.args)
    tensors = {f"input.{at}": value.clone() for at, value in enumerate(args) if isinstance(value, torch.Tensor)}
    with torch.inference_mode():
        save_file({**tensors, "output.0": method.module(*args)}, path)


def build(sizes: Sizes, name: str, folder: Path, algorithm: str) -> dict[str, float]:
    """Into ``folder``; seconds of each step."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    made = built(sizes, name, algorithm)
    ready = time.perf_counter()
    chosen = methods_of(made)
    for method, each in chosen.items():
        record(each, folder / f"{method}.safetensors")
    recorded = time.perf_counter()
    package(chosen, folder / "program.pt2", examples=False)
    return {"build_s": ready - start, "record_s": recorded - ready, "export_s": time.perf_counter() - recorded}


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
