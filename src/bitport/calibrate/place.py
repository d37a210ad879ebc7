"""Where a model's weights are while it is walked: in the model all the time, or brought block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

REST = ""
"""The step of what lies in no block."""


class Place(Protocol):
    must_stream: bool
    """The model never runs as a whole."""

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        """Within it modules outside of ``blocks`` have their weights when they are called."""

    def inside(self, name: str) -> AbstractContextManager[None]:
        """Within it that module has its weights, quantized ones if its step is done; or that parameter is there."""

    def done(self, step: str) -> bool:
        """Whether a run that ended early has dealt with that block, or with REST, already."""

    def finish(self, step: str) -> None:
        """All weights of that step are quantized, and its outputs are in the store."""


class Whole:
    """A model in memory."""

    must_stream = False

    def outside(self, blocks: Collection[str]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def inside(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def done(self, step: str) -> bool:
        return False

    def finish(self, step: str) -> None:
        """Nothing is to be done."""
