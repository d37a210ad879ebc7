"""The cases of torch_xla's own tests (shapes, bits and tolerances) on XLA's CPU, compiled:
``tests/ops/test_quantized_matmul.py`` again, with the JAX function in place of the op."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from torch import Tensor

from bitport.backends.xla.functions import FUNCTIONS
from bitport.backends.xla.move import to_array, to_tensor
from tests.ops import test_quantized_matmul as cases
from tests.ops.test_quantized_matmul import (  # noqa: F401  (collected here a second time)
    test_a_layer_of_5_to_8_is_within_a_hundredth,
    test_asymmetric_per_channel,
    test_blockwise,
    test_int4_per_channel,
)

pytestmark = pytest.mark.xla


def on_xla(
    x: Tensor,
    w: Tensor,
    scaler: Tensor,
    zero_point: Tensor | None = None,
    block_size: int = -1,
    int4_weight: bool = False,
    quantize_activation: bool = False,
) -> Tensor:
    arrays: list[Any] = [None if part is None else to_array(part) for part in (x, w, scaler, zero_point)]
    static = (block_size, int4_weight, quantize_activation)
    return to_tensor(jax.jit(lambda *parts: FUNCTIONS["quantized_matmul"](*parts, *static))(*arrays))


@pytest.fixture(autouse=True)
def xla_in_place_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "op", on_xla)
