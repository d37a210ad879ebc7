"""GPTQ: choose codes column by column to preserve the layer's output.

With H = X^T X over the inputs of the layer, the error of its output is

    |X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T)

Rounding a column k leaves an error that the columns not rounded yet can compensate. The optimal update of these is
-(w_k - q_k) / [H^-1]_kk times the remaining part of row k of H^-1 (optimal brain surgeon). The rows of the upper
Cholesky factor U of H^-1 (H^-1 = U^T U) provide all these inverses at once:

    error = (w_k - q_k) / U_kk        W[:, k+1:] -= error U[k, k+1:]

Updates within a block of columns are applied immediately, those beyond it by one product per block.

Scales are chosen beforehand ("static groups"), so columns can be processed in any order: descending diag(H), because
errors made early can still be compensated. The order does not affect how the result is stored. The greedy order
guarantees nothing; ``nearer`` keeps rounding to nearest for rows that end up worse.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitport.algorithms.block_params import codes_of
from bitport.algorithms.columns import Columns
from bitport.algorithms.pieces import part_of, row_pieces
from bitport.errors import ArgumentError
from bitport.numerics import Format, Params, dequantize_codes, quantize_codes

MOST_DAMPING = 1.0

SOLVED, MULTIPLIED = 256, 512
"""Largest sizes of a triangular matrix that is inverted, and of a symmetric one that is multiplied, at once."""


def solve(
    w: Tensor, hessian: Tensor, fmt: Format, params: Params, damping: float = 0.01, block: int = 128, sort: bool = True
) -> Tensor:
    """Return uint8 codes [N, K] of w [N, K] for the scales in ``params``; ``hessian`` is float32 [K, K].

    ``damping``: the share of the mean of diag(H) that is added to it, multiplied by ten while H remains singular.
    ``sort``: process columns in descending order of diag(H), otherwise in their given order.
    """
    n, k = w.shape
    order = hessian.diagonal().argsort(descending=True) if sort else torch.arange(k, device=w.device)
    upper = inverse_factor(hessian[order][:, order], damping)
    left = w.t().contiguous()[order].float()  # columns as rows
    columns = Columns(fmt, params, n, k, order)
    for start in range(0, k, block):
        end = min(start + block, k)
        errors = torch.empty(end - start, n, dtype=torch.float32, device=w.device)
        for at in range(start, end):
            error = errors[at - start] = (left[at] - columns.rounded(left[at], at)) / upper[at, at]
            left[at + 1 : end].addr_(upper[at, at + 1 : end], error, alpha=-1)
        left[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return codes_of(left[order.argsort()].t(), fmt, params)  # each column as it was when it was rounded


def diagonal_mean(hessian: Tensor) -> Tensor:
    """Of a copy: where it lies apart, other devices may sum it in another order, and in the end choose other codes."""
    return hessian.diag().mean()


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper triangular U with (H + d I)^-1 = U^T U. A column that never saw an input is independent of all others.

    The Cholesky factor of H with its rows and columns reversed becomes, when reversed back, an upper triangular R with
    H = R R^T; so U = R^-1, without forming H^-1."""
    mean = diagonal_mean(hessian)
    mean = torch.where(mean > 0, mean, 1.0)
    most = max(damping, MOST_DAMPING)
    while damping <= most:
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper = inverse(lower.flip(0, 1))
            if bool(upper.isfinite().all()):
                return upper
        damping = max(10 * damping, 1e-4)
    raise ArgumentError(
        "the inputs of this layer give no positive Hessian even with its mean added to its diagonal: they hold NaN, "
        "infinity, or numbers whose squares float32 cannot hold"
    )


def inverse(upper: Tensor) -> Tensor:
    """Of an upper triangular matrix, by halves and their products, which take fewer steps than solving for an identity
    and run faster:

        [A B]^-1   [A^-1  -A^-1 B D^-1]
        [0 D]    = [0      D^-1       ]
    """
    k = len(upper)
    if k <= SOLVED:
        one = torch.eye(k, dtype=upper.dtype, device=upper.device)
        return torch.linalg.solve_triangular(upper, one, upper=True)
    half, found = k // 2, torch.zeros_like(upper)
    first, last = inverse(upper[:half, :half]), inverse(upper[half:, half:])
    found[:half, :half], found[half:, half:] = first, last
    found[:half, half:] = (first @ upper[:half, half:]).neg_() @ last
    return found


def objective(difference: Tensor, hessian: Tensor) -> Tensor:
    """diag(D H D^T) for D [.., N, K]: the squared error of each output, summed over the inputs. By halves of D, whose
    product through H is in it twice, since H is symmetric."""
    k = difference.shape[-1]
    if k <= MULTIPLIED:
        return ((difference @ hessian) * difference).sum(-1)
    half = k // 2
    first, last = difference[..., :half], difference[..., half:]
    across = (first @ hessian[..., :half, half:]).mul_(last).sum(-1)
    alone = objective(first, hessian[..., :half, :half]) + objective(last, hessian[..., half:, half:])
    return alone + 2 * across


def nearer(
    w: Tensor, hessian: Tensor, fmt: Format, codes: Tensor, params: Params, plain: Params, height: int
) -> tuple[Tensor, Tensor]:
    """Replace ``codes`` (of ``params``) by rounding to nearest with ``plain``, for each group of ``height`` rows where
    that is no worse. Returns the codes and where they were replaced, [N / height, 1]."""
    nearest = torch.empty_like(codes)
    apart, beyond = (torch.empty(w.shape, dtype=torch.float32, device=w.device) for _ in range(2))
    for rows, at in row_pieces(w, fmt):
        exact, first = w[rows].float(), part_of(plain, at)
        nearest[rows] = quantize_codes(exact, fmt, *first)
        old = dequantize_codes(nearest[rows], fmt, *first)
        new = dequantize_codes(codes[rows], fmt, *part_of(params, at))
        apart[rows], beyond[rows] = new - old, 2 * exact - old - new
    gains = (apart @ hessian).mul_(beyond).sum(-1)  # a H a - b H b = (a - b) H (a + b)
    gains = F.pad(gains, (0, -len(w) % height)).unflatten(0, (-1, height)).sum(-1, keepdim=True)
    lost = ~(gains > 0)
    return torch.where(lost.repeat_interleave(height, 0)[: len(w)], nearest, codes), lost
