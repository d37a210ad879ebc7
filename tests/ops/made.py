"""Samples of the ops, made once for all tests that only look at them: making them takes longer than the calls."""

from __future__ import annotations

import functools

import torch

from bitport.ops import OPS, Sample

CPU = torch.device("cpu")


@functools.cache
def samples(op: str, dtype: torch.dtype) -> tuple[Sample, ...]:
    return tuple(OPS[op].samples(CPU, dtype))
