"""Block by block: the inputs of each weight of a model whose earlier blocks are quantized already.

A model's blocks are the children of its outermost ModuleLists and Sequentials. One run of the model on every batch
records what each block is called with; what is the very output of the block before is left out and filled in later.
Then for each block: run it on every batch and watch its weights; hand them out to be quantized; run it again,
quantized, for the outputs that go into the next. So every block runs three times on every batch, however many there
are.

Where a model calls a block more than once or not at all, or does something to the output of one before the next gets
it, the inputs are those of the unquantized model. What lies in no block (an output head) comes last, from a whole
run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bitport.calibrate.batches import Call, run_fresh
from bitport.calibrate.inputs import Inputs, Watch, check_inputs
from bitport.schemes import Target
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class Previous:
    """Stands for leaf ``at`` of the output of the block before."""

    at: int


Measured = Iterator[tuple[Target, "Inputs | None"]]
Prepare = Callable[[str, nn.Module, Sequence[Any], dict[str, Inputs]], None]


def measured(
    model: nn.Module,
    targets: Sequence[Target],
    wanted: Collection[str],
    batches: Sequence[Any],
    prepare: Prepare | None = None,
) -> Measured:
    """Each of ``targets``, with its inputs if its name is ``wanted``. Whoever takes one quantizes it in place before
    asking for the next. ``prepare`` may change a block, and the inputs of its weights with it, before its first is
    handed out: it gets the block's name ("" for what lies in none), the block, its batches, and the inputs."""
    names = [name for name in blocks_of(model) if any(_inside(target, name) for target in targets)]
    with without_cache(model):
        calls = _recorded(model, names, batches)
        order = list(calls[0]) if calls else []
        outputs: list[list[Any]] = [[] for _ in calls]
        for name in order:
            block, own = model.get_submodule(name), [target for target in targets if _inside(target, name)]
            ready = [_filled(calls[at].pop(name), outputs[at]) for at in range(len(calls))]
            yield from _watched(model, own, wanted, name, ready, prepare)
            outputs = [tree_leaves(run_fresh(block, call)) for call in ready]
        rest = [target for target in targets if not any(_inside(target, name) for name in order)]
        if rest:
            yield from _watched(model, rest, wanted, "", batches, prepare)


def blocks_of(model: nn.Module) -> list[str]:
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(f"{name}.".startswith(f"{block}.") for block in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not inside:
            found += [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
    return found


def _inside(target: Target, block: str) -> bool:
    return target.module == block or target.module.startswith(f"{block}.")


def _watched(
    model: nn.Module,
    targets: list[Target],
    wanted: Collection[str],
    name: str,
    batches: Sequence[Any],
    prepare: Prepare | None,
) -> Measured:
    """The inputs of ``targets`` while the block ``name`` ("": the model) runs on ``batches``."""
    module = model.get_submodule(name)
    weights = {target.name: getattr(model.get_submodule(target.module), target.param) for target in targets}
    seen = [each for each in targets if each.name in wanted and not isinstance(weights[each.name], QTensor)]
    weights = {target.name: weights[target.name] for target in seen}  # a tied one is quantized already
    watch = Watch(weights, [target.name for target in seen if target.transposed])
    with watch:
        for batch in batches if seen else ():
            run_fresh(module, batch)
    for seen_name, inputs in watch.seen.items():
        check_inputs(seen_name, inputs)
    if prepare is not None:
        prepare(name, module, batches, watch.seen)
    for target in targets:
        yield target, watch.seen.pop(target.name, None)


def _recorded(model: nn.Module, names: list[str], batches: Sequence[Any]) -> list[dict[str, Call]]:
    """For each batch the call of each block, in order; [] unless every batch calls the same blocks, each once."""
    records: list[list[tuple[str, Call]]] = []
    memory = _Memory()

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            records[-1].append((name, Call(*tree_map(memory.kept, (args, kwargs)))))

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        memory.put_out(tree_leaves(output))

    hooks = []
    for name in names:
        block = model.get_submodule(name)
        hooks += [block.register_forward_pre_hook(before(name), with_kwargs=True), block.register_forward_hook(after)]
    try:
        for batch in batches:
            records.append([])
            memory = _Memory()
            run_fresh(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    orders = {tuple(name for name, _ in record) for record in records}
    alike = len(orders) == 1 and len(order := next(iter(orders))) == len(set(order))
    return [dict(record) for record in records] if alike else []


class _Memory:
    """What the blocks of one run were given. A tensor counts as the same as long as nobody has written into it."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.output: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def put_out(self, leaves: list[Any]) -> None:
        tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.output = {(id(leaf), leaf._version): (leaf, at) for at, leaf in tensors}

    def kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        key = (id(leaf), leaf._version)
        if key in self.output:
            return Previous(self.output[key][1])
        if key not in self.copies:
            self.copies[key] = (leaf, leaf.clone())
        return self.copies[key][1]


def _filled(call: Call, outputs: list[Any]) -> Call:
    def put(leaf: Any) -> Any:
        return outputs[leaf.at] if isinstance(leaf, Previous) else leaf

    return Call(*tree_map(put, tuple(call)))


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """A cache of keys and values that grows with every run of a block would be wrong the second time."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if config is None or before is None:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before
