"""Common setup of every test: one thread, a fixed seed, and registries that no other test has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from bitport import layouts, plugins
from bitport.ops import IMPLS
from bitport.ops.select import FORCED, changed

torch.set_num_threads(1)
os.environ["BITPORT_CACHE"] = os.devnull  # results of bitport tune on this machine must not affect tests
plugins.load()  # so that the registries are complete when tests are collected from them


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def own_tables() -> Iterator[None]:
    """Restore kernels, layouts and forced kernels after the test. The lists are modified in place, since the selectors
    hold references to them."""
    kernels = {key: list(impls) for key, impls in IMPLS.items()}
    known, forced = dict(layouts.LAYOUTS), dict(FORCED)
    yield
    for key, impls in IMPLS.items():
        impls[:] = kernels.get(key, [])
    for table, before in ((layouts.LAYOUTS, known), (FORCED, forced)):
        table.clear()
        table.update(before)
    changed()
