"""GPTQ: codes that keep the layer's output, column after column.

With H = X^T X over the inputs of the layer, the error of its output is

    |X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T)

Rounding one column k leaves an error; the columns that are not rounded yet can make up for it. The best change of
them is -(w_k - q_k) / [H^-1]_kk times row k of H^-1 over what is left (optimal brain surgeon). All these inverses at
once are the rows of the upper Cholesky factor U of H^-1 (H^-1 = U^T U):

    error = (w_k - q_k) / U_kk        W[:, k+1:] -= error U[k, k+1:]

The changes within a block of columns are made at once, those beyond it in one product per block.

Scales are chosen before ("static groups"), so columns may go in any order: the largest of diag(H) first, because what
is rounded early can be made up for. The order leaves no trace in the result. Rows that end worse than plain rounding
with the same scales (the greedy order promises nothing) keep plain rounding: so the result is never worse than that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitport.algorithms.columns import Columns
from bitport.algorithms.parts import Params
from bitport.errors import ArgumentError
from bitport.numerics import Format, dequantize_codes, quantize_codes

MOST_DAMPING = 1.0


def solve(
    w: Tensor, hessian: Tensor, fmt: Format, params: Params, damping: float = 0.01, block: int = 128, sort: bool = True
) -> Tensor:
    """uint8 codes [N, K] of w [N, K] for the scales in ``params``; ``hessian`` float32 [K, K].

    ``damping``: this share of the mean of diag(H) is added to it, ten times more as often as H is still singular.
    ``sort``: columns in descending order of diag(H), else as they lie.
    """
    n, k = w.shape
    order = hessian.diagonal().argsort(descending=True) if sort else torch.arange(k, device=w.device)
    upper = inverse_factor(hessian[order][:, order], damping)
    left = w.float().t()[order].contiguous()  # columns as rows
    columns = Columns(fmt, params, n, k, order)
    codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
    for start in range(0, k, block):
        end = min(start + block, k)
        errors = torch.empty(end - start, n, dtype=torch.float32, device=w.device)
        for at in range(start, end):
            codes[at], value = columns.rounded(left[at], at)
            error = errors[at - start] = (left[at] - value) / upper[at, at]
            left[at + 1 : end].addr_(upper[at, at + 1 : end], error, alpha=-1)
        left[end:] -= upper[start:end, end:].t() @ errors
    result = torch.empty_like(codes)
    result[order] = codes
    result = result.t().contiguous()
    return nearer(w.float(), hessian, fmt, result, params, params)[0]


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper triangular U with (H + d I)^-1 = U^T U. A column that never saw an input stands alone.

    The Cholesky factor of H with its rows and columns in reverse order is, turned back, an upper triangular R with
    H = R R^T; so U = R^-1, and H^-1 need not be made."""
    mean = hessian.diagonal().mean()
    mean = torch.where(mean > 0, mean, 1.0)
    most = max(damping, MOST_DAMPING)
    while damping <= most:
        damped = hessian.flip(0, 1)
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            one = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), one, upper=True)
            if bool(upper.isfinite().all()):
                return upper
        damping = max(10 * damping, 1e-4)
    raise ArgumentError(
        "the inputs of this layer give no positive Hessian even with its mean added to its diagonal: they hold NaN, "
        "infinity, or numbers whose squares float32 cannot hold"
    )


def objective(difference: Tensor, hessian: Tensor) -> Tensor:
    """diag(D H D^T) for D [N, K]: the squared error of each output, summed over the inputs."""
    return ((difference @ hessian) * difference).sum(-1)


def nearer(
    w: Tensor, hessian: Tensor, fmt: Format, codes: Tensor, params: Params, plain: Params, height: int = 1
) -> tuple[Tensor, Tensor]:
    """``codes``, which are of ``params``, but those of plain rounding with ``plain`` where these end no worse, for
    ``height`` rows at a time; and where that is, [N / height, 1]."""
    nearest = quantize_codes(w, fmt, *plain)
    before, after = (
        objective(w - dequantize_codes(each, fmt, *its), hessian) for each, its in ((nearest, plain), (codes, params))
    )
    gains = F.pad(before - after, (0, -len(w) % height)).unflatten(0, (-1, height)).sum(-1, keepdim=True)
    lost = ~(gains > 0)
    return torch.where(lost.repeat_interleave(height, 0)[: len(w)], nearest, codes), lost
