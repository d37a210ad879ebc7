"""Find parameters that can absorb a per-channel scale from the input of weights, without changing the model's output.

Nothing is assumed about model architectures; pairs are found by experiment on a float32 copy of a block (a Trial). The
channels of a producer, which is the weight and bias of a norm or rows of a matrix, are multiplied by random powers of
two. Every product whose input is then the old one times these factors is a consumer: its columns are divided by them,
and the block runs again, until no more are found. If the block's output is then unchanged, the pair is proven: powers
of two are exact, the factors differ from each other, and a norm that feeds anything else, a GELU between two layers or
rows that are multiplied with each other would show. If not, the producer takes no scale.

A norm may compute with 1 + w, so both forms are tried. A matrix may hold several layers (queries, keys and values; gate
and up), so plausible slices are tried. A value head may serve several query heads, so channels may repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from bitport.algorithms.pair import ChannelSlice, Consumer, Pair
from bitport.algorithms.trial import Trial, TrialRun, same

LARGEST = 6
"""Factors are 2^-6 to 2^6 and never 1: large enough to reach any limit (clamp) within the block and reveal it."""


def find_pairs(trial: Trial, fixed: Collection[str] = (), seed: int = 0) -> tuple[list[Pair], dict[str, str]]:
    """Return the pairs of a block, with each consumer in at most one, and the reasons for consumers that are ambiguous.
    ``fixed``: parameters that are also used outside the block."""
    generator, fixed, unseen = torch.Generator().manual_seed(seed), set(fixed), trial.unseen()
    pairs: list[Pair] = []
    doubts: dict[str, str] = {}
    taken = set(fixed)
    probes: list[Probe] = []
    for producer, count, matrices in _producers(trial, fixed, unseen):
        exponents = torch.randint(1, LARGEST + 1, (*matrices, count), generator=generator, device="cpu").float()
        signs = torch.randint(0, 2, exponents.shape, generator=generator, device="cpu") * 2 - 1
        factors = torch.exp2(exponents * signs).to(next(trial.block.parameters()).device)
        probes.append(Probe(producer, factors))
    for group in _apart(trial, probes):
        _prove(trial, group)
    for probe in probes:
        matrices, count = tuple(probe.factors.shape[:-1]), probe.factors.shape[-1]
        pair = Pair(probe.producer, tuple(probe.consumers.values()), count, matrices)
        names = set(probe.consumers)
        widths = {consumer.inputs for consumer in pair.consumers}
        if fitting := [name for name in unseen if trial.columns(name) in widths]:
            doubt = f"{pair.label} may feed {', '.join(fitting)} too, which calibration never reached"
            doubts |= dict.fromkeys(names, doubt)
        elif names and names.isdisjoint(taken):
            pairs.append(pair)
            taken |= names
    return pairs, doubts


@dataclasses.dataclass(eq=False)
class Probe:
    """A producer and ``factors`` for its channels. ``reached``: the weights whose inputs it contributes to;
    ``consumers``: those of them that are proven, by name."""

    producer: tuple[ChannelSlice, ...]
    factors: Tensor
    reached: set[str] = dataclasses.field(default_factory=set)
    consumers: dict[str, Consumer] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {part.name for part in self.producer}


def _apart(trial: Trial, probes: Sequence[Probe]) -> list[list[Probe]]:
    """Group probes that can be tried at once, such as those of different experts: no two of a group reach the same
    weight. Probes that reach no weight are left out."""
    reached = trial.reached(set[str]().union(*(probe.names for probe in probes)))
    groups: list[tuple[set[str], list[Probe]]] = []
    for probe in probes:
        probe.reached = set[str]().union(*(reached[name] for name in probe.names))
        free = (each for each in groups if not each[0] & probe.reached)
        if probe.reached:
            taken, group = next(free, (set[str](), []))
            if not group:
                groups.append((taken, group))
            taken |= probe.reached
            group.append(probe)
    return [group for _, group in groups]


def _prove(trial: Trial, probes: list[Probe]) -> None:
    """Set the consumers of each probe for which multiplying its channels and dividing those of its consumers preserves
    the output."""
    found: dict[Probe, dict[str, Consumer]] = {probe: {} for probe in probes}
    with contextlib.ExitStack() as held:
        for probe in probes:
            held.enter_context(trial.undone(probe.names))
            for part in probe.producer:
                part.multiply_(trial.block, probe.factors)
        while True:
            run = trial.run()
            new = [
                (probe, consumer)
                for probe in probes
                for name in trial.weights
                if name in probe.reached and name not in found[probe]
                if (consumer := _fed(trial, name, run, probe.factors)) is not None
            ]
            for probe, consumer in new:
                held.enter_context(trial.undone([consumer.name]))
                consumer.multiply_(trial.block, 1 / probe.factors)
                found[probe][consumer.name] = consumer
            fed = [probe for probe in probes if found[probe]]
            if not new or fed != probes:
                break
    if fed == probes and trial.keeps_output(run):
        for probe in probes:
            probe.consumers = found[probe]
    elif fed == probes and len(probes) > 1:
        half = len(probes) // 2
        _prove(trial, probes[:half])
        _prove(trial, probes[half:])
    elif fed and fed != probes:  # retry without the others: a probe that feeds nothing changes the output
        _prove(trial, fed)


def _fed(trial: Trial, name: str, run: TrialRun, factors: Tensor) -> Consumer | None:
    """Return the weight as a consumer if all its inputs are the original ones times the factors."""
    inputs, count = trial.columns(name), factors.shape[-1]
    if inputs % count or factors.shape[:-1] not in ((), trial.weights[name].shape[:-2]):
        return None
    compared = list(trial.compared(name, run))
    if not compared or any(now is None for _, _, now in compared) or not trial.changed(name, run):
        return None
    for width in (each for each in range(count, 0, -1) if count % each == 0):
        consumer = Consumer(name, trial.axis(name), inputs, width)
        own = factors[..., consumer.channels(count).to(factors.device)].expand(*trial.weights[name].shape[:-2], -1)
        if all(now is not None and same(now, was * own[index]) for index, was, now in compared):
            return consumer
        if inputs == count:
            return None
    return None


def _producers(
    trial: Trial, fixed: set[str], unseen: Collection[str]
) -> Iterator[tuple[tuple[ChannelSlice, ...], int, tuple[int, ...]]]:
    """Yield (parts that take one scale, number of channels, shape of the matrices): norms first, then rows of matrices.
    Tied parameters appear once, since pairs and weights use the first name."""
    first = dict(trial.block.named_parameters())
    inputs = {trial.columns(name) for name in trial.weights if name not in unseen}
    for prefix, module in trial.block.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        if not own.keys() <= first.keys():
            continue
        sizes = {param.shape for param in own.values()}
        if len(sizes) == 1 and len(size := next(iter(sizes))) == 1 and size[0] in inputs and fixed.isdisjoint(own):
            for offset in (0.0, 1.0):
                parts = [ChannelSlice(name, None, slice(None), 0.0 if at else offset) for at, name in enumerate(own)]
                yield tuple(parts), size[0], ()
    for name, weight in trial.weights.items():
        axis = -1 if name in trial.flipped else -2
        rows, matrices = weight.shape[axis], tuple(weight.shape[:-2])
        names = [name, *biases_of(trial.block, name, axis)]
        if not fixed.isdisjoint(names):
            continue
        for part in _slices(rows, inputs):
            parts = [ChannelSlice(each, None if at else axis, part) for at, each in enumerate(names)]
            yield tuple(parts), len(range(rows)[part]), matrices


def _slices(rows: int, inputs: set[int]) -> Iterator[slice]:
    """The whole matrix, half of it in either order, or the last part after queries and keys."""
    found = [slice(None)] if any(size % rows == 0 for size in inputs) else []
    for size in sorted(inputs):
        if rows == 2 * size:
            found += [slice(size, rows), slice(0, size), slice(1, rows, 2), slice(0, rows, 2)]
        last = (rows - size) // 2
        if last > 0 and rows == size + 2 * last and size % last == 0:
            found.append(slice(rows - last, rows))
    yield from {(each.start, each.stop, each.step): each for each in found}.values()


def biases_of(block: nn.Module, name: str, axis: int) -> list[str]:
    """Names of biases that are added to the outputs of a weight, which lie along its ``axis``."""
    params = dict(block.named_parameters())
    weight = params[name]
    shape = (*weight.shape[:-2], weight.shape[axis])
    prefix, dot, last = name.rpartition(".")
    labels = {f"{prefix}{dot}{last.replace('weight', 'bias')}", f"{name}_bias"} - {name}
    return [label for label in sorted(labels) if label in params and tuple(params[label].shape) == shape]


def shared_parameters(model: nn.Module, block: str) -> set[str]:
    """Names, relative to the block, of parameters that modules outside it hold too. Another name of the block itself is
    not outside."""
    own = model.get_submodule(block)
    others = model.named_modules(memo={own})  # all that is reached without passing through the block
    outside = {id(param) for _, module in others for param in module.parameters(recurse=False)}
    return {name for name, param in own.named_parameters(remove_duplicate=False) if id(param) in outside}
