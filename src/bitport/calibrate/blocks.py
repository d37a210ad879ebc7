"""Block-by-block calibration: the inputs of each weight of a model whose earlier blocks are quantized already.

A model's blocks are the children of its outermost ModuleLists and Sequentials. A run of every batch in which the blocks
do not compute (:mod:`bitport.calibrate.record`) records the arguments of each block, and which of these are exactly the
output of the previous block; real runs of the first and the last batch show whether that is all. Then for each
block: run it on every batch while watching its weights; yield them to be quantized; run it again, quantized, for the
inputs of the next. So every block runs twice per batch, however many blocks there are, up to the last one that is
watched, and a model whose weights are loaded block by block (:class:`bitport.calibrate.place.Place`) is walked in the
same way as one in memory. Weights in no block (such as an output head) come last, from the outputs of the last block.

If a model calls a block more than once or not at all, or modifies the output of one before the next receives it, or a
block writes to what another is given too, or hands on more than it returns, the inputs are those of the unquantized
model, which then has to run as a whole.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitport.calibrate.batches import Call, run_fresh
from bitport.calibrate.contexts import in_use
from bitport.calibrate.inputs import Inputs, Rows, Watch, check_inputs
from bitport.calibrate.magnitudes import Magnitudes
from bitport.calibrate.place import REST, Place, Whole, checked
from bitport.calibrate.processes import Processes
from bitport.calibrate.record import Given, Previous, Record, filled, recorded, replaced
from bitport.calibrate.stand_in import Between
from bitport.calibrate.store import GIVEN, InMemory, Store
from bitport.errors import ArgumentError
from bitport.schemes import Target
from bitport.tensor import QTensor

Measured = Iterator[tuple[Target, "Inputs | None"]]
Prepare = Callable[[str, nn.Module, Iterable[Any], dict[str, Inputs]], None]
"""May change a block, in float, along with the inputs of its weights, before the first of these is yielded. Receives
the name of the block ("" for weights in no block), the block, its batches, and the inputs."""


def measured(
    model: nn.Module,
    targets: Sequence[Target],
    wanted: Collection[str],
    batches: Sequence[Any],
    prepare: Prepare | None = None,
) -> Measured:
    """Yield each of ``targets`` of a model in memory, with its inputs if its name is in ``wanted``. The caller
    quantizes it in place before asking for the next."""
    return Walk(model, targets, wanted, batches, Whole(), InMemory(), prepare).measured()


class Walk:
    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        wanted: Collection[str],
        batches: Sequence[Any],
        place: Place,
        store: Store,
        prepare: Prepare | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.wanted, self.prepare = model, wanted, prepare
        self.place, self.store, self.processes = place, store, processes or Processes()
        self.batches = self.processes.share(batches)
        self.rounds = self.processes.rounds(len(batches))
        self.owner = {target.name: at % self.processes.world for at, target in enumerate(targets)}
        every = blocks_of(model)
        own = [name for name in every if any(_inside(target, name) for target in targets)]
        outside = _outside(model, targets, every)
        with in_use(model):
            self.record = recorded(model, every, own, outside, self.batches, store, place)
        self.targets = {name: [each for each in targets if _inside(each, name)] for name in self.order}
        self.rest = _outside(model, targets, self.order)

    @property
    def order(self) -> list[str]:
        return self.record.order

    @property
    def left(self) -> list[Target]:
        """Targets of steps that no earlier run has finished."""
        steps = (*self.targets.items(), (REST, self.rest))
        return [target for step, own in steps if not self.place.done(step) for target in own]

    def measured(self) -> Measured:
        """Yield the targets, with the inputs of those that are wanted. Those of finished steps (Place.done) are left
        out."""
        last = self.last(self.wanted)
        first = self._first()
        for at, name in enumerate(self.order[first:], first):
            with self.place.inside(name):
                if not self.place.done(name):
                    yield from self._watched(name, self._calls(at), self.targets[name])
                if at < last:
                    self._run(at)
                self.place.finish(name)
            if at:
                self.store.drop(self.order[at - 1])
            else:
                self._forget_first()
        if not self.place.done(REST):
            yield from self._rest()
            self.place.finish(REST)

    def magnitudes(self, targets: Sequence[Target]) -> Iterator[dict[str, Magnitudes]]:
        """Yield, step by step, the magnitudes of the inputs of ``targets`` in the original model, over the batches of
        this process; to be used before measured(). A weight used by several steps accumulates. Every block runs
        once."""
        found: dict[str, Magnitudes] = {}
        last = self.last({target.name for target in targets})
        for at, name in enumerate(self.order[: last + 1]):
            with self.place.inside(name), self._sizes(name, targets, found) as seen:
                self._run(at)
            if at:
                self.store.drop(self.order[at - 1])
            yield seen
        if last == len(self.order):
            with self._outside(), self._sizes(REST, targets, found) as seen:
                self.processes.each(lambda: collections.deque(self._around(), 0))
            yield seen
        for name in self.order:
            self.store.drop(name)

    @contextlib.contextmanager
    def _sizes(
        self, step: str, targets: Sequence[Target], found: dict[str, Magnitudes]
    ) -> Iterator[dict[str, Magnitudes]]:
        """Watch those of ``targets`` that are in ``step``. ``found``: the magnitudes of all, by storage."""
        names = {target.name for target in targets}
        own = [each for each in (self.targets[step] if step else self.rest) if each.name in names]
        watch = Watch.of(self.model, own, Magnitudes)
        watch.seen = {target.name: found.setdefault(target.storage, Magnitudes()) for target in own}
        with in_use(self.model), watch:
            yield watch.seen

    def last(self, names: Collection[str]) -> int:
        """The index of the last step, counting REST, that has one of these weights; -1 if there is none."""
        steps = enumerate((*(self.targets[name] for name in self.order), self.rest))
        return max((at for at, own in steps if any(target.name in names for target in own)), default=-1)

    def _calls(self, at: int) -> _Calls:
        return _Calls(self.record, self.store, self.order[at], self.order[at - 1] if at else None)

    def _run(self, at: int) -> None:
        """Run a block to store the inputs of the next."""
        name = self.order[at]
        block = self.model.get_submodule(name)

        def run() -> None:
            for batch, call in enumerate(self._calls(at)):
                leaves = tree_leaves(run_fresh(block, call))
                self.store.put(name, batch, _used(self.record, batch, at, leaves))

        with in_use(self.model):
            self.processes.each(run)

    def _first(self) -> int:
        """The first block whose outputs are not stored yet."""
        done = [at for at, name in enumerate(self.order) if self.place.done(name) and self.store.holds(name)]
        return done[-1] + 1 if done else 0

    def _forget_first(self) -> None:
        """Drop tensors that only the first block is given, such as the embedded tokens."""

        def forget() -> None:
            for batch in range(len(self.batches)):
                held = self.store.get(GIVEN, batch)
                used = {at for name in self.order[1:] for at in self.record.uses(batch, name, Given)}
                if set(held) - used:
                    self.store.put(GIVEN, batch, {at: held[at] for at in used})

        self.processes.each(forget)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Load the weights that are in no block."""
        with contextlib.ExitStack() as held:
            held.enter_context(self.place.outside(self.order))
            for target in self.rest:
                held.enter_context(self.place.inside(target.name))
            yield

    def _around(self) -> Iterator[Any]:
        """Run everything around the blocks, which return their stored outputs; without a recorded sequence of blocks,
        run the whole model."""
        last = self.order[-1] if self.record.shapes else None
        batch = 0

        def stub(name: str) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                return self.record.shapes[batch][name].filled(self.store.get(name, batch) if name == last else {})

            return forward

        try:
            with replaced(self.model, {name: stub(name) for name in self.order} if last else {}):
                for at, each in enumerate(self.batches):
                    batch = at
                    with checked(self.model, self.place):
                        output = run_fresh(self.model, each)
                    yield output
        except Between as error:
            if not self.place.must_stream:
                raise
            raise ArgumentError(
                f"{type(self.model).__name__} uses the outputs of more blocks than its last: load the whole model"
            ) from error

    def _rest(self) -> Measured:
        with self._outside():
            try:
                yield from self._watched(REST, self.batches, self.rest, self._around())
            except Between:
                yield from self._watched(REST, self.batches, self.rest)

    def _watched(
        self, step: str, batches: Iterable[Any], targets: list[Target], work: Iterator[None] | None = None
    ) -> Measured:
        """Yield ``targets`` with their inputs while the module ``step`` (the model, for REST) runs on ``batches``, or
        by ``work`` if given."""
        module = self.model.get_submodule(step)
        wanted = [each for each in targets if each.name in self.wanted]
        seen = [each for each in wanted if not isinstance(each.weight(self.model), QTensor)]  # tied ones may be already
        steps = work or (run_fresh(module, batch) for batch in batches)
        with in_use(self.model):
            inputs = self._inputs(seen, steps) if seen else {}
            self.processes.each(lambda: check_inputs(inputs))
            if self.prepare is not None and seen:
                self.prepare(step, module, batches, inputs)
        for target in targets:
            yield target, inputs.pop(target.name, None)

    def _inputs(self, targets: list[Target], steps: Iterator[Any]) -> dict[str, Inputs]:
        """The inputs of the weights that this process owns, over all batches; ``steps`` runs those of this process."""
        watch = Watch.of(self.model, targets)
        if self.processes.world == 1:
            with watch:
                for _ in steps:
                    pass
            return watch.seen
        found = {name: each for name, each in watch.seen.items() if self.owner[name] == self.processes.rank}
        for _ in range(self.rounds):
            with Watch.of(self.model, targets, Rows) as rows:
                self.processes.each(lambda: next(steps, None))
            for name, _, _ in rows.weights.values():  # the first of tied ones
                self.processes.total(self.owner[name], found.get(name), rows.seen[name])
        return found


