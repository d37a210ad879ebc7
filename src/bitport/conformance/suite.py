"""Run every op's samples on one device and compare with float64."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from bitport import layouts
from bitport.conformance.judge import RAISED, Outcome, answers_otherwise, judged, rows_differ, told
from bitport.errors import ArgumentError
from bitport.numerics import FLOATS
from bitport.ops import IMPLS, OPS, Op, Sample, Weight, call, decide
from bitport.ops.device import check_present
from bitport.ops.outside import OUTSIDE, Outside, outside
from bitport.ops.samples import VARIANTS, weights
from bitport.ops.select import forced, refusal
from bitport.schemes import PRESETS


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of the samples of one op, subject and dtype. The subject is a scheme where the op takes a quantized
    weight, else the variant of the op that the sample names."""

    op: str
    subject: str
    dtype: str
    samples: int
    failures: tuple[str, ...]
    """What went wrong, one line per failed sample."""
    sqnr: float
    """Least over the samples in dB; infinite if every result was exact."""
    margin: float
    """Least SQNR - budget in dB."""
    kernels: tuple[str, ...]
    refused: tuple[str, ...] = ()
    """Why the device refuses a sample, one line each; these are not counted in ``samples``."""
    forced: tuple[str, ...] = ()
    """Kernels that accept a sample but are not the one chosen for it, and were tried by name."""

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def run(
    device: torch.device | str | int, ops: Iterable[str] | None = None, dtypes: Iterable[torch.dtype] = FLOATS
) -> list[Row]:
    """Run the samples of ``ops`` (names; default: all) on ``device``, with kernels of bitport and of installed
    backends; ``dtypes``: the inputs', of float32, bfloat16 and float16. Each sample runs with the kernel that is chosen
    for it and then, as long as results are right, with every other one that accepts it. A device of another library
    gets samples made on the CPU and computes each in every way it has."""
    place = outside(device)
    device = torch.device(device)
    if place is None:
        check_present(device)
    names = list(OPS if ops is None else ops)
    if unknown := set(names) - set(OPS):
        raise ArgumentError(f"unknown ops {sorted(unknown)}; known: {', '.join(OPS)}")
    inputs = list(dtypes)
    if others := [dtype for dtype in inputs if dtype not in FLOATS]:
        raise ArgumentError(f"samples have inputs of {', '.join(map(str, FLOATS))}, not {', '.join(map(str, others))}")
    return [row for name in names for dtype in inputs for row in _rows(OPS[name], device, dtype, place)]


def never_chosen(device: torch.device | str | int, rows: list[Row]) -> list[str]:
    """Return one line per kernel registered for ``device`` that ran on no sample, or only by name, and one if there is
    none at all: a kernel may name another device by mistake. Not a failure."""
    lines = []
    for op in dict.fromkeys(row.op for row in rows if forced(row.op) is None):
        of_op = [row for row in rows if row.op == op]
        chosen, named = ({kernel for row in of_op for kernel in getattr(row, at)} for at in ("kernels", "forced"))
        for impl in IMPLS.get((op, torch.device(device).type), ()):
            if impl.name not in chosen:
                why = "another comes first wherever it could run" if impl.name in named else "it took no sample"
                lines.append(f"never chosen: {impl.name} of {op}: {why}")
    kinds = {kind for (_, kind), impls in IMPLS.items() if impls}
    if (kind := torch.device(device).type) not in kinds | set(OUTSIDE):
        lines.append(f"no kernel is registered for {kind}; there are kernels for {', '.join(sorted(kinds)) or 'none'}")
    return lines


def never_used(device: torch.device | str | int) -> list[str]:
    """Return one line per layout of ``device`` in which no weight of the samples arrives there; not a failure."""
    device = torch.device(device)
    own = [layout for layout in layouts.LAYOUTS.values() if device.type in layout.devices]
    if not own:
        return []
    made = [each.weight for large in (False, True) for each in weights(torch.device("cpu"), torch.float32, large=large)]
    every = [(weight.matrix, weight.parts) for weight in made]
    try:
        used = {layouts.preferred(device, *each, act) for each in every for act in ("", "int8")}
        refused = {layout.name for layout in own if all(layouts.base.refusal(layout, *each) for each in every)}
    except RAISED:  # which has failed samples
        return []
    return [
        f"never used: layout {layout.name}: "
        + ("it takes no sample" if layout.name in refused else "another comes first wherever it could be")
        for layout in own
        if layout.name not in used
    ]


def subject(name: str) -> str:
    """Return the scheme that a sample's name begins with; without one, the name less the suffix for its rows."""
    schemes = (scheme for scheme in (*PRESETS, *VARIANTS) if name == scheme or name.startswith(scheme + "-"))
    return max(schemes, key=len, default=re.sub("-(row|rows|empty|strided)$", "", name))


