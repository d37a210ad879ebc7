"""``bitport convert``: convert a quantized model from one format to another, number for number."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from bitport.checkpoint import read_manifest
from bitport.cli.common import add_shard_size, add_verb, location, printable, show
from bitport.cli.naming import named, naming_notes
from bitport.interop import READERS, convert
from bitport.interop.convert import BITPORT, FORMATS
from bitport.interop.scales import NARROW


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "convert",
        run,
        "Convert a quantized model from one format to another. Codes, scales and zero points keep their values, unless "
        "--scales rounds them; what a format cannot hold is an error. Reads bitport checkpoints, GGUF files, and "
        f"Hugging Face directories with the quant_method {', '.join(READERS)}; see docs/interop.md.",
        "llama-gptq -o llama-bitport",
        "llama-Q4_K_M.gguf -o llama-bitport",
        "llama-Q4_K_M.gguf --scales float16 -o llama-smaller",
        "flux1-dev-Q4_K_S.gguf --config FLUX/transformer -o flux-transformer",
        "llama-int4 --to compressed-tensors -o llama-for-others",
        "llama-int4 --to gguf -o llama-int4.gguf",
        "deepseek-fp8 --to float -o deepseek-bf16",
    )
    verb.add_argument(
        "source",
        type=location,
        help="a bitport checkpoint, a quantized Hugging Face directory, a GGUF file or its directory, or a quantized "
        "diffusion model as ComfyUI has it (.safetensors)",
    )
    verb.add_argument(
        "-o",
        "--output",
        type=location,
        required=True,
        metavar="PATH",
        help="the directory to write; a file for --to gguf",
    )
    verb.add_argument(
        "--to",
        choices=FORMATS,
        default=BITPORT,
        help="the format to write; float: a model that is not quantized (default: bitport)",
    )
    verb.add_argument(
        "--config",
        type=location,
        metavar="PATH",
        help="for diffusion models in GGUF or ComfyUI's formats: the config.json of the model in diffusers, or its "
        "directory",
    )
    verb.add_argument(
        "--scales",
        choices=NARROW,
        help="round float32 scales and float32 zero points to this: smaller and faster, and some formats require it "
        "(default: keep every number)",
    )
    add_shard_size(verb, "; GGUF is always one file")
    verb.add_argument("--overwrite", action="store_true", help="replace the model that is there")


def run(args: argparse.Namespace) -> int:
    done = convert(
        args.source,
        args.output,
        to=args.to,
        config=args.config,
        scales=args.scales,
        shard_size=args.shard_size,
        overwrite=args.overwrite,
    )
    if done.written == BITPORT:
        advice = "A model of your own with these names will: bitport.load"
        model, notes = named(args.output)
        notes += naming_notes(model, args.output, lambda as_model: as_model(read_manifest(args.output)).tensors, advice)
        for note in notes:
            print(printable(f"note: {note}"), file=sys.stderr)
    show(args, dataclasses.asdict(done), f"{done}\nwritten to {args.output}")
    return 0
