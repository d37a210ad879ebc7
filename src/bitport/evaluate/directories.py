"""Evaluate model directories on one text: size, perplexity, and distance from the first.

One model is in memory at a time. The first is the original: its logits are written to a temporary file, against which
those of the others are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitport.checkpoint.source import Source
from bitport.errors import ArgumentError
from bitport.evaluate.compare import change_percent
from bitport.evaluate.divergence import Divergence, summarized, token_divergence
from bitport.evaluate.layers import SampledRows, layer_errors, sampled
from bitport.evaluate.logits_file import LogitsFile, folder_of_logits
from bitport.evaluate.measure import generation_speed, size_of
from bitport.evaluate.perplexity import (
    Perplexity,
    check_windows,
    count_windows,
    losses,
    predictions,
    scored_tokens,
    summary,
)
from bitport.integrations.generation import check_ids
from bitport.integrations.huggingface import (
    load_model,
    load_tokenizer,
    logits_of,
    model_directory,
    positions_of,
    token_ids,
)
from bitport.report import Report
from bitport.report.progress import progress as with_progress
from bitport.report.text import size
from bitport.tensor import QTensor

PROMPT = 32
"""Tokens of the text that serve as the prompt when generation is timed."""


@dataclasses.dataclass(frozen=True)
class How:
    """Options of an evaluation. For windows see :mod:`bitport.evaluate.perplexity`, for device and dtype load_model."""

    window: int = 512
    stride: int | None = None
    max_tokens: int | None = None
    batch: int = 1
    device: torch.device | str | int | None = None
    dtype: torch.dtype | None = None
    scratch: Path | None = None
    """Folder for the logits of the original (default: the system's temporary folder)."""
    new_tokens: int = 0
    """Number of tokens to generate to measure speed; 0: speed is not measured."""
    kv_cache: str | None = None
    """Format of keys and values (:mod:`bitport.cache.format`) in all models but the original; None: floats."""

    def __post_init__(self) -> None:
        """ArgumentError for what would fail only once a model is loaded."""
        check_windows(self.window, self.stride, self.batch)
        folder_of_logits(self.scratch)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    model: str
    schemes: tuple[str, ...]
    nbytes: int
    bits_per_weight: float
    perplexity: float
    change_percent: float
    """Change of the perplexity against the first model."""
    divergence: Divergence | None
    """From the first model; None for the first itself."""
    tokens_per_second: float | None
    scored: int
    seconds: float
    layers: Report | None = None


def evaluate_directories(
    directories: Sequence[str | Path],
    text: str,
    how: How,
    *,
    layers: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    also: Callable[[Any, str | Path], None] = lambda model, directory: None,
) -> Iterator[Evaluation]:
    """Yield the rows of a table, the original's first. ``layers``: also compare all weights with the original's, and
    their outputs on inputs of the first window. ``tell`` receives progress lines, ``also`` each model while it is
    loaded."""
    for directory in directories:
        model_directory(directory)  # report a wrong directory at once, not after those before it were measured
    if layers:
        Source(directories[0])  # report at once if its files are not those of an original
    first: Perplexity | None = None
    tokens: Tensor | None = None
    original: LogitsFile | None = None
    inputs: dict[str, SampledRows] = {}
    with contextlib.ExitStack() as stack:
        for at, directory in enumerate(directories):
            tell(f"evaluating {directory}")
            model, own = _loaded(directory, text, how)
            if tokens is not None and not torch.equal(own, tokens):
                raise ArgumentError(
                    f"{directory} and {directories[0]} split the text into different tokens, so they cannot be compared"
                )
            tokens = own
            if at == 0 and len(directories) > 1:
                scored = scored_tokens(len(tokens), how.window, how.stride)
                original = stack.enter_context(LogitsFile(scored, how.scratch))
                inputs = _inputs(model, tokens, how) if layers else {}
            start = time.perf_counter()
            store, reference = (original, None) if at == 0 else (None, original)
            result, divergence = _read(model, tokens, how, store, reference)
            seconds = time.perf_counter() - start
            if at == 0 and original is not None:
                where = f"{size(original.nbytes)} in {original.folder}"
                tell(f"one model is in memory at a time; the logits of the first take {where}")
            first = first or result
            also(model, directory)
            measured = size_of(model)
            yield Evaluation(
                str(directory),
                tuple(dict.fromkeys(str(param.scheme) for param in model.parameters() if isinstance(param, QTensor))),
                measured.nbytes,
                measured.bits_per_weight,
                result.value,
                change_percent(result.nll, first.nll),
                divergence,
                _speed(model, tokens, how),
                result.scored,
                seconds,
                layer_errors(model, directories[0], inputs) if layers and at else None,
            )
            del model


@torch.no_grad()
def _inputs(model: Any, tokens: Tensor, how: How) -> dict[str, SampledRows]:
    with sampled(model) as seen:
        logits_of(model)(tokens[None, : how.window])
    return seen


def _loaded(directory: str | Path, text: str, how: How) -> tuple[Any, Tensor]:
    """Load the model, and tokenize the text with its tokenizer."""
    tokens = token_ids(load_tokenizer(directory), text)[: how.max_tokens]
    if len(tokens) < 2:
        raise ArgumentError(
            f"for the tokenizer of {directory} the text has fewer than 2 tokens, {len(tokens)}: give a longer text, or "
            "more of it"
        )
    model = load_model(directory, how.device, how.dtype)
    positions = positions_of(model)
    if positions is not None and how.window > positions:
        raise ArgumentError(
            f"{directory} supports {positions} positions: give a --window of at most that, not {how.window}"
        )
    check_ids(model, [tokens])
    prompt = len(tokens[:PROMPT])
    if how.new_tokens and positions is not None and prompt + how.new_tokens - 1 > positions:
        raise ArgumentError(
            f"{directory} supports {positions} positions, too few to generate {how.new_tokens} tokens after the "
            f"{prompt} that speed is measured with: give --speed at most {positions + 1 - prompt}"
        )
    return model, tokens


def _read(
    model: Any, tokens: Tensor, how: How, store: LogitsFile | None, reference: LogitsFile | None
) -> tuple[Perplexity, Divergence | None]:
    """Run ``model`` over the text once. ``store``: where to write its logits, which are those of the original;
    ``reference``: what to compare them with."""
    logits = logits_of(model)
    if how.kv_cache is not None and store is None:
        from bitport.integrations import kv_cache

        logits = kv_cache.logits_of(model, how.kv_cache)
    windows = predictions(logits, tokens, window=how.window, stride=how.stride, batch=how.batch)
    total = count_windows(len(tokens), how.window, how.stride)
    originals = None if reference is None else iter(reference)
    scored, apart = [], []
    for predicted, wanted in with_progress(windows, total, "reading the text"):
        scored.append(losses(predicted, wanted))
        if originals is not None:
            apart.append(token_divergence(next(originals), predicted))
        if store is not None:
            store.write(predicted)
    return summary(torch.cat(scored)), summarized(apart) if apart else None


def _speed(model: Any, tokens: Tensor, how: How) -> float | None:
    if not how.new_tokens:
        return None
    return generation_speed(model, tokens[None, :PROMPT].to(model.device), how.new_tokens)
