"""Stochastic gradient descent, optionally with (Nesterov) momentum; without it the step is the only state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops.optimizer_step import Numbers
from bitport.train.optim.base import Group, LowBitOptimizer


class SGD(LowBitOptimizer):
    """torch.optim.SGD with ``states``; see :class:`LowBitOptimizer` for the additional options."""

    rule = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        states: str = "8bit",
        min_elements: int = 4096,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        options |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, options, states, min_elements, stochastic_rounding, seed)

    def check(self, group: Group) -> None:
        super().check(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ArgumentError(
                f"nesterov=True with momentum={group['momentum']} and dampening={group['dampening']}: "
                f"it needs momentum above 0 and no dampening"
            )

    def moments(self, group: Group) -> dict[str, bool]:
        return {"momentum_buffer": False} if group["momentum"] else {}

    def numbers(self, group: Group, step: int, begins: bool) -> Numbers:
        """As in torch.optim, the first moment is the first gradient, undamped."""
        return Numbers(
            sign=-1.0 if group["maximize"] else 1.0,
            l2=float(group["weight_decay"]),
            beta1=float(group["momentum"]),
            rest1=1.0 if begins else 1 - float(group["dampening"]),
            rate=float(group["lr"]),
            nesterov=float(group["nesterov"]),
        )

    def _taken(self, group: Group, param: Tensor, state: Group, what: str) -> Group:
        """torch.optim.SGD does not count steps: having a state implies that there was one. A moment is kept even while
        a schedule has turned momentum off."""
        momentum = group["momentum"] or "momentum_buffer" in state
        return super()._taken({**group, "momentum": momentum}, param, {"step": 1, **state}, what)
