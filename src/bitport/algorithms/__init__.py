"""Algorithms that choose the codes and scales of quantized weights: NAME_core.py holds the maths on tensors, NAME.py
applies it to a weight, and ``apply`` runs it on a weight of a model and measures the result."""

from __future__ import annotations

from collections.abc import Sequence

from bitport.algorithms.algorithm import RTN, Algorithm
from bitport.algorithms.awq import AWQ
from bitport.algorithms.block import Transform
from bitport.algorithms.chain import Chain
from bitport.algorithms.clip import Clip
from bitport.algorithms.gptq import GPTQ
from bitport.algorithms.hqq import HQQ
from bitport.algorithms.rotate import Rotate
from bitport.algorithms.signround import SignRound
from bitport.algorithms.smooth import Smooth
from bitport.errors import ArgumentError

ALGORITHMS: dict[str, Algorithm] = {each.name: each for each in (RTN(), Clip(), HQQ(), GPTQ(), SignRound())}
"""How weights can be rounded, by name, with the usual settings."""

TRANSFORMS: dict[str, tuple[Transform, Algorithm]] = {
    "awq": (AWQ(), Clip()),
    "smooth": (Smooth(), RTN()),
    "rotate": (Rotate(), RTN()),
}
"""What changes a model before its weights are rounded, by name, and the algorithm that follows if none is given."""

AlgorithmLike = str | Algorithm | Transform | Sequence[str | Algorithm | Transform]
"""What :func:`algorithm` accepts."""

__all__ = [
    "ALGORITHMS",
    "AWQ",
    "GPTQ",
    "HQQ",
    "RTN",
    "TRANSFORMS",
    "Algorithm",
    "AlgorithmLike",
    "Chain",
    "Clip",
    "Rotate",
    "SignRound",
    "Smooth",
    "Transform",
    "algorithm",
]


def algorithm(given: AlgorithmLike) -> Algorithm:
    """Return the algorithm for a name, an instance, or several steps such as ``"awq+gptq"`` or ``("awq", GPTQ())``:
    transforms, followed by at most one algorithm. A single transform is also accepted."""
    if isinstance(given, Sequence):
        steps = given.split("+") if isinstance(given, str) else given
        return _chain([_step(step) for step in steps])
    step = _step(given)
    return step if isinstance(step, Algorithm) else _chain([step])


def _step(name: str | Algorithm | Transform) -> Algorithm | Transform:
    if not isinstance(name, str):
        if isinstance(name, type) or not isinstance(name, (Algorithm, Transform)):
            lacking = [member for member in ("name", "needs_inputs", "refuses", "solve") if not hasattr(name, member)]
            raise ArgumentError(
                f"an algorithm is a name, such as 'gptq', or one of bitport.algorithms, such as GPTQ(), not {name!r}"
                + (f", which lacks {', '.join(lacking)}" if lacking and "solve" not in lacking else "")
            )
        return name
    if name in TRANSFORMS:
        return TRANSFORMS[name][0]
    if name not in ALGORITHMS:
        raise ArgumentError(
            f"unknown algorithm {name!r}; known: {', '.join((*ALGORITHMS, *TRANSFORMS))}; several are joined "
            "by +, as in awq+gptq"
        )
    return ALGORITHMS[name]


def _chain(steps: Sequence[Algorithm | Transform]) -> Algorithm:
    transforms = [step for step in steps if not isinstance(step, Algorithm)]
    solvers = [step for step in steps if isinstance(step, Algorithm)]
    if not steps or len(solvers) > 1 or (solvers and steps[-1] is not solvers[0]):
        raise ArgumentError(
            f"{'+'.join(step.name for step in steps)!r} is no algorithm: give transforms "
            f"({', '.join(TRANSFORMS)}) first, then at most one of {', '.join(ALGORITHMS)}"
        )
    if not transforms:
        return solvers[0]
    last = transforms[-1].name
    solver = solvers[0] if solvers else TRANSFORMS[last][1] if last in TRANSFORMS else RTN()
    return Chain(tuple(transforms), solver, "+".join(step.name for step in steps))


def expression(by: Algorithm) -> str:
    """Return the expression that recreates an algorithm: its name, or its repr if its settings are not the defaults."""
    known = all(step in ALGORITHMS or step in TRANSFORMS for step in by.name.split("+"))
    return by.name if known and algorithm(by.name) == by else repr(by)
