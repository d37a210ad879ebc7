"""Gradients as data."""

from __future__ import annotations

import pytest

from bitport.errors import SchemeError
from bitport.schemes import preset
from bitport.train import GRADIENTS, Gradients
from bitport.train.gradients import gradients_of


def test_by_name_or_as_they_are() -> None:
    assert gradients_of(None) is None
    assert gradients_of("mxfp8") is GRADIENTS["mxfp8"]
    own = Gradients(input=preset("int8-dyn"))
    assert gradients_of(own) is own


def test_unknown_names_are_listed() -> None:
    with pytest.raises(SchemeError, match="unknown gradients 'fp16'; known: fp8, fp8-row"):
        gradients_of("fp16")


@pytest.mark.parametrize("name", ["int8-static", "int4", "fp8-wo"])
def test_both_factors_are_rounded_by_measured_scales(name: str) -> None:
    with pytest.raises(SchemeError, match=r"Gradients.weight=.*both factors of a gradient change"):
        Gradients(weight=preset(name))
