"""A float32 copy of a block that can be changed and run freely, recording the inputs of its products and its output."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitport.algorithms.reach import Origin, Reach
from bitport.calibrate.batches import each_once, run_fresh
from bitport.calibrate.inputs import Rows, Watch
from bitport.nn.targets import find_targets
from bitport.schemes import Target
from bitport.tensor import QTensor

TOLERANCE = 2.0**-10
"""The largest difference that counts as equal, relative to the size of a channel. A wrong change causes differences of
that size itself; the rounding of a right one causes 2^-20 at most in float32, and none if factors are powers of two."""

NO_PRODUCTS = ("conv", "embedding")


@dataclasses.dataclass(frozen=True)
class TrialRun:
    rows: dict[str, Rows]
    output: list[Tensor]


class Trial:
    """Uses the first of ``batches``, and each later one that reaches a weight that none before it did."""

    def __init__(self, module: nn.Module, batches: Iterable[Any]) -> None:
        self.block = copy.deepcopy(module).float()
        own = dict(self.block.named_parameters())  # tied ones once
        found = [target for target in find_targets(self.block) if _is_factor(target)]
        named = {target.name: param for target in found if (param := own.get(target.name)) is not None}
        self.weights = {name: param for name, param in named.items() if not isinstance(param, QTensor)}
        self.flipped = [target.name for target in found if target.transposed]
        self.batches: list[Any] = []
        self.before = TrialRun({name: Rows() for name in self.weights}, [])
        for batch in map(_in_float, batches):
            run, unseen = self._run([batch]), self.unseen()
            if not self.batches or any(run.rows[name].calls for name in unseen):
                self.batches.append(batch)
                self.before.output.extend(run.output)
                for name, rows in self.before.rows.items():
                    rows.calls += run.rows[name].calls
            if not self.unseen():
                break

    def run(self) -> TrialRun:
        return self._run(self.batches)

    def _run(self, batches: Iterable[Any]) -> TrialRun:
        output: list[Tensor] = []
        watch = Watch(self.weights, self.flipped, collect=Rows)
        with watch:
            for batch in batches:
                leaves = tree_leaves(run_fresh(self.block, batch))
                output += [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return TrialRun(watch.seen, output)

    def unseen(self) -> list[str]:
        return [name for name in self.weights if not self.before.rows[name].calls]

    def reached(self, names: Collection[str]) -> dict[str, set[str]]:
        """For each of these parameters, the weights whose inputs it contributes to."""
        reach = Reach(self.block, names)
        watch = Watch(self.weights, self.flipped, collect=lambda *_: Origin(reach))
        with reach, watch:
            for batch in self.batches:
                reach.begin(batch)
                run_fresh(self.block, batch)
        return {name: {weight for weight, each in watch.seen.items() if name in each.names} for name in names}

    def axis(self, name: str) -> int:
        """The axis of a weight that its inputs lie along."""
        return -2 if name in self.flipped else -1

    def columns(self, name: str) -> int:
        return self.weights[name].shape[self.axis(name)]

    def keeps_output(self, run: TrialRun) -> bool:
        return 0 < len(run.output) == len(self.before.output) and all(
            same(ours, theirs) for ours, theirs in zip(run.output, self.before.output, strict=True)
        )

    @contextlib.contextmanager
    def undone(self, names: Iterable[str]) -> Iterator[Callable[[], None]]:
        """Restore these parameters on exit, unless the function that is yielded has been called."""
        params = {name: self.block.get_parameter(name) for name in names}
        before = {name: param.detach().clone() for name, param in params.items()}
        try:
            yield before.clear
        finally:
            for name, value in before.items():
                params[name].data.copy_(value)

    def changed(self, name: str, run: TrialRun) -> bool:
        return any(now is None or not same(now, was) for _, was, now in self.compared(name, run))

    def compared(self, name: str, run: TrialRun) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor | None]]:
        """Yield (matrix index, original input, input in ``run`` or None if the calls differ)."""
        was, now = self.before.rows[name].calls, run.rows[name].calls
        alike = [(index, x.shape) for index, x in was] == [(index, x.shape) for index, x in now]
        for at, (index, x) in enumerate(was):
            yield index, x, now[at][1] if alike else None


def _is_factor(target: Target) -> bool:
    """Whether it is the weight of a product; the biases of experts [experts, N] are not matrices."""
    return target.kind not in NO_PRODUCTS and not target.param.endswith("bias")


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Compare channel by channel; the tolerance of a negligible channel is relative to the others."""
    if ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ours.shape == theirs.shape
    ours, theirs = (each.reshape(-1, each.shape[-1] if each.dim() else 1) for each in (ours, theirs))
    size = theirs.square().sum(0).sqrt()  # norm(dim=0), but four times faster
    floor = TOLERANCE * size.square().mean().sqrt()
    off = (ours - theirs).square_().sum(0).sqrt()
    return bool((off <= TOLERANCE * (size + floor)).all())


def _in_float(batch: Any) -> Any:
    return each_once(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )
