"""Quantizes the small model in models/tinylm with one scheme after another and compares them: python examples/demo.py

Size counts every parameter of the model, also those that stay in bf16 (embedding and norms). Perplexity is how many
tokens the model hesitates between on average; lower is better. Tokens per second are of generation, one by one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bitport.evaluate.compare import compare
from bitport.evaluate.measure import generation_speed
from bitport.integrations.huggingface import load_model, load_tokenizer, token_ids
from bitport.report.text import size, table

MODEL = Path(__file__).parent.parent / "models" / "tinylm"
SCHEMES = ("int8", "int8-dyn", "fp8-row", "mxfp8", "int4", "int4-g32", "nf4", "mxfp4", "nvfp4", "int3", "int2")
PROMPT = "One winter night, Daniel and Anton sat together by the well."
WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a Hugging Face directory with an eval.txt")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of eval.txt to measure with (default: 8192)")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens to generate (default: 48)")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help=f"default: {' '.join(SCHEMES)}")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows, text = run(args)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{args.model.name}: perplexity on {args.tokens} tokens, generation of {args.new_tokens} tokens on the CPU\n")
    header = ("scheme", "size", "bits/weight", "perplexity", "vs bf16", "tokens/s", "kernel, 1 row")
    print(table(header, [_cells(row) for row in rows]))
    print(f"\nint4 goes on with a story:\n  {text}")


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    tokenizer = load_tokenizer(args.model)
    tokens = token_ids(tokenizer, (args.model / "eval.txt").read_text(encoding="utf-8"))[: args.tokens]
    prompt = token_ids(tokenizer, PROMPT)[None]
    rows, text = [], ""
    for model, row in compare(load_model(args.model), args.schemes, tokens, WINDOW, [tokens[None, :WINDOW]]):
        speed = generation_speed(model, prompt, args.new_tokens)
        rows.append({**dataclasses.asdict(row), "tokens_per_second": speed})
        print(f"{row.scheme}: done", file=sys.stderr)
        if row.scheme == "int4":
            text = _story(model, tokenizer, prompt, args.new_tokens)
    return rows, text


def _story(model: Any, tokenizer: Any, prompt: torch.Tensor, new_tokens: int) -> str:
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True).replace("\n", "\n  ")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["scheme"],
        size(row["nbytes"]),
        f"{row['bits_per_weight']:.2f}",
        f"{row['perplexity']:.4f}",
        f"{row['change_percent']:+.2f} %",
        f"{row['tokens_per_second']:.0f}",
        row["kernel"],
    )


if __name__ == "__main__":
    main()
