"""Mixed precision: measure the cost of each weight in each scheme, and find the best recipe within a size.

The cost of a weight in a scheme is measured with all other weights unchanged, and costs are added up:

    "fisher"    KL(p || q) of the model's predictions in nats per token; for a model without logits, the squared error
                of its outputs relative to their squared norm. Estimated over all batches from gradients
                (:mod:`bitport.algorithms.curvature`), by as many runs for any number of weights and schemes
    "kl"        the same over ``sample`` batches, by one run of the model per weight and scheme: exact, expensive
    "output"    the squared error of the weight's own output relative to its squared norm: one run of the model in all
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from bitport.algorithms import Algorithm
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import apply, output_squares
from bitport.algorithms.curvature import Candidates, check_gradients, estimated
from bitport.algorithms.distance import Distance
from bitport.algorithms.mixed_core import Option, check_least, choose
from bitport.arguments import bytes_of
from bitport.calibrate.batches import batches_of
from bitport.calibrate.blocks import measured
from bitport.calibrate.contexts import no_autocast
from bitport.calibrate.inputs import Inputs
from bitport.errors import ArgumentError
from bitport.nn.quantize import quantize_target
from bitport.nn.targets import find_targets, uncompiled
from bitport.report.progress import progress as with_progress
from bitport.schemes import Recipe, Rule, Scheme, Target
from bitport.schemes.presets import scheme_of
from bitport.schemes.recipe import DEFAULT_KINDS
from bitport.schemes.target import by_storage
from bitport.tensor import QTensor

CANDIDATES = ("int2", "int3", "int4", "int8")
COSTS = ("fisher", "kl", "output")
"""The first is the default."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """``options[g][c]``: size and cost of the weights ``groups[g]``, which share a scheme, in ``candidates[c]``."""

    groups: tuple[tuple[Target, ...], ...]
    candidates: tuple[Scheme, ...]
    options: tuple[tuple[Option, ...], ...]
    rules: tuple[Rule, ...] = ()

    @property
    def weights(self) -> int:
        """The number of elements in all weights, tied ones counted once."""
        unique = {target.storage: target for group in self.groups for target in group}
        return sum(torch.Size(target.shape).numel() for target in unique.values())

    def recipe(self, *, bits: float | None = None, nbytes: int | str | None = None) -> Recipe:
        """Return the recipe of least cost within ``nbytes``, or ``bits`` per weight including scales and zero
        points."""
        chosen = choose(self.options, _budget(self.weights, bits, nbytes))
        rules = [
            Rule(glob.escape(target.name), self.candidates[at], (target.kind,))
            for group, at in zip(self.groups, chosen, strict=True)
            for target in group
        ]
        return Recipe((*self.rules, *rules))


def mixed(
    model: nn.Module,
    candidates: Sequence[str | Scheme] = CANDIDATES,
    *,
    calibrate: Iterable[Any] | Callable[[nn.Module], Any],
    bits: float | None = None,
    nbytes: int | str | None = None,
    algorithm: str | Algorithm = "rtn",
    cost: str = COSTS[0],
    sample: int = 2,
    rules: Sequence[Rule] = (),
    together: Sequence[Sequence[str]] = (),
    progress: bool | None = None,
) -> Recipe:
    """The recipe that keeps the model closest to what it is, within ``bits`` for each weight, scales and zero points
    included, or ``nbytes`` for all, a number or a text such as "4GB". Nothing is quantized yet:

        recipe = mixed(model, bits=3.5, calibrate=batches, algorithm="gptq")
        quantize_(model, recipe, calibrate=batches, algorithm="gptq")

    ``candidates``: each linear layer, attention projection and expert gets one of these schemes, unless one of
    ``rules`` fits it.
    ``calibrate``: as for :func:`quantize_`.
    ``algorithm``: the one by which the model will be quantized. Of several, such as ``"awq+gptq"``, only the last is
    used to measure: the costs leave out what the others change in the model.
    ``cost``: how the cost of a candidate for a weight is measured, all other weights being float: "fisher", by how far
    the model's predictions move, estimated from gradients, which takes 64 runs with gradients, or one for each batch if
    there are more, and memory for all candidates of all weights; "kl", by how far they really move on the first
    ``sample`` batches, which takes one run for each weight and candidate; or "output", by how far the weight's own
    output moves, which takes one run in all.
    ``together``: lists of globs; children of one module whose names fit globs of the same list share a scheme, as tied
    weights always do.
    """
    model = uncompiled(model)
    check_size(model, candidates, bits=bits, nbytes=nbytes, rules=rules)
    found = costs(
        model,
        candidates,
        calibrate=calibrate,
        algorithm=algorithm,
        cost=cost,
        sample=sample,
        rules=rules,
        together=together,
        progress=progress,
    )
    return found.recipe(bits=bits, nbytes=nbytes)


def check_size(
    model: nn.Module,
    candidates: Sequence[str | Scheme] = CANDIDATES,
    *,
    bits: float | None = None,
    nbytes: int | str | None = None,
    rules: Sequence[Rule] = (),
) -> None:
    """Raise ArgumentError if even the smallest candidate of every weight is too large, before anything is measured."""
    schemes = _schemes(candidates)
    targets = {target.storage: target for target in _chosen_for(model, schemes[0], rules)}.values()
    weights = sum(torch.Size(target.shape).numel() for target in targets)
    budget = _budget(weights, bits, nbytes)
    least = [min(_size(model, target, scheme) for scheme in schemes) for target in targets]
    if bits is not None and sum(least) > budget:
        raise ArgumentError(
            f"the smallest choice takes {8 * sum(least) / weights:.2f} bits a weight, more than the {bits} that are "
            f"allowed: allow more, or give smaller candidates"
        )
    check_least(least, budget)


def _size(model: nn.Module, target: Target, scheme: Scheme) -> int:
    return quantize_target(target.weight(model).to("meta"), target, scheme).nbytes


def _budget(weights: int, bits: float | None, nbytes: int | str | None) -> int:
    """The number of bytes for that many weights."""
    if (bits is None) == (nbytes is None):
        raise ArgumentError(f"give the size as either bits= or nbytes=, not bits={bits}, nbytes={nbytes}")
    if nbytes is not None:
        return bytes_of(nbytes, "nbytes")
    if not isinstance(bits, (int, float)) or not 0 < bits < math.inf:
        raise ArgumentError(f"bits= is how many bits a weight may take on average, a number above 0, not {bits!r}")
    return int(bits * weights / 8)


def costs(
    model: nn.Module,
    candidates: Sequence[str | Scheme] = CANDIDATES,
    *,
    calibrate: Iterable[Any] | Callable[[nn.Module], Any],
    algorithm: str | Algorithm = "rtn",
    cost: str = COSTS[0],
    sample: int = 2,
    rules: Sequence[Rule] = (),
    together: Sequence[Sequence[str]] = (),
    progress: bool | None = None,
) -> Costs:
    """Measure the cost of each weight in each candidate; arguments as for :func:`mixed`."""
    by, schemes = algorithm_of(algorithm), _schemes(candidates)
    _check_how(cost, sample, together)
    targets = _chosen_for(model, schemes[0], rules)
    if unread := [target.name for target in targets if target.weight(model).is_meta]:
        raise ArgumentError(f"{unread[0]} is on the meta device: what its bits cost is measured on its numbers")
    batches = batches_of(model, calibrate)
    if not batches:
        raise ArgumentError("the cost of bits is measured on data, but calibrate holds no batch")
    tied = by_storage(targets)
    every = [names[0] for names in tied.values()]
    distance = Distance(model, batches[:sample]) if cost == "kl" else None
    if cost == "fisher" and every:
        check_gradients(model, batches[0], list(tied.values()))
    seen = {target.name for target in every} if by.needs_inputs or cost == "output" else set()
    work: Iterable[tuple[Target, Inputs | None]] = ((target, None) for target in every)
    work = measured(model, every, seen, batches) if seen else work
    sizes: dict[str, list[int]] = {}
    lost: dict[str, list[float]] = {}
    held: dict[str, Candidates] = {}
    altered = set()
    for target, inputs in with_progress(work, len(every), "measuring", progress):
        value, key = target.weight(model), target.storage
        rounded = [apply(by, value, target, scheme, inputs, measure=False).as_parameter().q for scheme in schemes]
        sizes[key] = [q.nbytes for q in rounded]
        if any(_differs(q, value) for q in rounded):
            altered.add(key)
        if cost == "fisher":
            held[key] = Candidates(tied[key], rounded)
        elif distance is not None:
            lost[key] = [distance(tied[key], q) for q in rounded]
        else:
            assert inputs is not None
            lost[key] = of_outputs(value, rounded, target, inputs)
    if cost == "fisher":
        lost = dict(zip(held, estimated(model, batches, list(held.values()), progress), strict=True))
    found = {key: tuple(map(Option, sizes[key], lost[key])) for key in sizes}
    silent = {key for key in altered if not any(lost[key])}
    alike = _alike(every, tied, together)
    if unknown := [group[0].name for group in alike if silent.issuperset(each.storage for each in group)]:
        raise ArgumentError(
            f"the data say nothing about {', '.join(unknown)}: the outputs stay the same, whatever these are rounded "
            "to. Give batches that reach every weight, or rules for these"
        )
    groups = (tuple(itertools.chain(*(tied[target.storage] for target in group))) for group in alike)
    sums = (_summed([found[target.storage] for target in group]) for group in alike)
    return Costs(tuple(groups), tuple(schemes), tuple(sums), tuple(rules))


def _check_how(cost: str, sample: int, together: Sequence[Sequence[str]]) -> None:
    if cost not in COSTS:
        raise ArgumentError(f"unknown cost {cost!r}; known: {', '.join(COSTS)}")
    if type(sample) is not int or sample < 1:
        raise ArgumentError(f"sample={sample!r}: the predictions of at least one batch must be compared")
    if isinstance(together, str) or any(isinstance(globs, str) for globs in together):
        raise ArgumentError(f"together holds lists of globs, such as [['*.q_proj', '*.k_proj']], not {together!r}")


def _differs(q: QTensor, value: Tensor) -> bool:
    return not torch.equal(value, q.dequantize(value.dtype))


@no_autocast()
def of_outputs(value: Tensor, rounded: Sequence[QTensor], target: Target, inputs: Inputs) -> list[float]:
    signal, *noises = map(float, output_squares(value, target, inputs, *rounded))
    return [noise / signal if signal else 0.0 for noise in noises]


def _schemes(candidates: Sequence[str | Scheme]) -> list[Scheme]:
    if isinstance(candidates, str) or not isinstance(candidates, Collection):
        raise ArgumentError(f"candidates are several schemes, such as ('int4', 'int8'), not {candidates!r}")
    schemes = [scheme_of(each) for each in candidates]
    if not schemes:
        raise ArgumentError("there is no candidate: give at least one scheme")
    if static := [str(scheme) for scheme in schemes if scheme.static]:
        raise ArgumentError(f"{', '.join(static)}: a scheme with a static input scale cannot be a candidate")
    return schemes


def _chosen_for(model: nn.Module, scheme: Scheme, rules: Sequence[Rule]) -> list[Target]:
    """The targets that ``scheme`` for the whole model would quantize, except those that match one of ``rules``."""
    targets = find_targets(model)
    plan = Recipe((*rules, Rule("*", scheme, DEFAULT_KINDS))).resolve(targets)
    names = {choice.name for choice in plan.quantized}
    chosen = [each for each in targets if each.name in names and not any(rule.fits(each) for rule in rules)]
    if done := [each.name for each in chosen if isinstance(each.weight(model), QTensor)]:
        raise ArgumentError(f"{done[0]} is quantized already: choose bits for a model that is not")
    return chosen


def _alike(
    every: Sequence[Target], tied: Mapping[str, Sequence[Target]], together: Sequence[Sequence[str]]
) -> list[list[Target]]:
    """Group ``every`` weight with those that must get the same scheme. ``tied``: all names of each, by storage."""
    labelled: dict[str, list[Target]] = {}
    for target in every:
        labelled.setdefault(_label(tied[target.storage], together), []).append(target)
    return list(labelled.values())


def _label(tied: Sequence[Target], together: Sequence[Sequence[str]]) -> str:
    """A label that the weight named by ``tied`` shares with those that must get the same scheme."""
    for at, globs in enumerate(together):
        for target in tied:
            if any(fnmatchcase(name, each) for name in (target.module, target.name) for each in globs):
                return f"{at} {target.module.rpartition('.')[0]}"
    return tied[0].storage


def _summed(several: Sequence[tuple[Option, ...]]) -> tuple[Option, ...]:
    each = zip(*several, strict=True)
    return tuple(Option(sum(o.nbytes for o in options), sum(o.error for o in options)) for options in each)
