"""Adam and AdamW: two moments, of the gradient and of its square.

AdamW multiplies parameters by 1 - lr * weight_decay before the step; Adam adds weight_decay * p to the gradient.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from bitport.errors import ArgumentError
from bitport.ops.optimizer_step import Numbers
from bitport.train.optim.base import Group, LowBitOptimizer


class _Adam(LowBitOptimizer):
    rule = "adam"
    decoupled: ClassVar[bool]

    def moments(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": False, "exp_avg_sq": True}

    def check(self, group: Group) -> None:
        """torch.optim.Adam records in its groups which of the two it is."""
        super().check(group)
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        if decoupled != self.decoupled:
            raise ArgumentError(
                f"decoupled_weight_decay={decoupled}: that is {'AdamW' if decoupled else 'Adam'}, and this is "
                f"{type(self).__name__}; take the other class"
            )

    def numbers(self, group: Group, step: int, begins: bool) -> Numbers:
        lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
        return Numbers(
            sign=-1.0 if group["maximize"] else 1.0,
            l2=0.0 if self.decoupled else decay,
            decay=1 - lr * decay if self.decoupled else 1.0,
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            rate=lr / (1 - beta1**step),
            correction=(1 - beta2**step) ** -0.5,
            eps=float(group["eps"]),
        )


class AdamW(_Adam):
    """torch.optim.AdamW with ``states``; see :class:`LowBitOptimizer` for the additional options."""

    decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        states: str = "8bit",
        min_elements: int = 4096,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, states, min_elements, stochastic_rounding, seed)


class Adam(_Adam):
    """torch.optim.Adam with ``states``; see :class:`LowBitOptimizer` for the additional options."""

    decoupled = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: str = "8bit",
        min_elements: int = 4096,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, states, min_elements, stochastic_rounding, seed)
