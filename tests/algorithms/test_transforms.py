"""What every transform promises: the float model computes what it did."""

from __future__ import annotations

import pytest

import bitport
from bitport.algorithms import TRANSFORMS
from bitport.numerics import sqnr

from .families import batch_of, model_of, output


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_not_quantized_computes_what_it_did(name: str, family: str) -> None:
    """The other weights absorb the change: quantizing one layer of each block to eight bits changes little. Its two
    factors are rounded in steps of 1/127 of their largest number, some three times the usual one: 43 dB each. A change
    that is not undone leaves less than 10 dB."""
    model = model_of(family)
    before = output(model, family)
    report = bitport.quantize_(
        model, {"*.q_proj": "int8-dyn", "*": "skip"}, algorithm=name, calibrate=[batch_of(family, 4)]
    )
    assert len(report.quantized) == 2
    assert name in " ".join(row.note for row in report.quantized)
    assert sqnr(before, output(model, family)) > 30
