"""How the experts of a model, and the routers that choose among them, are told by their names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

EXPERT_NAMES = ("expert", "moe")
"""Words in the names of experts, or of a block that has some."""
ROUTER = re.compile(r"(.*\.)?(router(\.\w+)?|gate\.wg)")
GATE = re.compile(r"(?:(.*)\.)?gate")


def is_router(module: str, shape: Sequence[int], blocks: Collection[str] | None = None) -> bool:
    """Whether a matrix [N, K] of ``module`` is a MoE router: its name says so, and it has fewer experts N than channels
    K. A router is small and sensitive, so its kind is "other", even if it is an nn.Linear, as in few models.

    ``blocks``: the modules with experts (:func:`expert_blocks`); elsewhere, as in a gated MLP, a gate is no router.
    None: not known, so that it is taken for one."""
    if shape[0] >= shape[1]:
        return False
    gate = GATE.fullmatch(module)
    return ROUTER.fullmatch(module) is not None or (gate is not None and (blocks is None or (gate[1] or "") in blocks))


def expert_blocks(names: Iterable[str]) -> set[str]:
    """The modules that have experts among their children, or are called a "moe", judging by the ``names`` of all
    modules or tensors of a model."""
    found = set()
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if any(word in part.lower() for word in EXPERT_NAMES):
                found.add(".".join(parts[:at]))
            if "moe" in part.lower():
                found.add(".".join(parts[: at + 1]))
    return found
