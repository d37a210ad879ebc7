"""Coordinate descent over codes: repeatedly set each column to its optimum given all others.

With E = W - Q, tr(E H E^T) depends on column k as H_kk (q_k - t_k)^2 plus a constant, where

    t_k = q_k + (E H)_k / H_kk

so the number nearest to t_k is optimal in any format. No step makes a row worse, and the process ends when no single
code can be improved. E H is kept up to date within a block of columns, and updated beyond it by one product per block.
"""

from __future__ import annotations

from torch import Tensor

from bitport.algorithms.block_params import codes_of
from bitport.algorithms.columns import Columns
from bitport.numerics import Format, Params, dequantize_codes


def sweep(
    w: Tensor, hessian: Tensor, fmt: Format, codes: Tensor, params: Params, sweeps: int, block: int = 128
) -> Tensor:
    """Improve the given codes of w [N, K]; returns uint8 codes [N, K]. ``hessian``: float32 [K, K]. A column that never
    saw an input keeps its codes."""
    k = w.shape[-1]
    columns = Columns(fmt, params, *w.shape)
    q = dequantize_codes(codes, fmt, *params).t().contiguous()  # columns as rows
    product = hessian @ (w.float().t() - q)
    power = hessian.diagonal().tolist()
    for _ in range(sweeps):
        changed = False
        for start in range(0, k, block):
            end = min(start + block, k)
            before = q[start:end].clone()
            for at in range(start, end):
                if power[at] > 0:
                    new = columns.rounded(q[at] + product[at] / power[at], at)
                    product[start:end].addr_(hessian[at, start:end], q[at] - new)
                    q[at] = new
            change = before - q[start:end]
            product[:start] += hessian[:start, start:end] @ change
            product[end:] += hessian[end:, start:end] @ change
            changed = changed or bool(change.any())
        if not changed:
            break
    return codes_of(q.t(), fmt, params)
