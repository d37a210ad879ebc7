"""Rotation of a model by changing its weights only: of the values of each head (R2) and of the residual stream (R1).

The values layer and the output projection of the attention can be rotated together, with the same rotation for every
head. All changes are made on a float32 copy and verified there: unless the outputs are preserved, the model is left as
it is.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn

from bitport.algorithms.block import Block
from bitport.algorithms.pair import Pair
from bitport.algorithms.pairs import find_pairs, shared_parameters
from bitport.algorithms.residual import find_stream
from bitport.algorithms.rotation_core import Rotation
from bitport.algorithms.trial import Trial
from bitport.calibrate.batches import Call, each_once, run_fresh
from bitport.calibrate.blocks import blocks_of
from bitport.calibrate.contexts import in_use, writable
from bitport.nn.targets import find_targets
from bitport.tensor import QTensor


@dataclasses.dataclass(frozen=True)
class Rotate:
    """Rotates the residual stream by a random Hadamard matrix, which spreads outliers over all channels. It is
    folded into the weights, so that nothing is computed at run time.

    ``seed``: of the signs. ``stream``: rotate the residual stream. ``heads``: rotate the values of attention too, for
    schemes that round the input of the layer after the attention and models in which a few channels of that are large;
    elsewhere it may do harm. ``untie``: a head that is tied to the embedding gets weights of its own, since the last
    norm's weight is folded into it, and the model grows by that much. Without it the stream of such a model is not
    rotated.
    """

    seed: int = 0
    heads: bool = False
    stream: bool = True
    untie: bool = False
    name: ClassVar[str] = "rotate"
    needs_model: ClassVar[bool] = True

    def block_(self, block: Block) -> None:
        """No-op: model_() has rotated all blocks already, by one rotation."""

    def model_(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, str]:
        if any(isinstance(param, QTensor) for param in model.parameters()):
            return {target.name: "parts of the model are quantized already" for target in find_targets(model)}
        if self.untie:
            _untie(model)
        told: dict[str, list[str]] = {target.name: [] for target in find_targets(model)}
        pairs: list[tuple[str, Pair]] = []
        with in_use(model):
            whole = Trial(model, list(itertools.islice(batches, 1)))
            for name, trial in _trials(whole):
                found, _ = find_pairs(trial, shared_parameters(model, name))
                pairs += [(name, pair) for pair in found]
                for pair in found if self.heads else ():
                    self._rotate_heads(whole, name, trial, pair, told)
            if self.stream:
                self._rotate_stream(whole, pairs, told)
        with writable(model):
            for name, param in model.named_parameters():
                param.copy_(whole.block.get_parameter(name))
        return {name: ", ".join(notes) or "takes part in none" for name, notes in told.items()}

    def _rotate_stream(self, whole: Trial, pairs: list[tuple[str, Pair]], told: dict[str, list[str]]) -> None:
        found = find_stream(whole, pairs)
        why_not = found if isinstance(found, str) else found.rotate_(whole, Rotation.random(found.size, self.seed))
        for name, notes in told.items():
            if why_not or isinstance(found, str):
                notes.append(f"residual stream left: {why_not}")
            elif name in found.readers or name in found.writers:
                notes.append("residual stream")

    def _rotate_heads(self, whole: Trial, prefix: str, trial: Trial, pair: Pair, told: dict[str, list[str]]) -> None:
        """Apply the widest rotation of runs of channels that preserves the block's output."""
        width = min(consumer.width for consumer in pair.consumers)
        if pair.producer[0].axis is None or pair.matrices or width % 2:
            return
        if not _stays(trial, pair, Rotation.random(2, self.seed)):
            return  # channels that interact elementwise, as in a gate
        for size in (each for each in range(width, 1, -1) if width % each == 0 and each % 2 == 0):
            rotation = Rotation.random(size, self.seed + 1)
            if _stays(trial, pair, rotation):
                pair.rotate_(whole.block.get_submodule(prefix), rotation.apply)
                for each in pair.names:
                    told.get(f"{prefix}.{each}", []).append(f"heads of {size}")
                return


def _stays(trial: Trial, pair: Pair, rotation: Rotation) -> bool:
    with trial.undone(pair.names):
        pair.rotate_(trial.block, rotation.apply)
        return trial.keeps_output(trial.run())


def _trials(whole: Trial) -> Iterator[tuple[str, Trial]]:
    """Yield a trial for each block that one run of the model calls exactly once."""
    calls: dict[str, list[Call]] = {name: [] for name in blocks_of(whole.block)}

    def note(name: str) -> Any:
        return lambda module, *given: calls[name].append(each_once(_as_it_is, Call(*given)))

    hooks = [whole.block.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True) for name in calls]
    for batch in whole.batches:
        run_fresh(whole.block, batch)
    for hook in hooks:
        hook.remove()
    for name, given in calls.items():
        if len(given) == len(whole.batches):
            yield name, Trial(whole.block.get_submodule(name), given)


def _as_it_is(leaf: Any) -> Any:
    """Copy non-tensors: a cache that the model uses regardless of its config grows while the block runs."""
    return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)


def _untie(model: nn.Module) -> None:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in tables:
            module.weight = nn.Parameter(module.weight.detach().clone(), module.weight.requires_grad)
            config: Any = getattr(model, "config", None)
            if config is not None:
                config.tie_word_embeddings = False
