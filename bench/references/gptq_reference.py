"""llm-compressor's GPTQ: columns ordered by the magnitude of their inputs, static groups, as by default. It does not
search ranges; ours does, as by default. Neither shrinks H, by which the errors are compared."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import ActivationOrdering, QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from torch import Tensor

from bitport.algorithms import GPTQ

PACKAGES = ("llmcompressor", "compressed-tensors")
SCHEME, ALGORITHM = "int4", GPTQ(shrinkage=0.0)
ARGS = QuantizationArgs(
    num_bits=4, type="int", symmetric=False, strategy="group", group_size=128, actorder=ActivationOrdering.WEIGHT
)


def solve(weight: Tensor, x: Tensor) -> Tensor:
    rows = x.float()
    blocks = weight.float().unflatten(1, (-1, 128))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), ARGS)
    hessian = 2 / len(rows) * (rows.t() @ rows)
    found, _, failed = quantize_weight(
        weight.float()[None], hessian[None], scale[None], zero[None], None, ARGS, percdamp=0.01
    )
    assert not bool(failed.any())
    return found[0].to(torch.float32)
