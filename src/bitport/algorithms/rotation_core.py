"""Hadamard rotations: every channel becomes a signed mean of all of them, so that none is an outlier.

A Hadamard matrix H of order n holds 1 and -1, its rows are orthogonal, and H / sqrt(n) is a rotation. Known orders: 1
and 2, twice any known order (Sylvester), and, from the squares modulo a prime q (Paley), q + 1 for q = 3 mod 4 and
2 (q + 1) for q = 1 mod 4: 12, 20, 28, 36 .., which covers all sizes of common models. Other sizes use a block-diagonal
matrix of the largest known order that divides them. Random signs in front make the rotation random:

    x -> (x * signs) H / sqrt(n)

A large matrix is a Kronecker product of small ones, and is applied as such.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

WHOLE = 64
"""Powers of two up to this are applied as one product."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation:
    """The same rotation of every run of ``signs.numel()`` channels."""

    signs: Tensor

    @classmethod
    def random(cls, size: int, seed: int) -> Rotation:
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randint(0, 2, (size,), generator=generator, device="cpu").float() * 2 - 1)

    def apply(self, x: Tensor, axis: int = -1) -> Tensor:
        """float32: x rotated along ``axis``, whose size must be a multiple of the rotation's."""
        last = x.float().movedim(axis, -1)
        runs = last.reshape(*last.shape[:-1], -1, self.signs.numel()) * self.signs.to(x.device)
        return hadamard_product(runs).reshape(last.shape).movedim(-1, axis)


def hadamard_product(x: Tensor) -> Tensor:
    """x [.., n] times the orthonormal matrix of :func:`factors`."""
    sizes = factors(x.shape[-1])
    y = x.reshape(-1, x.shape[-1] // math.prod(sizes), *sizes)
    for at, size in enumerate(sizes, 2):
        y = torch.tensordot(y, hadamard(size).to(y), dims=([at], [0])).movedim(-1, at)
    return (y / math.sqrt(math.prod(sizes))).reshape(x.shape)


def factors(size: int) -> list[int]:
    """Orders whose Kronecker product has the largest known order that divides ``size``."""
    order = next(each for each in range(size, 0, -1) if size % each == 0 and is_known(each))
    found = []
    while order > WHOLE and order % 2 == 0 and is_known(order // 2):
        power = next(p for p in (64, 32, 16, 8, 4, 2) if order % p == 0 and is_known(order // p))
        found.append(power)
        order //= power
    return [*found, order]


@functools.cache
def is_known(order: int) -> bool:
    if order <= 2:
        return order > 0
    return order % 2 == 0 and (is_known(order // 2) or bool(_paley(order)))


@functools.cache
def hadamard(order: int) -> Tensor:
    """float32 [order, order] of 1 and -1."""
    matrix = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")
    if order == 1:
        return matrix([[1]])
    if is_known(order // 2):
        return torch.kron(matrix([[1, 1], [1, -1]]), hadamard(order // 2))
    q = _paley(order)
    residues = {at * at % q for at in range(1, q)}
    character = matrix([0] + [1 if at in residues else -1 for at in range(1, q)])
    at = torch.arange(q, device="cpu")
    core, one = character.new_zeros(q + 1, q + 1), torch.eye(q + 1, dtype=torch.float32, device="cpu")
    core[0, 1:], core[1:, 0], core[1:, 1:] = 1, 1 if q % 4 == 1 else -1, character[(at[:, None] - at[None, :]) % q]
    if q % 4 == 3:
        return core + one
    return torch.kron(core, matrix([[1, 1], [1, -1]])) + torch.kron(one, matrix([[1, -1], [-1, -1]]))


def _paley(order: int) -> int:
    """The prime that this order can be constructed from, or 0."""
    if order % 4 == 0 and _is_prime(order - 1):
        return order - 1
    half = order // 2 - 1
    return half if order % 4 == 0 and half % 4 == 1 and _is_prime(half) else 0


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % at for at in range(2, math.isqrt(number) + 1))
