"""Parameters sharded over two processes (FSDP2): the same numbers as in one process, and states that can be saved and
resumed."""

from __future__ import annotations

import pytest

from tests import ranks

CHECKS = "tests.train.optim.on_sharded"


@pytest.mark.xdist_group("sharded optimizers")  # started once, by one worker
@pytest.mark.parametrize("check", ranks.names(CHECKS))
def test_in_two_processes(check: str) -> None:
    ranks.must_pass(check, CHECKS, 2)
