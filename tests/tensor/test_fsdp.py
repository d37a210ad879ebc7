"""FSDP2 over quantized models in two processes, and on top of tensor parallelism in four."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.fsdp import FSDPModule

from bitport.tensor import QTensor
from tests import ranks

pytestmark = pytest.mark.xdist_group("fsdp")  # started once, by one worker
IN_TWO, IN_FOUR = "tests.tensor.on_fsdp", "tests.tensor.on_two_dimensions"


@pytest.mark.parametrize("check", ranks.names(IN_TWO))
def test_in_two_processes(check: str) -> None:
    ranks.must_pass(check, IN_TWO, 2)


@pytest.mark.slow
@pytest.mark.parametrize("check", ranks.names(IN_FOUR))
def test_in_four_processes(check: str) -> None:
    ranks.must_pass(check, IN_FOUR, 4)


def test_the_hooks_are_as_torch_calls_them() -> None:
    """torch tells the two forms of fsdp_pre_all_gather apart by the number of parameters."""
    assert len(inspect.signature(QTensor.fsdp_pre_all_gather).parameters) == 2
    assert "out" in inspect.signature(QTensor.fsdp_post_all_gather).parameters
    assert hasattr(FSDPModule, "set_custom_all_gather")
