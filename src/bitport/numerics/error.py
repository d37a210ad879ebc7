"""How far a value is from its reference: 0-dim float64 tensors.

Computed in float64 on the tensor's device, or on the CPU where the device is not known to have float64.
"""

import torch
from torch import Tensor

_HAVE_FLOAT64 = ("cpu", "cuda", "meta")


def _float64(x: Tensor) -> Tensor:
    x = x.detach()
    return (x if x.device.type in _HAVE_FLOAT64 else x.cpu()).to(torch.float64)


def sqnr(reference: Tensor, value: Tensor) -> Tensor:
    """Signal to quantization noise in dB: 20 log10(|ref| / |ref - value|); infinite where they are equal."""
    return -20 * torch.log10(relative_error(reference, value))


def relative_error(reference: Tensor, value: Tensor) -> Tensor:
    """|ref - value| / |ref| in the 2-norm; 0 where they are equal, also both zero."""
    exact = _float64(reference)
    noise = torch.linalg.vector_norm(exact - _float64(value))
    return torch.where(noise == 0, 0.0, noise / torch.linalg.vector_norm(exact))


def max_error(reference: Tensor, value: Tensor) -> Tensor:
    difference = (_float64(reference) - _float64(value)).abs().flatten()
    return torch.cat([difference, difference.new_zeros(1)]).amax()


def cosine(reference: Tensor, value: Tensor) -> Tensor:
    """Cosine of the angle between the two, taken as vectors; NaN where one of them is zero."""
    first, second = _float64(reference).flatten(), _float64(value).flatten()
    product: Tensor = torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second)
    return torch.dot(first, second) / product
