"""Lion: updates by the sign of a mean of gradient and moment, so that every element moves by lr."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitport.ops.optimizer_step import Numbers
from bitport.train.optim.base import Group, LowBitOptimizer


class Lion(LowBitOptimizer):
    """``lr`` is usually a third to a tenth of AdamW's, and ``weight_decay`` (decoupled) larger by the same factor. See
    :class:`LowBitOptimizer` for the options after it."""

    rule = "lion"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: str = "8bit",
        min_elements: int = 4096,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, states, min_elements, stochastic_rounding, seed)

    def moments(self, group: Group) -> dict[str, bool]:
        return {"exp_avg": False}

    def numbers(self, group: Group, step: int, begins: bool) -> Numbers:
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return Numbers(
            sign=-1.0 if group["maximize"] else 1.0,
            decay=1 - lr * float(group["weight_decay"]),
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            rate=lr,
        )
