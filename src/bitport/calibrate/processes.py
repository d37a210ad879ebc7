"""Several processes that calibrate one model together, with exactly the result of one.

Each runs its share of the batches. The sum over the inputs of a weight is made by one process, its owner, from the rows
that all have seen, in the order of the batches: the same additions in the same order as one process makes. (Adding up
partial sums would be less to send, but float addition is not associative.) The owner chooses the codes, too, and tells
the others. How large inputs are each process counts by itself, since counts may be added in any order.
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
from bitport.errors import ArgumentError

T = TypeVar("T")


class Processes:
    """``rank`` of ``world``; by default this process alone."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @classmethod
    def joined(cls) -> Processes:
        """Those of the default group of torch.distributed, which torchrun and init_process_group make."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @classmethod
    @contextlib.contextmanager
    def of_torchrun(cls) -> Iterator[Processes]:
        """The processes that torchrun has started, connected within this context; otherwise this one alone.

        torch._dynamo, which some op imports sooner or later, keeps the group alive if it is there first. The group's
        threads then end with the interpreter, and now and then that aborts the process.
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
        """Whether it is the one that writes what all have made."""
        return self.rank == 0

    def share(self, batches: Sequence[T]) -> Sequence[T]:
        """Those of this process; ArgumentError where there are fewer batches than processes."""
        if len(batches) < self.world:
            raise ArgumentError(f"{len(batches)} batches are too few for {self.world} processes: give smaller ones")
        return batches[self.rank :: self.world]

    def rounds(self, batches: int) -> int:
        """How many batches the process with most of them runs."""
        return -(-batches // self.world)

    def total(self, owner: int, inputs: Inputs | None, rows: Rows) -> None:
        """Adds what every process has seen in one round to ``inputs``, which the owner has."""
        every: list[Any] | None = [None] * self.world if self.rank == owner else None
        dist.gather_object(rows.calls, every, dst=owner)
        for calls in every or ():
            for index, x in calls:
                assert inputs is not None
                inputs.add(x, index)

    def merged(self, own: Mapping[str, Magnitudes]) -> dict[str, Magnitudes]:
        """What all have seen, in each of them: counts, so that their order makes no difference."""
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
        """What ``make`` returns in the process ``owner``; every process gets it."""
        if self.world == 1:
            return make()
        held: list[Any] = [make() if self.rank == owner else None]
        dist.broadcast_object_list(held, src=owner)
        found: T = held[0]
        return found
