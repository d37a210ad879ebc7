"""MXFP4 of gpt-oss (``quant_method: mxfp4``): the experts alone. Of E stacked matrices [N, K] in blocks of 32::

    <experts>.gate_up_proj_blocks uint8 [E, N, K/32, 16]     two e2m1 codes in a byte, the even one low
    <experts>.gate_up_proj_scales uint8 [E, N, K/32]         e8m0

    value = e2m1(code) * 2^(scale - 127)

The model has the parameter ``<experts>.gate_up_proj``, which lies as [E, K, N]. Inputs are used as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bitport.checkpoint.source import Held
from bitport.errors import CheckpointError
from bitport.interop import codec
from bitport.interop.checks import expect
from bitport.interop.codec import Weight
from bitport.numerics import Quantized
from bitport.schemes import preset
from bitport.tensor import from_parts

BYTES = 16
"""Of a block of 32 codes."""
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
BLOCKS, SCALES = "_blocks", "_scales"


class Reader(codec.Reader):
    def weights(self, held: Mapping[str, Held]) -> list[Weight]:
        found = {}
        for name, it in held.items():
            if name.endswith((BLOCKS, SCALES)) and it.dtype in EXPONENTS:
                parameter = name.removesuffix(BLOCKS).removesuffix(SCALES)
                parts = {"blocks": parameter + BLOCKS, "scales": parameter + SCALES}
                if lost := [part for part in parts.values() if part not in held]:
                    raise CheckpointError(f"{name} is there without {lost[0]}; fetch the checkpoint again")
                found[parameter] = Weight(parameter, parts)
        return list(found.values())

    def read(self, weight: Weight, tensors: dict[str, Tensor]) -> Tensor:
        blocks = expect(tensors["blocks"], weight.parts["blocks"], (torch.uint8,), (None, None, None, BYTES))
        experts, n, groups, _ = blocks.shape
        scales = expect(tensors["scales"], weight.parts["scales"], EXPONENTS, (experts, n, groups))
        parts = Quantized(blocks.flatten(-2).contiguous(), scales.contiguous().view(torch.float8_e8m0fnu))
        shape = (experts, 2 * BYTES * groups, n)
        return from_parts(parts, preset("mxfp4-wo"), shape=shape, dtype=self.dtype, transposed=True)