def _rows(op: Op, device: torch.device, dtype: torch.dtype, place: Outside | None) -> Iterator[Row]:
    groups: dict[str, list[Outcome]] = {}
    for name, outcomes in _tried(op, device, dtype, place):
        groups.setdefault(subject(name), []).extend(outcomes)
    for name, every in groups.items():
        outcomes = [outcome for outcome in every if not outcome.refused]
        yield Row(
            op.name,
            name,
            str(dtype).removeprefix("torch."),
            len(outcomes),
            tuple(outcome.failure for outcome in outcomes if outcome.failure),
            min((outcome.sqnr for outcome in outcomes), default=math.inf),
            min((outcome.margin for outcome in outcomes), default=math.inf),
            tuple(dict.fromkeys(outcome.kernel for outcome in outcomes if not outcome.forced)),
            tuple(outcome.refused for outcome in every if outcome.refused),
            tuple(dict.fromkeys(outcome.kernel for outcome in outcomes if outcome.forced)),
        )


def _tried(
    op: Op, device: torch.device, dtype: torch.dtype, place: Outside | None
) -> Iterator[tuple[str, list[Outcome]]]:
    """Yield the name of each sample and its outcomes."""
    made = op.samples(device if place is None else torch.device("cpu"), dtype)
    last = "the first sample"
    while True:
        try:
            sample = next(made, None)
        except RAISED as error:  # from a layout under development
            yield op.name, [Outcome("?", failure=f"{told(last, error)}; those behind it were not tried")]
            return
        if sample is None:
            return
        yield sample.name, [*_try(op, sample)] if place is None else _try_outside(op, sample, place)
        last = f"the sample behind {sample.name}"
        try:
            packed = _as_it_lies(op, sample, device)
        except RAISED as error:
            yield sample.name, [Outcome("?", failure=told(f"{sample.name}, packed for {device}", error))]
            continue
        if packed is not None:
            yield packed.name, [*_try(op, packed)] if place is None else _try_outside(op, packed, place)
            if op.name == "repack" and (wrong := rows_differ(Weight(*packed.args[:10]))):
                yield packed.name, [Outcome("?", failure=f"{packed.name}: {wrong}")]


def _as_it_lies(op: Op, sample: Sample, device: torch.device) -> Sample | None:
    """Return the sample with its weight in the layout that ``device`` prefers, the only one that many kernels take;
    None if that is plain."""
    arguments = list(op.arguments)
    if "layout" not in arguments:
        return None
    at = arguments.index("data")
    weight = Weight(*sample.args[at : at + 10])
    act = sample.args[arguments.index("act")] if "act" in arguments else ""
    layout = layouts.preferred(device, weight.matrix, weight.parts, act)
    if layout == "plain":
        return None
    args = (*sample.args[:at], *weight.to_layout(layout), *sample.args[at + 10 :])
    return dataclasses.replace(sample, name=f"{sample.name}-{layout}", args=args)


def _try(op: Op, sample: Sample) -> Iterator[Outcome]:
    """Run the sample with the kernel that is chosen, then with each other one that accepts the arguments. Stop at a
    failure: the kernel may have written into its arguments."""
    try:
        kernel = decide(op.name, *sample.args).kernel
    except RAISED as error:
        yield Outcome("?", failure=told(sample.name, error))
        return
    outcome = judged(op, _by(sample, kernel), kernel, op.overload)
    yield outcome
    others = () if forced(op.name) else IMPLS.get((op.name, sample.args[0].device.type), ())
    for impl in others:
        if outcome.failure:
            return
        try:
            refused = refusal(impl, *sample.args) is not None
            wrong = answers_otherwise(impl, refused, *sample.args)
        except RAISED as error:
            wrong = told("", error)
        named = _by(sample, impl.name if impl.name == kernel else f"forced {impl.name}")
        if wrong:
            outcome = Outcome(impl.name, failure=f"{named.name}: {wrong}")
        elif refused or impl.name == kernel:
            continue
        else:
            outcome = judged(op, named, impl.name, partial(call, op.name, kernel=impl.name))
        outcome = dataclasses.replace(outcome, forced=impl.name != kernel)
        yield outcome


def _by(sample: Sample, kernel: str) -> Sample:
    return dataclasses.replace(sample, name=f"{sample.name}, {kernel}")


def _try_outside(op: Op, sample: Sample, place: Outside) -> list[Outcome]:
    if reason := place.refuses(op.name, *sample.args):
        return [Outcome("?", refused=f"{sample.name}: {reason}")]
    return [judged(op, _by(sample, name), name, partial(run, op.name)) for name, run in place.kernels.items()]
