"""Error of a value against its reference: of numbers, as 0-dim float64 tensors, and of predictions.

Numbers are compared in float64 on the tensor's device, or on the CPU if the device is not known to support float64.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_HAVE_FLOAT64 = ("cpu", "cuda", "meta")


def numbers_at_once(device: torch.device) -> int:
    """Elements to compare at a time: on a CPU what its caches hold in float64, on other devices enough to keep them
    busy. Converting a whole weight to float64 would take several times its memory, and most of the time."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


def _with_float64(device: torch.device) -> torch.device:
    return device if device.type in _HAVE_FLOAT64 else torch.device("cpu")


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    most, size = numbers_at_once(one.device), one.numel()
    if size <= most:
        yield one, other
    elif rows := most * len(one) // size:
        yield from zip(one.split(rows), other.split(rows), strict=True)
    else:  # a single row is too large
        for pair in zip(one, other, strict=True):
            yield from _pieces(*pair)


def squares(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """|ref|^2 and |ref - value|^2, [2], summed over all (reference, value) pairs."""
    memory, found = torch.empty(2, 0, dtype=torch.float64), []
    for pair in pairs:
        for one, other in _pieces(*torch.broadcast_tensors(*pair)):
            if memory.shape[1] < one.numel():  # reused: every page of new memory would cost a page fault
                memory = torch.empty(2, one.numel(), dtype=torch.float64, device=_with_float64(one.device))
            exact, error = memory[:, : one.numel()]
            exact.view(one.shape).copy_(one.detach())
            error.view(one.shape).copy_(other.detach())
            error -= exact
            found.append(torch.stack([torch.dot(exact, exact), torch.dot(error, error)]))
    return torch.stack(found).sum(0) if found else torch.zeros(2, dtype=torch.float64, device="cpu")


def sqnr(reference: Tensor, value: Tensor) -> Tensor:
    """Signal-to-quantization-noise ratio in dB: 20 log10(|ref| / |ref - value|); infinite if they are equal."""
    return decibels(*squares([(reference, value)]))


def decibels(signal: Tensor, noise: Tensor) -> Tensor:
    """The ratio of :func:`squares` in dB; infinite for zero noise."""
    return -20 * torch.log10(torch.where(noise == 0, 0.0, (noise / signal).sqrt()))


def kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """What the elements of two distributions contribute to KL(p || q) in nats, given their logarithms; sum over the
    last axis.

    With d = log q - log p the term is p (e^d - 1 - d), i.e. p (log p - log q) with q - p added: these add up to 0,
    since both distributions add up to 1, but no term is negative, nothing cancels, and errors of the normalizer enter
    only squared. So float32 is enough, and a KL of 1e-6 is still accurate. It is computed as q - p (1 + d) if e^d is
    large, and as q if p is 0.
    """
    p, q, d = log_p.exp(), log_q.exp(), log_q - log_p
    terms = torch.where(d < 1, p * (torch.expm1(d) - d), q - p * (1 + d))
    return torch.where(p > 0, terms, q)