class _Calls(Iterable[Call]):
    """Re-iterable calls of one block that hold only one batch in memory at a time."""

    def __init__(self, record: Record, store: Store, block: str, previous: str | None) -> None:
        self.record, self.store, self.block, self.previous = record, store, block, previous

    def __iter__(self) -> Iterator[Call]:
        for batch, calls in enumerate(self.record.calls):
            outputs = self.store.get(self.previous, batch) if self.previous else {}
            yield filled(calls[self.block], self.store.get(GIVEN, batch), outputs)


def _used(record: Record, batch: int, at: int, leaves: list[Any]) -> dict[int, Tensor]:
    """The leaves of the output of block ``at`` that the next one uses; for the last block all tensors."""
    if at + 1 < len(record.order):
        return {leaf: leaves[leaf] for leaf in record.uses(batch, record.order[at + 1], Previous)}
    return {leaf: value for leaf, value in enumerate(leaves) if isinstance(value, Tensor)}


def blocks_of(model: nn.Module) -> list[str]:
    """The names of the blocks; one that is in several lists is named once."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{block}.") for block in found.values())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inside:
            for child, block in module.named_children():
                found.setdefault(block, f"{name}.{child}".lstrip("."))
    return [*found.values()]


def _inside(target: Target, block: str) -> bool:
    return target.module == block or target.module.startswith(f"{block}.")


def _outside(model: nn.Module, targets: Sequence[Target], blocks: Sequence[str]) -> list[Target]:
    """Those of ``targets`` that lie in no block, under none of the names that a block has."""
    every = {model.get_submodule(name) for name in blocks}
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module in every]
    return [each for each in targets if not any(_inside(each, name) for name in names)]
