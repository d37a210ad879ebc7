"""Text by a packaged language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bitport.errors import ArgumentError, ExportError
from bitport.export.load import READABLE, Program


def generate(
    program: Program,
    ids: Sequence[int],
    count: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Continue the tokens ``ids`` by up to ``count``, which are given one by one; the last is the model's end of text,
    or the one after which its cache is full.

    ``program``: a package of ``bitport export`` or :func:`bitport.integrations.program.causal_lm`. ``temperature``: 0
    takes the most likely token each time; others sample, with the random numbers of ``generator``.
    """
    meta = program.manifest["meta"]
    if not isinstance(meta, dict) or meta.get("kind") != "causal-lm":
        raise ArgumentError(f"{program.path} is no language model: export one with `bitport export`")
    capacity, ends = meta.get("capacity"), meta.get("eos")
    ends = ends if isinstance(ends, list) else [ends]
    decode, prefill = program.decode, program.prefill
    words = decode.entry["outputs"][0]["shape"][-1]
    if type(capacity) is not int or type(words) is not int:
        raise ExportError(
            f"{program.path}: the capacity {capacity!r} and the number of words {words!r} must be numbers"
        )
    if not 0 < len(ids) <= capacity:
        raise ArgumentError(f"a prompt of {len(ids)} tokens: give 1 to {capacity}, which the cache holds")
    if outside := [each for each in ids if not 0 <= each < words]:
        raise ArgumentError(f"the prompt has the token {outside[0]}; the model knows those from 0 to {words - 1}")
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(f"temperature={temperature}: give 0, or a finite number above")
    cache = [torch.zeros(each["shape"], dtype=READABLE[each["dtype"]]) for each in decode.entry["inputs"][2:]]

    given, filled = [*ids], 0
    for _ in range(count):
        places = torch.arange(filled, filled + len(given))
        (logits,) = (prefill if len(given) > 1 else decode).flat(torch.tensor([given]), places, *cache)
        if temperature:
            token = int((logits[0].double() / temperature).softmax(-1).multinomial(1, generator=generator))
        else:
            token = int(logits[0].argmax())
        yield token
        filled += len(given)
        if token in ends or filled == capacity:
            return
        given = [token]
