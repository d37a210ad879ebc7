"""Weights and inputs that distinguish algorithms: outliers, uneven columns, correlated inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.calibrate.inputs import Inputs
from bitport.numerics import Quantized, dequantize
from bitport.schemes import preset

SCHEMES = ("int2", "int3-g32", "int4", "int4-sym", "int4-fzero", "int8", "int4-channel", "int4-tensor", "int4-b16x32")
SCHEMES += ("fp8", "fp8-row", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "nf4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight(n: int = 24, k: int = 150, dtype: torch.dtype = torch.float32) -> Tensor:
    w = torch.randn(n, k) * 0.05 * torch.rand(k).exp()
    return torch.where(torch.rand(n, k) < 0.01, 5 * w, w).to(dtype)


def inputs(k: int = 150, rows: int = 400) -> Tensor:
    return torch.randn(rows, k) @ (torch.eye(k) + torch.randn(k, k) * 0.1)


def seen(x: Tensor) -> Inputs:
    found = Inputs((), x.shape[-1])
    found.add(x)
    return found


def value(parts: Quantized, scheme: str, n: int, k: int) -> Tensor:
    return dequantize(parts, preset(scheme).weight, n, k).double()


def output_error(w: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """Squared output error of each row, summed over the inputs, in float64."""
    return (x.double() @ (w.double() - q).t()).square().sum(0)
