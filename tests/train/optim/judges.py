"""Reference implementations of the optimizers: plain steps in float64 for a single tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitport.train.optim import SGD, Adam, AdamW, Lion, LowBitOptimizer

State = dict[str, Tensor]


def adam(p: Tensor, g: Tensor, state: State, t: int, decoupled: bool, **o: Any) -> Tensor:
    (beta1, beta2), lr, decay = o.get("betas", (0.9, 0.999)), o["lr"], o.get("weight_decay", 0.0)
    p, g = (p * (1 - lr * decay), g) if decoupled else (p, g + decay * p)
    state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(p)) + (1 - beta1) * g
    state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(p)) + (1 - beta2) * g**2
    mean, square = state["exp_avg"] / (1 - beta1**t), state["exp_avg_sq"] / (1 - beta2**t)
    return p - lr * mean / (square.sqrt() + o.get("eps", 1e-8))


def lion(p: Tensor, g: Tensor, state: State, t: int, **o: Any) -> Tensor:
    (beta1, beta2), lr = o.get("betas", (0.9, 0.99)), o["lr"]
    before = state.get("exp_avg", torch.zeros_like(p))
    state["exp_avg"] = beta2 * before + (1 - beta2) * g
    return p * (1 - lr * o.get("weight_decay", 0.0)) - lr * torch.sign(beta1 * before + (1 - beta1) * g)


def sgd(p: Tensor, g: Tensor, state: State, t: int, **o: Any) -> Tensor:
    momentum = o.get("momentum", 0.0)
    g = g + o.get("weight_decay", 0.0) * p
    if not momentum:
        return p - o["lr"] * g
    damped = g if t == 1 else (1 - o.get("dampening", 0.0)) * g
    state["momentum_buffer"] = momentum * state.get("momentum_buffer", torch.zeros_like(p)) + damped
    return p - o["lr"] * (g + momentum * state["momentum_buffer"] if o.get("nesterov") else state["momentum_buffer"])


def judged(cls: type[LowBitOptimizer], p: Tensor, g: Tensor, state: State, t: int, **o: Any) -> Tensor:
    """Return the parameter after step ``t`` in float64, updating ``state``."""
    g = -g if o.get("maximize") else g
    if cls in (Adam, AdamW):
        return adam(p, g, state, t, cls is AdamW, **o)
    return (lion if cls is Lion else sgd)(p, g, state, t, **o)


OPTIONS: dict[str, tuple[type[LowBitOptimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-maximize": (AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.0, "maximize": True}),
    "adam": (Adam, {"lr": 1e-2}),
    "adam-l2": (Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "lion": (Lion, {"lr": 1e-3, "weight_decay": 0.5}),
    "lion-maximize": (Lion, {"lr": 1e-3, "betas": (0.7, 0.8), "maximize": True}),
    "sgd": (SGD, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd-momentum": (SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "sgd-nesterov": (SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
"""Each rule, with each of its options used once."""
