"""How far a model's outputs move when one of its weights is changed.

If the outputs have logits: KL(p || q) of the predictions, in nats per token; otherwise the squared error of the outputs
relative to their squared norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitport.calibrate.batches import run_fresh
from bitport.calibrate.contexts import evaluating, replaced_weights
from bitport.errors import ArgumentError
from bitport.numerics import kl_terms
from bitport.schemes import Target
from bitport.tensor import QTensor


class Outputs(NamedTuple):
    value: Tensor
    are_logarithms: bool
    """Whether ``value`` holds log probabilities, along the last axis."""


class Distance:
    """Distance of the outputs of ``model`` on ``batches`` from those at construction."""

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches = model, batches
        self.exact = [checked(outputs_of(model, batch), at) for at, batch in enumerate(batches)]

    def __call__(self, targets: Sequence[Target], q: QTensor) -> float:
        """Return the distance with the weight that ``targets`` name replaced by ``q``."""
        with replaced_weights(self.model, [targets], [q]):
            pairs = [
                (exact, outputs_of(self.model, batch)) for exact, batch in zip(self.exact, self.batches, strict=True)
            ]
        lost, scale = (sum(each) for each in zip(*itertools.starmap(_divergence, pairs), strict=True))
        return lost / scale if scale else lost


def outputs_of(model: nn.Module, batch: Any, *, gradients: bool = False) -> Outputs:
    with evaluating(model), torch.set_grad_enabled(gradients):
        return _floats(model, run_fresh(model, batch, gradients=gradients))


def _floats(model: nn.Module, result: Any) -> Outputs:
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return Outputs(logits.float().log_softmax(-1), True)
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not leaves:
        raise ArgumentError(
            f"{type(model).__name__} gives {type(result).__name__} without floats, so nothing tells how far "
            f'its predictions move: give a model that returns its logits, or cost="output"'
        )
    return Outputs(torch.cat([leaf.float().flatten() for leaf in leaves]), False)


def checked(outputs: Outputs, at: int) -> Outputs:
    """Those of batch ``at``, if they are numbers."""
    if bool((outputs.value.isnan() if outputs.are_logarithms else ~outputs.value.isfinite()).any()):
        raise ArgumentError(
            f"the outputs of the unquantized model hold NaN or infinity on batch {at} of the calibration, so "
            "they cannot show what a weight costs. Give other batches, a model in bfloat16 or float32, or "
            "cost='output', which looks at the outputs of each weight"
        )
    return outputs


def _divergence(exact: Outputs, changed: Outputs) -> tuple[float, float]:
    """(a sum, its divisor), both to be added up over batches."""
    if exact.are_logarithms:
        lost = kl_terms(exact.value, changed.value).sum(-1)
        return float(lost.double().sum()), lost.numel()
    return (
        float((exact.value - changed.value).square().double().sum()),
        float(exact.value.square().double().sum()),
    )
