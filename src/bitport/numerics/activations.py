"""Quantization of activations before a matmul with quantized weights. x [..., K] is seen as [M, K], one row a token."""

import math

import torch
from torch import Tensor

from bitport.numerics.codec import Quantized, quantize, quantize_dequantize
from bitport.numerics.format import Format
from bitport.numerics.qparams import choose_qparams

ACTIVATIONS: dict[str, Format] = {
    "int8": Format(dtype="int8"),
    "int8-asym": Format(dtype="int8", zero="int"),
    "int8-tensor": Format(dtype="int8", block=(0, 0)),
    "fp8": Format(dtype="float8_e4m3"),
    "fp8-tensor": Format(dtype="float8_e4m3", block=(0, 0)),
    "fp8-e5m2-tensor": Format(dtype="float8_e5m2", block=(0, 0)),
    "fp8-128": Format(dtype="float8_e4m3", block=(1, 128)),
    # The scale rules with the least error on normally distributed data: "floor" is 0.8 and 0.2 dB worse.
    "mxfp8": Format(dtype="float8_e4m3", block=(1, 32), scale="e8m0", scale_rule="rceil"),
    "mxfp4": Format(dtype="float4_e2m1", block=(1, 32), scale="e8m0", scale_rule="even"),
    "nvfp4": Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True),
}
"""How inputs can be rounded: the number format of x seen as [tokens, K], by the name that ``Scheme.act`` has."""

STATIC = tuple(name for name, fmt in ACTIVATIONS.items() if fmt.block == (0, 0) or fmt.global_scale)
"""Formats with a scale for all of x that calibration can fix: the only scale, or the global scale of nvfp4."""


def activation_format(name: str) -> Format:
    """The format of the activation called ``name``; ValueError with the known names for any other."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation format {name!r}; the activation formats are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def quantize_rows(x: Tensor, name: str, act_scale: Tensor | None = None) -> Quantized:
    """Quantize x, seen as [M, K], to an activation format. `act_scale`, one float32 number, fixes the scale that all of
    x shares (STATIC)."""
    fmt = activation_format(name)
    scale, scale2 = _static(name, fmt, act_scale)
    return quantize(_rows(x), fmt, scale=scale, scale2=scale2)


def fake_quantize(x: Tensor, name: str, act_scale: Tensor | None = None) -> Tensor:
    """Dequantized `quantize_rows` without packing: float32 in the shape of x."""
    fmt = activation_format(name)
    scale, scale2 = _static(name, fmt, act_scale)
    return quantize_dequantize(_rows(x), fmt, scale=scale, scale2=scale2).reshape(x.shape)


def static_scale(amax: Tensor, name: str) -> Tensor:
    """The `act_scale` [1, 1] for inputs of largest magnitude `amax`."""
    scale, _, scale2 = choose_qparams(amax.float().reshape(1, 1), activation_format(name))
    return scale if scale2 is None else scale2


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _static(name: str, fmt: Format, act_scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(scale, scale2), one of them `act_scale`; both None without it."""
    if act_scale is None:
        return None, None
    if name not in STATIC:
        raise ValueError(f"{name!r} scales each token or block; a static scale is for {', '.join(STATIC)}")
    if act_scale.dtype != torch.float32 or act_scale.numel() != 1:
        raise ValueError(
            f"a static scale is one float32 number, got {act_scale.dtype} of shape {tuple(act_scale.shape)}"
        )
    single = act_scale.detach().reshape(1, 1)
    return (None, single) if fmt.global_scale else (single, None)
