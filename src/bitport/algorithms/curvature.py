"""How far a model's outputs move when one of its weights changes a little: estimated for all weights, and many changes
of each, by the same few backward passes.

Let d be the change of a weight W, and g the gradient by W of a number drawn at random from the outputs. To the second
order the distance that :mod:`bitport.algorithms.distance` measures is

    logits      g = sum over tokens of d log p(y) / dW, y drawn from the predictions p of each token:
                KL(p || q) summed over tokens = 1/2 E <g, d>^2, since the scores have mean zero, are independent between
                tokens, and have the Fisher information as covariance
    outputs z   g = d <s, z> / dW with random signs s: |z(W + d) - z|^2 = E <g, d>^2

and <g, d> is one inner product for each change, once g is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitport.algorithms.distance import Outputs, checked, outputs_of
from bitport.calibrate.contexts import replaced_weights
from bitport.errors import ArgumentError
from bitport.report.progress import progress as with_progress
from bitport.schemes import Target
from bitport.tensor import QTensor

PROBES = 64
"""Backward passes, at least. <g, d> is nearly normal, so a mean of n squares has a relative standard error of
sqrt(2 / n): 18 %, where a bit more or less changes the distance by a factor of four."""


class Candidates(NamedTuple):
    targets: Sequence[Target]
    """The names of one weight."""
    rounded: Sequence[QTensor]


def check_gradients(model: nn.Module, batch: Any, weights: Sequence[Sequence[Target]]) -> None:
    """Raise ArgumentError if the outputs tell nothing, before hours are spent on rounding. ``weights``: the names of
    each."""
    if any(param.is_inference() for param in model.parameters()):
        raise ArgumentError(
            "weights that were made in inference mode have no gradients: take cost='kl', which needs none, or make the "
            "model outside torch.inference_mode()"
        )
    with replaced_weights(model, weights, _leaves(model, weights)):
        if not checked(outputs_of(model, batch, gradients=True), 0).value.requires_grad:
            raise ArgumentError(
                f"the outputs of {type(model).__name__} have no gradient by its weights: take cost='kl', which needs "
                "none"
            )


def estimated(
    model: nn.Module, batches: Sequence[Any], candidates: Sequence[Candidates], progress: bool | None = None
) -> list[list[float]]:
    """The distance of the outputs, for each weight and each that it may be rounded to. The same numbers are drawn on
    each call and on every device."""
    drawn, scale = torch.Generator("cpu").manual_seed(0), 0.0
    weights = [each.targets for each in candidates]
    leaves = _leaves(model, weights)
    squares = [_squares(leaf, each.rounded) for leaf, each in zip(leaves, candidates, strict=True)]
    with replaced_weights(model, weights, leaves):
        for at, batch in enumerate(with_progress(batches, len(batches), "taking gradients", progress)):
            outputs = checked(outputs_of(model, batch, gradients=True), at)
            for _ in range(math.ceil(PROBES / len(batches))):
                scale += _probe(outputs, drawn, leaves)
            del outputs  # and with it what is kept for gradients, before the next run
    return [[total / scale if scale else total for total in each.tolist()] for each in squares]


def _leaves(model: nn.Module, weights: Sequence[Sequence[Target]]) -> list[nn.Parameter]:
    """Parameters that share with the weights their numbers and nothing else: they are not frozen, and have no gradients
    yet and no hooks of an optimizer."""
    return [nn.Parameter(names[0].weight(model).detach()) for names in weights]


def _squares(leaf: nn.Parameter, rounded: Sequence[QTensor]) -> Tensor:
    """The sums of <g, d>^2 over the gradients of ``leaf`` from now on; each of these is dropped once it was looked at,
    so that those of all weights are never in memory together."""
    squares = torch.zeros(len(rounded), dtype=torch.float32, device=leaf.device)

    def look(leaf: Tensor) -> None:
        assert leaf.grad is not None
        slope, leaf.grad = leaf.grad.float(), None
        value = leaf.detach().float()
        changes = (each.dequantize(torch.float32).sub_(value) for each in rounded)
        squares.add_(torch.stack([change.mul_(slope).sum() for change in changes]).square_())

    leaf.register_post_accumulate_grad_hook(look)
    return squares


def _probe(outputs: Outputs, drawn: torch.Generator, leaves: Sequence[nn.Parameter]) -> float:
    """Give ``leaves`` the gradients of a number that is drawn from the outputs. Returns the mean <g, d>^2 of a change
    at distance 1."""
    value = outputs.value
    if outputs.are_logarithms:
        below = value.detach().exp().cumsum(-1)
        at = torch.rand(*value.shape[:-1], 1, generator=drawn, dtype=torch.float32, device="cpu")
        at *= 1 - 2**-20  # the last sum stays out of reach
        labels = torch.searchsorted(below, at.to(value.device) * below[..., -1:], right=True)
        number, squared = value.gather(-1, labels).sum(), 2.0 * labels.numel()
    else:
        signs = torch.randint(2, value.shape, generator=drawn, device="cpu").to(value) * 2 - 1
        number, squared = (value * signs).sum(), float(value.detach().square().sum())
    number.backward(inputs=list(leaves), retain_graph=True)
    return squared
