"""The fused op of nn.TransformerEncoderLayer, in the layer's own steps.

PyTorch takes the fused op where nothing is differentiated, unless a weight overrides torch's functions. Dynamo does not
see that a quantized one does, so layers that are compiled or exported with ``strict=True`` come here, eager ones never.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

PADDING = 1
"""The ``mask_type`` of a mask of keys [batch, length]; others: [batch, heads, length, length] or [length, length]."""


def encoder_layer(
    src: Tensor,
    width: int,
    heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: Tensor,
    norm1_bias: Tensor | None,
    norm2_weight: Tensor,
    norm2_bias: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    padding = mask if mask_type == PADDING else None
    hidden = None if mask_type == PADDING or mask is None else mask.flatten(0, -3) if mask.dim() > 2 else mask

    def attended(x: Tensor) -> Tensor:
        rows = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            rows,
            rows,
            rows,
            width,
            heads,
            in_weight,
            in_bias,
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=out_weight,
            out_proj_bias=out_bias,
            training=False,
            key_padding_mask=padding,
            need_weights=False,
            attn_mask=hidden,
        )
        return y.transpose(0, 1)

    def passed(x: Tensor) -> Tensor:
        y = F.linear(x, up, up_bias)
        return F.linear(F.gelu(y) if use_gelu else F.relu(y), down, down_bias)

    def normed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, eps)

    if norm_first:
        x = src + attended(normed(src, norm1_weight, norm1_bias))
        return x + passed(normed(x, norm2_weight, norm2_bias))
    x = normed(src + attended(src), norm1_weight, norm1_bias)
    return normed(x + passed(x), norm2_weight, norm2_bias)
