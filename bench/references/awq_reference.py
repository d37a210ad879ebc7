"""llm-compressor's AWQ: its modifier's search for the scales of a layer after a norm, then rounding to nearest."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    forward_quantize,
)
from llmcompressor.core import State
from llmcompressor.modifiers.quantization.calibration import initialize_observer, observe, update_qparams
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from torch import Tensor, nn

from bitport.algorithms import AWQ

PACKAGES = ("llmcompressor", "compressed-tensors")
SCHEME, ALGORITHM = "int4", AWQ()
ARGS = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=128)


class Norm(nn.Module):
    """The module that absorbs the scale. The inputs are normalized already."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(k), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def solve(weight: Tensor, x: Tensor) -> Tensor:
    n, k = weight.shape
    model = nn.ModuleDict({"norm": Norm(k), "linear": nn.Linear(k, n, bias=False, device="meta")})
    linear = model["linear"]
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=ARGS)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    initialize_observer(linear, "weight")
    modifier = AWQModifier(mappings=[AWQMapping("re:.*norm", ["re:.*linear"])], offload_device=None)
    modifier.on_calibration_start(State(model=model), None)
    linear.quantization_enabled = False
    linear(x)
    modifier.remove_hooks()
    mapping = modifier._resolved_mappings[0]
    with torch.no_grad():  # the step after its search is skipped, as it pins memory, which requires a GPU
        scale = modifier._compute_best_scale(mapping, modifier._run_samples(linear), {linear: weight})
        linear.weight.copy_(weight * scale)
        observe(linear, "weight")
        update_qparams(linear, "weight")
        return forward_quantize(linear, linear.weight, "weight", ARGS).float() / scale
