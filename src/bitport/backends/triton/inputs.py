"""quantize_input: quantize inputs to the parts of the plain layout, for products outside this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from bitport.backends.triton.rounding import Destination, launch, plain_rows, single_scale
from bitport.numerics import ACTIVATIONS, Quantized, packed_size
from bitport.ops.convert import to_list


def quantize_input(x: Tensor, act: str, act_scale: Tensor | None) -> list[Tensor]:
    fmt, rows = ACTIVATIONS[act], plain_rows(x)
    m, k = rows.shape
    device = x.device
    data = torch.empty(m, packed_size(k, fmt.number.bits), dtype=torch.uint8, device=device)
    given = None if act_scale is None else act_scale.detach().reshape(1, 1).clone()  # an op must not return views
    single = single_scale(act, given, device)
    zero = None if fmt.zero == "none" else torch.empty(m, 1, dtype=torch.uint8, device=device)
    scale, raw = single, None
    if fmt.block != (0, 0):
        scale = torch.empty(fmt.scale_shape(m, k), dtype=fmt.scale_dtype(x.dtype), device=device)
        raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    launch(rows, fmt, Destination(data, raw, zero, single, codes=True), given)
    assert scale is not None  # every format has a scale, for all or per block
    return to_list(Quantized(data.view(fmt.number.storage), scale, zero, single if fmt.global_scale else None))
