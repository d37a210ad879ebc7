"""Calibrate one model with several processes, with exactly the result of a single one.

Each process runs its share of the batches. The sum over the inputs of a weight is computed by one process, its owner,
from the rows seen by all, in the order of the batches: the same additions in the same order as in a single process.
(Adding up partial sums would send less, but float addition is not associative.) The owner also chooses the codes and
broadcasts them. Histograms of input magnitudes are kept per process, since counts can be added in any order.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from bitport.calibrate.inputs import Inputs, Rows
from bitport.calibrate.magnitudes import Magnitudes
from bitport.errors import ArgumentError, BitportError

T = TypeVar("T")


class Processes:
    """Process ``rank`` of ``world``; by default a single process."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @classmethod
    def joined(cls) -> Processes:
        """The processes of torch.distributed's default group, as created by torchrun and init_process_group."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @classmethod
    @contextlib.contextmanager
    def of_torchrun(cls) -> Iterator[Processes]:
        """The processes started by torchrun, connected within this context; otherwise this one alone.

        torch._dynamo, which some op imports eventually, is imported before the group is created. Otherwise it keeps the
        group alive, whose threads then end with the interpreter, which occasionally aborts the process.
        """
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or int(os.environ["WORLD_SIZE"]) == 1:
            yield cls()
            return
        importlib.import_module("torch._dynamo")
        dist.init_process_group("gloo")
        try:
            yield cls.joined()
        finally:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this process writes the common result."""
        return self.rank == 0

    def share(self, batches: Sequence[T]) -> Sequence[T]:
        """The batches of this process; ArgumentError if there are fewer batches than processes."""
        if len(batches) < self.world:
            raise ArgumentError(f"{len(batches)} batches are too few for {self.world} processes: give smaller ones")
        return batches[self.rank :: self.world]

    def rounds(self, batches: int) -> int:
        """The largest number of batches that any process runs."""
        return -(-batches // self.world)

    def total(self, owner: int, inputs: Inputs | None, rows: Rows) -> None:
        """Add the rows that all processes saw in one round to ``inputs``, which only the owner has."""
        every: list[Any] | None = [None] * self.world if self.rank == owner else None
        dist.gather_object([(index, x.cpu()) for index, x in rows.calls], every, dst=owner)
        for calls in every or ():
            for index, x in calls:
                assert inputs is not None
                inputs.add(x.to(inputs.gram.device), index)

    def merged(self, own: Mapping[str, Magnitudes]) -> dict[str, Magnitudes]:
        """The sum over all processes, in each of them; these are counts, so their order does not matter."""
        every: list[Any] = [own]
        if self.world > 1:
            every *= self.world
            dist.all_gather_object(every, own)
        total = {name: Magnitudes() for name in own}
        for found in every:
            for name, each in found.items():
                total[name] += each
        return total

    def shared(self, owner: int, make: Callable[[], T]) -> T:
        """Call ``make`` in the process ``owner`` and return its result in every process, or raise its error in every
        process: none may go on to wait for one that has failed."""
        if self.world == 1:
            return make()
        lost = BitportError(f"process {owner} failed, and its result is needed here: its own error says why")
        held: list[Any] = [(None, lost)]
        try:
            if self.rank == owner:
                held = [(make(), None)]
        except BitportError as error:
            held = [(None, error)]
            raise
        finally:
            dist.broadcast_object_list(held, src=owner)
        found, failed = held[0]
        if failed is not None:
            raise failed
        result: T = found
        return result

    def each(self, make: Callable[[], T]) -> T:
        """Call ``make`` in every process and return its own result, or raise in every process the error of the first
        that failed: the others may not go on to wait for it."""
        if self.world == 1:
            return make()
        own: BitportError | None = BitportError(f"process {self.rank} failed: its own error says why")
        errors: list[BitportError | None] = [None] * self.world
        try:
            result = make()
            own = None
        except BitportError as error:
            own = error
            raise
        finally:
            dist.all_gather_object(errors, own)
        if failed := next(filter(None, errors), None):
            raise failed
        return result
