"""Text that a causal language model writes, and what that needs: tokens it has, and random numbers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.integrations.cache_name import cache_of, with_cache
from bitport.report.progress import progress


def check_ids(model: Any, ids: Iterable[Tensor]) -> None:
    """ArgumentError if ``ids`` has a token outside the embedding of ``model``."""
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max((int(each.max()) for each in ids if each.numel()), default=0)
    if largest >= rows:
        raise ArgumentError(
            f"the data have a token {largest}, but the model has only {rows}: do tokenizer and data belong to it?"
        )


def own_text(model: Any, *, tokens: int, window: int, seed: int) -> list[Tensor]:
    """Token ids [1, window] sampled from ``model`` itself, each text starting with a random token drawn by ``seed``: a
    calibration set if there is no other. That takes as long as generating them one by one, so a bar shows how far it
    is."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (min(window, tokens - start) for start in range(0, tokens, window))
    written = (token for length in lengths for token in _written(model, length, draw))
    return list(torch.cat(list(progress(written, tokens, "writing calibration text")), 1).split(window, 1))


def _written(model: Any, length: int, draw: torch.Generator) -> Iterator[Tensor]:
    """A random token [1, 1], then its continuation, sampled on the CPU so that a seed gives the same draws on every
    device."""
    new = torch.randint(model.get_input_embeddings().weight.shape[0], (1, 1), generator=draw)
    yield new
    cache = None
    for _ in range(length - 1):
        with torch.no_grad():
            out = model(input_ids=new.to(model.device), use_cache=True, **with_cache(model, cache))
        cache = cache_of(out)
        new = out.logits[:, -1].float().softmax(-1).cpu().multinomial(1, generator=draw)
        yield new


def random_apart(device: torch.device) -> AbstractContextManager[None]:
    """Fork the random state of the CPU and of ``device``, to leave the program's own unchanged. Other devices are not
    initialized."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return torch.random.fork_rng([device] if device.type == kind else [], device_type=kind)
