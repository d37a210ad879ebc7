"""Codebook number types: a code is an index into a sorted table of float32 values.

nf4 (QLoRA) puts its 16 entries at quantiles of the standard normal distribution, so that each code is about equally
likely for normal weights. Eight positive and seven negative quantiles are taken separately, both ending at the
quantile of p = 0.9677083 (so that the tail mass left out is the same on both sides), an exact 0 is added, and all
are divided by the largest: -1, 0 and 1 are entries.

bnb_fp4 is what bitsandbytes calls fp4: 0, 1/16, 2, 3, 4, 6, 8 and 12 twelfths with both signs, in float32. These are
the values of e2m1, except that e2m1 has 1 instead of 1/16. Zero has two codes, so that codes read from a file survive.

The values of ggml's types IQ1 to IQ4 are small integers, none of them 0. ggml_iq4 is denser around zero than at the
ends and slightly asymmetric; ggml_iq3 and ggml_iq3s have odd multiples, except for the ends of ggml_iq3. ggml_iq2
serves two types: 8, 25 and 43 are from IQ2, the eighths 1, 7 and 9 from IQ1; 16 and 34 fill gaps and occur in no file.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

NF4: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

_TWELFTHS = (0.0, 0.0052083334885537624, 0.1666666716337204, 0.25, 0.3333333432674408, 0.5, 0.6666666865348816, 1.0)


def _both_signs(table: Sequence[float]) -> tuple[float, ...]:
    return (*(0.0 - entry for entry in reversed(table)), *table)


BNB_FP4 = _both_signs(_TWELFTHS)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
GGML_IQ4: tuple[float, ...] = tuple(map(float, _IQ4))
GGML_IQ3 = _both_signs((4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0))
GGML_IQ3S = _both_signs((1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0))
GGML_IQ2 = _both_signs((1.0, 7.0, 8.0, 9.0, 16.0, 25.0, 34.0, 43.0))


def _float32_at_most(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(math.ldexp(mantissa, 24)), exponent - 24)


def midpoints(table: Sequence[float]) -> tuple[float, ...]:
    """Decision thresholds: for each pair of neighbours the largest float32 not above the exact midpoint, so that
    comparing a float32 with it decides as the exact midpoint would. Of two equal entries only the first is ever
    chosen: its threshold is moved up to the next one."""
    found = [_float32_at_most((low + high) / 2) for low, high in itertools.pairwise(table)]
    for at in reversed(range(len(found) - 1)):
        if table[at] == table[at + 1]:
            found[at] = found[at + 1]
    return tuple(found)


_MIDPOINTS = {table: midpoints(table) for table in (NF4, BNB_FP4, GGML_IQ4, GGML_IQ3, GGML_IQ3S, GGML_IQ2)}
LONG = 16
"""Longer tables are encoded by binary search, others by counting thresholds."""


def zero_code(table: tuple[float, ...]) -> int:
    """Index of the entry nearest to zero. Without ``key=``, which torch.compile does not always trace."""
    sizes = [abs(value) for value in table]
    return sizes.index(min(sizes))


def _float32(table: tuple[float, ...], device: torch.device) -> Tensor:
    """The table as a tensor, cached per device: a copy from the host in every optimizer step would synchronize."""
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.tensor(table, dtype=torch.float32, device=device)
    return _kept(table, device)


@functools.cache
def _kept(table: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.float32, device=device)


def encode_codebook(x: Tensor, table: tuple[float, ...]) -> Tensor:
    """Index of the nearest entry; ties take the lower entry, values outside the table clamp to its ends.

    NaN takes the entry nearest to zero: a codebook has no NaN, so the caller marks it in the block's scale."""
    thresholds = _MIDPOINTS[table] if table in _MIDPOINTS else midpoints(table)
    if len(table) > LONG:
        codes = torch.bucketize(x, _float32(thresholds, x.device), out_int32=True).to(torch.uint8)
    else:
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for threshold in thresholds:
            codes = codes + (x > threshold)
    return torch.where(x.isnan(), zero_code(table), codes)


def decode_codebook(codes: Tensor, table: tuple[float, ...]) -> Tensor:
    """float32 entries of codes. A short table is built from fills, because tracing mutates a tensor literal, which
    export refuses. Long tables are for optimizer states, which are not exported."""
    if len(table) > LONG:
        return _float32(table, codes.device)[codes.int()]
    entries = [torch.full((1,), entry, dtype=torch.float32, device=codes.device) for entry in table]
    return torch.cat(entries)[codes.int()]
