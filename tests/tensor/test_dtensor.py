"""DTensors of QTensors and tensor parallelism, in two and in three processes."""

from __future__ import annotations

import pytest

from tests import ranks

pytestmark = pytest.mark.xdist_group("dtensor")  # started once, by one worker
CHECKS = "tests.tensor.on_dtensor"


@pytest.mark.parametrize("world", ranks.WORLDS)
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_several_processes(check: str, world: int) -> None:
    ranks.must_pass(check, CHECKS, world)
