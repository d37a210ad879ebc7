"""Record the arguments of a model's blocks, by a run in which stand-ins replace the blocks; then see on two batches
whether the record is true."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitport.calibrate.batches import Call, run_fresh
from bitport.calibrate.inputs import Rows, Watch
from bitport.calibrate.place import Place, checked
from bitport.calibrate.stand_in import Between, Shape, StandIn, kind_of, look_of, tensors_in
from bitport.calibrate.store import GIVEN, Store, Tensors
from bitport.errors import ArgumentError
from bitport.schemes import Target


@dataclasses.dataclass(frozen=True)
class Previous:
    """Placeholder for leaf ``at`` of the previous block's output."""

    at: int


@dataclasses.dataclass(frozen=True)
class Given:
    """Placeholder for tensor ``at`` among those that the model itself passes to its blocks."""

    at: int


@dataclasses.dataclass
class Record:
    """``order``: the blocks in the order that every batch calls them in, once each. ``calls``: arguments per batch,
    with Previous and Given in place of tensors. ``shapes``: of the outputs; empty if the blocks really ran. ``given``:
    bytes of the tensors behind Given, per batch."""

    order: list[str]
    calls: list[dict[str, Call]]
    shapes: list[dict[str, Shape]]
    given: list[int]

    def uses(self, batch: int, block: str, kind: type[Previous] | type[Given]) -> set[int]:
        leaves = tree_leaves(tuple(self.calls[batch][block]))
        return {leaf.at for leaf in leaves if isinstance(leaf, kind)}


def recorded(
    model: nn.Module,
    blocks: Sequence[str],
    own: Sequence[str],
    outside: Sequence[Target],
    batches: Sequence[Any],
    store: Store,
    place: Place,
) -> Record:
    """Record the calls of ``blocks``. If the model computes something between them, or they hand on more than they
    return, run the whole original model and record the true inputs of the blocks in ``own``. ``outside``: weights in
    no block."""
    reason = "it has no blocks (children of a ModuleList or a Sequential)"
    if blocks:
        try:
            record = _run_through(model, blocks, batches, store, place, stand_ins=True)
            if record.order and _is_true(model, record, outside, batches, store, place):
                return record
            reason = "it calls some block twice, or not for every batch"
            if record.order:
                reason = "a block gives others more than what it returns, or the model gives other numbers in each run"
        except Between:
            reason = "it, or a block, writes to or looks at what the next block is given"
        except (AttributeError, LookupError) as error:  # of something that a block leaves for others, or in every run
            reason = f"without what its blocks compute it ends with {type(error).__name__}: {error}"
    if place.must_stream:
        raise ArgumentError(
            f"{type(model).__name__} cannot be calibrated block by block: {reason}. Load the whole model"
        )
    return _run_through(model, own, batches, store, place, stand_ins=False)


def _run_through(
    model: nn.Module, blocks: Sequence[str], batches: Sequence[Any], store: Store, place: Place, *, stand_ins: bool
) -> Record:
    called: list[dict[str, Call]] = []
    orders: list[list[str]] = []
    shapes: list[dict[str, Shape]] = []
    given: list[int] = []
    known: dict[object, tuple[Shape, list[int]]] = {}  # and the leaves of the arguments that a block writes to
    memory = _Memory()

    def instead(name: str) -> Callable[..., Any]:
        block = model.get_submodule(name)
        forward, kind = block.forward, kind_of(block)

        def stub(*args: Any, **kwargs: Any) -> Any:
            called[-1][name] = Call(*tree_map(memory.kept, (args, kwargs)))
            orders[-1].append(name)
            if not stand_ins:
                output = forward(*args, **kwargs)
            else:
                look = kind, look_of((args, kwargs))
                if look not in known:
                    with place.inside(name):
                        plain = tree_map(_plain, (args, kwargs))
                        shape = Shape(forward(*plain[0], **plain[1]))
                    leaves = enumerate(tree_leaves(plain))
                    known[look] = shape, [at for at, leaf in leaves if isinstance(leaf, Tensor) and leaf._version]
                shapes[-1][name], written = known[look]
                memory.write(tree_leaves((args, kwargs)), written)
                output = shapes[-1][name].stand_in()
            memory.put_out(tree_leaves(output))
            return output

        return stub

    with replaced(model, {name: instead(name) for name in blocks}), place.outside(blocks):
        for at, batch in enumerate(batches if blocks else ()):
            called.append({})
            orders.append([])
            shapes.append({})
            memory = _Memory()
            with checked(model, place):
                run_fresh(model, batch)
            given.append(sum(tensor.nbytes for tensor in memory.tensors.values()))
            store.put(GIVEN, at, memory.tensors)
    alike = bool(orders) and all(order == orders[0] for order in orders) and len(orders[0]) == len(called[0])
    return Record(orders[0], called, shapes if stand_ins else [], given) if alike else Record([], [], [], [])


