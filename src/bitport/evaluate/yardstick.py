"""A small model and its texts, by which schemes, algorithms and training are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.evaluate.perplexity import token_losses
from bitport.integrations.huggingface import cast_parameters, load_model, load_tokenizer, logits_of, token_ids

WINDOW = 512
TOKENS = 8192
CALIBRATION_TOKENS = 4096


class Yardstick:
    """A model directory with the texts ``eval.txt`` and ``calibration.txt``."""

    def __init__(self, directory: Path) -> None:
        tokenizer = load_tokenizer(directory)
        self.base = load_model(directory)
        self.tokens = token_ids(tokenizer, (directory / "eval.txt").read_text(encoding="utf-8"))[:TOKENS]
        text = (directory / "calibration.txt").read_text(encoding="utf-8")
        self.calibration = token_ids(tokenizer, text)[:CALIBRATION_TOKENS]

    @property
    def batches(self) -> list[Tensor]:
        """The calibration text as batches of one window."""
        return [ids[None] for ids in self.calibration.split(WINDOW)]

    def losses(self, model: Any) -> Tensor:
        """Return the negative log likelihood of each token, computed in float32; ``model`` is cast in place."""
        cast_parameters(model, torch.float32)
        return token_losses(logits_of(model), self.tokens, window=WINDOW, batch=4)

    def nll(self, model: Any) -> float:
        """Return the mean of :meth:`losses`."""
        return float(self.losses(model).double().mean())
