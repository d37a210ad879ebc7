"""What every test starts from: one thread, a fixed seed, and no trace of another test in bitport's tables."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from bitport import layouts, plugins
from bitport.ops import IMPLS
from bitport.ops.select import FORCED, changed

torch.set_num_threads(1)
os.environ["BITPORT_CACHE"] = os.devnull  # what bitport tune measured on this machine decides no test
plugins.load()  # so that the tables are complete when tests are collected from them


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_tables() -> Iterator[None]:
    """Kernels, layouts and forced kernels as they were, whatever the test registers. The lists are kept, since the
    selectors hold on to them."""
    kernels = {key: list(impls) for key, impls in IMPLS.items()}
    known, forced = dict(layouts.LAYOUTS), dict(FORCED)
    yield
    for key, impls in IMPLS.items():
        impls[:] = kernels.get(key, [])
    for table, before in ((layouts.LAYOUTS, known), (FORCED, forced)):
        table.clear()
        table.update(before)
    changed()
