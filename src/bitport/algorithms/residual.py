"""The residual stream of a model, and its rotation.

Whatever writes to it (embeddings, the last layers of attention and MLP) must write x Q, and whatever reads from it must
undo Q. Between them are norms, which commute with a rotation once their weights are folded into the layers that they
feed. Readers are the weights that a norm feeds, as found by ``find_pairs``; writers are all others with as many outputs
as the stream has channels. Comparing the model's output shows whether the two are complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from bitport.algorithms.pair import Pair
from bitport.algorithms.pairs import biases_of, find_pairs
from bitport.algorithms.rotation_core import Rotation
from bitport.algorithms.trial import Trial
from bitport.calibrate.blocks import blocks_of
from bitport.nn.targets import find_targets
from bitport.schemes import Target


@dataclasses.dataclass(frozen=True)
class ResidualStream:
    """``norms``: (block, pair) of the norms to fold. ``readers``, ``writers``: by name, the axis of a weight that the
    stream's channels lie along."""

    size: int
    norms: tuple[tuple[str, Pair], ...]
    readers: dict[str, int]
    writers: dict[str, int]

    def rotate_(self, whole: Trial, rotation: Rotation) -> str | None:
        """Return None if the model's output is preserved; otherwise undo the rotation and return why."""
        model = whole.block
        with whole.undone([name for name, _ in model.named_parameters()]) as keep:
            for block, pair in self.norms:
                part = pair.producer[0]
                module = model.get_submodule(block)
                weight = part.of(module) + part.offset
                if not bool((weight != 0).all()):
                    named = f"{block}.{pair.label}".lstrip(".")
                    return f"{named} holds zeros and cannot be folded into what it feeds"
                pair.scale_(module, weight)
            for name, axis in (*self.readers.items(), *self.writers.items()):
                param = model.get_parameter(name)
                param.data.copy_(rotation.apply(param.data, axis))
            for name, axis in self.writers.items():
                for bias in biases_of(model, name, axis):
                    param = model.get_parameter(bias)
                    param.data.copy_(rotation.apply(param.data))
            if not whole.keeps_output(whole.run()):
                mean = any(isinstance(module, nn.LayerNorm) for module in model.modules())
                return (
                    "a LayerNorm subtracts the mean, which no rotation preserves" if mean else "the output would change"
                )
            keep()
        return None


def find_stream(whole: Trial, pairs: Sequence[tuple[str, Pair]]) -> ResidualStream | str:
    """Return the stream, or why there is none. ``pairs``: (block, pair)."""
    targets = find_targets(whole.block)
    tables: list[Target] = []
    for target in targets:
        if target.kind == "embedding" and target.storage not in {table.storage for table in tables}:
            tables.append(target)  # tied tables once, under the first name
    if not tables:
        return "no embedding begins it"
    if any(target.kind != "embedding" and target.storage == table.storage for table in tables for target in targets):
        return "the output head is the embedding, and the last norm cannot be folded into both: untie them"
    size = tables[0].shape[-1]
    inner = {
        f"{block}.{name}"
        for block in blocks_of(whole.block)
        for name, _ in whole.block.get_submodule(block).named_parameters()
    }
    last, _ = find_pairs(whole, fixed=inner)
    norms = [(block, pair) for block, pair in (*pairs, *(("", pair) for pair in last)) if pair.producer[0].axis is None]
    fed = {f"{block}.{each.name}".lstrip("."): each.axis for block, pair in norms for each in pair.consumers}
    readers = {name: axis for name, axis in fed.items() if whole.columns(name) == size}
    writers = {table.name: -1 for table in tables if table.shape[-1] == size}
    for name, weight in whole.weights.items():
        out = -1 if name in whole.flipped else -2
        if name not in fed and weight.shape[out] == size:
            writers[name] = out
    folded = tuple((block, pair) for block, pair in norms if pair.count == size)
    return ResidualStream(size, folded, readers, writers) if folded else "no norm was found that feeds only weights"
