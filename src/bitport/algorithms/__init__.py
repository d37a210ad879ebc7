"""Algorithms that choose the codes and scales of quantized weights: NAME_core.py is the maths on tensors, NAME.py what
it makes of a weight, ``measure`` what it brought."""

from __future__ import annotations

from bitport.algorithms.algorithm import RTN, Algorithm
from bitport.algorithms.clip import Clip
from bitport.algorithms.gptq import GPTQ
from bitport.algorithms.hqq import HQQ
from bitport.algorithms.signround import SignRound
from bitport.errors import ArgumentError

ALGORITHMS: dict[str, Algorithm] = {each.name: each for each in (RTN(), Clip(), HQQ(), GPTQ(), SignRound())}
"""By name, with their usual settings."""

__all__ = ["ALGORITHMS", "GPTQ", "HQQ", "RTN", "Algorithm", "Clip", "SignRound", "algorithm"]


def algorithm(given: str | Algorithm) -> Algorithm:
    """The algorithm of that name, or the one that is given."""
    if not isinstance(given, str):
        return given
    if given not in ALGORITHMS:
        raise ArgumentError(f"unknown algorithm {given!r}; known: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[given]
