"""``bitport generate``: generate text with a model."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from bitport import plugins
from bitport.cache.format import FLOAT
from bitport.cli.common import UsageError, add_cache, add_device, add_verb, count, location, seed, show
from bitport.errors import ArgumentError
from bitport.export import generate, load
from bitport.integrations.generation import check_ids, random_apart
from bitport.integrations.huggingface import load_model, load_tokenizer, positions_of
from bitport.ops.select import first

COLDEST = 1e-30
"""Smallest temperature: dividing logits by less would overflow."""


def add_parser(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "generate",
        run,
        "Have a model continue a text. Takes the most likely token each time, or samples (--temperature).",
        'llama-int4 --prompt "Once upon a time"',
        'llama-int4 --prompt "Once upon a time" --temperature 0.8 --seed 1',
        'llama-int4 --prompt "Once upon a time" --kv-cache int8',
        'llama.pt2 --tokenizer llama-int4 --prompt "Once upon a time"',
    )
    verb.add_argument(
        "directory",
        type=location,
        help="a Hugging Face directory, quantized by bitport or not; or a package of bitport export (*.pt2), which is "
        "faster, with --tokenizer",
    )
    verb.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    verb.add_argument(
        "--max-new-tokens", type=count, default=64, metavar="N", help="generate at most N tokens (default: 64)"
    )
    verb.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): the most likely token each time"
    )
    verb.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="seed for sampling, with --temperature (default: 0)"
    )
    verb.add_argument("--tokenizer", type=location, metavar="DIR", help="a directory with the tokenizer of a package")
    add_cache(verb)
    add_device(verb)


@torch.no_grad()
def run(args: argparse.Namespace) -> int:
    if args.temperature != 0 and not COLDEST <= args.temperature < float("inf"):
        raise UsageError(f"--temperature {args.temperature}: give 0, or a number from {COLDEST} on")
    packaged = Path(args.directory).suffix == ".pt2"
    if packaged != bool(args.tokenizer):
        raise UsageError("--tokenizer DIR goes with a package (*.pt2), which needs it; a directory has its own")
    given = {"--kv-cache": args.kv_cache, "--device": args.device, "--dtype": args.dtype}
    fixed = [option for option, value in given.items() if value is not None]
    if packaged and fixed:
        raise UsageError(f"{', '.join(fixed)}: a package has what it was exported with; leave it out")
    tokenizer = load_tokenizer(args.tokenizer or args.directory)
    return from_package(args, tokenizer) if packaged else from_directory(args, tokenizer)


def prompt_of(args: argparse.Namespace, tokenizer: Any) -> Any:
    inputs = tokenizer(args.prompt, return_tensors="pt")
    if not inputs.input_ids.shape[1]:
        raise ArgumentError("the prompt has no tokens; give a text to continue")
    return inputs


def told(args: argparse.Namespace, tokenizer: Any, ids: list[int], length: int, seconds: float) -> int:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    data = {"prompt": args.prompt, "text": text, "new_tokens": len(ids) - length, "seconds": seconds}
    show(args, data, text)
    return 0


def from_package(args: argparse.Namespace, tokenizer: Any) -> int:
    program, draw = load(args.directory), torch.Generator().manual_seed(args.seed)
    ids = prompt_of(args, tokenizer).input_ids[0].tolist()
    meta = program.manifest["meta"]
    capacity = meta.get("capacity") if isinstance(meta, dict) else None
    known = capacity if isinstance(capacity, int) else None  # generate() tells what is wrong with a package
    check_positions(known, len(ids), args.max_new_tokens, "the package has room for")
    start = time.perf_counter()
    new = [*generate(program, ids, args.max_new_tokens, temperature=args.temperature, generator=draw)]
    return told(args, tokenizer, ids + new, len(ids), time.perf_counter() - start)


def from_directory(args: argparse.Namespace, tokenizer: Any) -> int:
    model = load_model(args.directory, args.device, args.dtype)
    inputs = prompt_of(args, tokenizer).to(model.device)
    length = inputs.input_ids.shape[1]
    check_ids(model, [inputs.input_ids])
    check_positions(positions_of(model), length, args.max_new_tokens, "the model supports")
    cache = cache_for(model, args.kv_cache)
    draw = {"do_sample": True, "temperature": args.temperature, "num_beams": 1} if args.temperature else greedy(model)
    start = time.perf_counter()
    with random_apart(model.device):
        torch.manual_seed(args.seed)
        result = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=args.max_new_tokens,
            pad_token_id=0,
            **draw,
            **cache,
        )
    ids = result[0].tolist()
    return told(args, tokenizer, ids, length, time.perf_counter() - start)


def cache_for(model: Any, kv_cache: str | None) -> dict[str, Any]:
    """The argument of ``model.generate`` that is its cache. Unless one is asked for, it is of floats where bitport's
    attention reads these faster than PyTorch's does, on CPUs without AMX, and otherwise transformers' own."""
    from bitport.integrations.cache_attention import ATTENTION
    from bitport.integrations.cache_name import with_cache
    from bitport.integrations.huggingface import text_config
    from bitport.integrations.kv_cache import KVCache

    plugins.load()
    faster = model.device.type == "cpu" and first("attention", "cpu") == "native"
    if kv_cache is None and (not faster or torch.cpu._is_amx_tile_supported()):
        return {}
    try:
        cache = KVCache.of(model, kv_cache or FLOAT)
    except ArgumentError:  # a model with another kind of cache
        if kv_cache is not None:
            raise
        return {}
    if kv_cache is None and text_config(model)._attn_implementation != ATTENTION:  # it keeps an attention of its own
        return {}
    model.generation_config.cache_implementation = None  # the kind that it names would be another cache
    return with_cache(model, cache)


def check_positions(known: int | None, prompt: int, new: int, whose: str) -> None:
    """Raise ArgumentError if there are too few positions. The last new token is never fed back, so needs none."""
    if known is not None and prompt + new - 1 > known:
        advice = f"--max-new-tokens {known + 1 - prompt}" if prompt <= known else "a shorter prompt"
        raise ArgumentError(
            f"{prompt} tokens of the prompt and {new} new ones are more than the {known} positions that {whose}; "
            f"give {advice}"
        )


def greedy(model: Any) -> dict[str, Any]:
    """Options of generate() for greedy decoding. The model's own generation settings, such as beams and penalties, are
    dropped, except for the end-of-text tokens."""
    model.generation_config = type(model.generation_config)(eos_token_id=model.generation_config.eos_token_id)
    return {"do_sample": False}
