"""A small model and its texts, by which schemes, algorithms and training are compared."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.evaluate.divergence import token_divergence
from bitport.evaluate.perplexity import losses, predictions, token_losses
from bitport.evaluate.stretches import Stretches, by_stretches
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

    def stretches(self, model: Any) -> Stretches:
        """Return loss, KL divergence from the base and top-1 agreement with it along the text, computed in float32;
        ``model`` is cast in place. The logits of the base stay in memory: 4 bytes x tokens x vocabulary."""
        cast_parameters(model, torch.float32)
        windows = predictions(logits_of(model), self.tokens, window=WINDOW, batch=4)
        with torch.no_grad():
            parts = [
                (losses(predicted, wanted), *token_divergence(base, predicted))
                for base, (predicted, wanted) in zip(self._logits, windows, strict=True)
            ]
        return Stretches(*(by_stretches(torch.cat(each)) for each in zip(*parts, strict=True)))

    @functools.cached_property
    def _logits(self) -> list[Tensor]:
        model = copy.deepcopy(self.base)
        cast_parameters(model, torch.float32)
        with torch.no_grad():
            return [logits.clone() for logits, _ in predictions(logits_of(model), self.tokens, window=WINDOW, batch=4)]
