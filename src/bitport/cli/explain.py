"""``bitport explain``: show which kernel runs each layer of a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bitport.api import explain
from bitport.cli.common import add_device, add_verb, counts, location, show
from bitport.integrations.huggingface import load_model


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "explain",
        run,
        "Show which kernel computes each layer. For each number of input rows (tokens at once): the kernel that will "
        "run on the device, and why each faster one is refused.",
        "llama-int4",
        "llama-int4 --device cuda --rows 1,16,4096",
    )
    verb.add_argument("directory", type=location, help="a Hugging Face directory, quantized by bitport")
    verb.add_argument(
        "--rows", type=counts, default=(1, 64, 1024), metavar="N,..", help="numbers of input rows (default: 1,64,1024)"
    )
    add_device(verb, computes=False)


def run(args: argparse.Namespace) -> int:
    model = load_model(args.directory, args.device, args.dtype, causal=False)
    found = explain(model, args.rows)
    show(args, json.loads(found.to_json()), str(found))
    return 0