class _Memory:
    """The tensors that one run passes to its blocks. A tensor counts as the same until it is written to."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.tensors: Tensors = {}
        self.output: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self.written: dict[tuple[int, int], Tensor] = {}
        """What a block that did not run would have written to."""

    def write(self, leaves: list[Any], which: list[int]) -> None:
        self.written |= {(id(leaves[at]), leaves[at]._version): leaves[at] for at in which}

    def put_out(self, leaves: list[Any]) -> None:
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.output = {(id(leaf), leaf._version): (leaf, at) for at, leaf in tensors}

    def kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        key = (id(leaf), leaf._version)
        if key in self.written:
            raise Between("a block that writes to what the next one is given")
        if key in self.output:
            return Previous(self.output[key][1])
        if isinstance(leaf, StandIn):
            raise Between("a call of the next block")
        if key not in self.places:
            self.places[key] = leaf, len(self.tensors)
            self.tensors[len(self.tensors)] = leaf.detach().clone()
        return Given(self.places[key][1])


def _is_true(
    model: nn.Module, record: Record, outside: Sequence[Target], batches: Sequence[Any], store: Store, place: Place
) -> bool:
    """Whether the blocks, and after them the weights ``outside``, get what the record says, on the first batch and on
    the last. They get something else if a block writes to a list or an object that it is given, or if it or a hook
    keeps something: that of the last batch is still there when the first runs again, without blocks."""
    true = True
    given = {at: store.get(GIVEN, at) for at in sorted({0, len(batches) - 1})}
    outputs: dict[int, Tensors] = {}  # by batch, of the block that ran last

    def really(name: str, at: int) -> Callable[..., Any]:
        forward = model.get_submodule(name).forward

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal true
            told = filled(record.calls[at][name], given[at], outputs.get(at, {}))
            true = true and _alike(told, Call(args, kwargs))
            with place.inside(name):
                output = forward(*args, **kwargs)
            leaves = enumerate(tree_leaves(output))
            outputs[at] = {leaf: value.clone() for leaf, value in leaves if isinstance(value, Tensor)}
            return output

        return run

    def stub(name: str, at: int) -> Callable[..., Any]:
        shape = record.shapes[at][name]
        return lambda *args, **kwargs: shape.filled(outputs[at] if name == record.order[-1] else {})

    def seen(instead: Callable[[str, int], Callable[..., Any]]) -> Iterator[list[Any]]:
        for at in given:
            blocks = {name: instead(name, at) for name in record.order}
            with replaced(model, blocks), Watch.of(model, outside, Rows) as watch, checked(model, place):
                run_fresh(model, batches[at])
            yield [rows.calls for rows in watch.seen.values()]

    with contextlib.ExitStack() as held:
        held.enter_context(place.outside(record.order))
        for target in outside:
            held.enter_context(place.inside(target.name))
        wanted = [*seen(really)]
        try:
            return true and _alike([*seen(stub)], wanted)
        except Between:  # the weights outside get more than the output of the last block, so the whole model will run
            return true


def _alike(some: Any, others: Any) -> bool:
    first, second = ([each for leaf in tree_leaves(tree) for each in tensors_in(leaf)] for tree in (some, others))
    return len(first) == len(second) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
        for a, b in zip(first, second, strict=True)
    )


def filled(call: Call, given: Tensors, outputs: Tensors) -> Call:
    def put(leaf: Any) -> Any:
        if isinstance(leaf, Previous):
            return outputs[leaf.at]
        return given[leaf.at] if isinstance(leaf, Given) else leaf

    return Call(*tree_map(put, tuple(call)))


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor).clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


@contextlib.contextmanager
def replaced(model: nn.Module, forwards: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace the forward of the named modules; their hooks still run."""
    modules = {name: model.get_submodule(name) for name in forwards}
    before = {name: vars(module)["forward"] for name, module in modules.items() if "forward" in vars(module)}
    for name, module in modules.items():
        module.forward = forwards[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            if name in before:
                module.forward = before[name]
