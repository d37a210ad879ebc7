"""A few steps of training, for tests that compare models in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def steps(
    model: nn.Module, count: int = 3, *, size: int = 16, rows: slice = slice(None), dtype: torch.dtype = torch.float32
) -> list[float]:
    """Return the losses of a model from 64 numbers to 40, on ``rows`` of ``size`` rows, the same for each step and
    call."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    torch.manual_seed(1)
    x, want = torch.randn(size, 64, dtype=dtype)[rows], torch.randn(size, 40)[rows]
    losses = []
    for _ in range(count):
        loss = F.mse_loss(model(x).float(), want)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
