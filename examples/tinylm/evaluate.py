"""Perplexity of the stored model: python -m examples.tinylm.evaluate [FOLDER] [--tokens N]

The text is cut into consecutive windows of 512 tokens; in each, every token but the first is predicted from those
before it. Perplexity is exp of the mean negative log likelihood per predicted token, the sum taken in float64.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from .corpus import MODELS
from .model import load

WINDOW = 512


def read_tokens(folder: Path, name: str = "eval.txt") -> Tensor:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((folder / name).read_text()).ids)


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor, batch: int = 8) -> float:
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    total = 0.0
    for rows in windows.split(batch):
        logits = model(rows[:, :-1]).float()
        total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").double().sum().item()
    return math.exp(total / (windows.shape[0] * (WINDOW - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MODELS)
    parser.add_argument("--tokens", type=int, help="only the first N tokens of eval.txt (default: all)")
    args = parser.parse_args()
    model = load(args.folder)
    tokens = read_tokens(args.folder)[: args.tokens]
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokens):,} tokens, perplexity {perplexity(model, tokens):.4f}")


if __name__ == "__main__":
    main()
