from itertools import pairwise
from statistics import NormalDist

import pytest
import torch

from bitport.numerics import NF4, decode_codebook, encode_codebook


def test_nf4_is_what_the_normal_quantiles_give() -> None:
    """Eight quantiles up from 1/2 on the positive side, seven on the negative, 0 once; both start at the mean of the
    tail probabilities 1/32 (of 16 levels) and 1/30 (of 15)."""
    start = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    positive = [quantile(start + (0.5 - start) * i / 8) for i in range(8)]
    negative = [-quantile(start + (0.5 - start) * i / 7) for i in range(7)]
    table = sorted([*positive, *negative, 0.0])
    assert pytest.approx([v / max(table) for v in table], abs=1e-6) == list(NF4)


def test_nf4_entries_are_float32() -> None:
    assert torch.tensor(NF4, dtype=torch.float32).double().tolist() == list(NF4)
    assert (NF4[0], NF4[7], NF4[15]) == (-1.0, 0.0, 1.0)
    assert list(NF4) == sorted(set(NF4))


def test_nearest_entry_by_exhaustive_distance_in_float64() -> None:
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(NF4)], dtype=torch.float64).float()
    up, down = (middle.nextafter(torch.tensor(end)) for end in (2.0, -2.0))
    x = torch.cat([torch.linspace(-1.5, 1.5, 20001), torch.tensor(NF4), middle, up, down])
    distance = (x.double()[:, None] - torch.tensor(NF4, dtype=torch.float64)).abs()
    assert torch.equal(encode_codebook(x, NF4).long(), distance.argmin(1))  # argmin takes the first: the lower entry


def test_ties_take_the_lower_entry() -> None:
    table = (-1.0, 0.0, 0.5, 1.0)
    assert encode_codebook(torch.tensor([-0.5, 0.25, 0.75]), table).tolist() == [0, 1, 2]


def test_nan_and_infinity() -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert encode_codebook(x, NF4).tolist() == [7, 15, 0]


def test_decode_all() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert decode_codebook(codes.reshape(4, 4), NF4).flatten().tolist() == list(NF4)
    assert torch.equal(encode_codebook(decode_codebook(codes, NF4), NF4), codes)
