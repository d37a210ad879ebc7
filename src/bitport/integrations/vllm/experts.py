"""vLLM's mixture-of-experts layers with weights from a bitport checkpoint.

A layer has ``w13`` [E, 2I, H], with the gate projection of each expert above its up projection, and ``w2`` [E, H, I].
Tokens are sorted by expert, so that all experts are computed by one grouped product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from bitport.errors import ArgumentError
from bitport.integrations.vllm.layers import one_below_the_other, ready
from bitport.integrations.vllm.numbered import Numbered
from bitport.tensor import QTensor
from bitport.tensor.combine import stacked

FUNCTIONS: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    MoEActivation.RELU2: lambda x: F.relu(x).square(),
}


class Experts(FusedMoEMethodBase):
    """Computes one layer of experts. Float experts are handed back to vLLM."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        self.following = _following(layer)
        self.dtype, load = params_dtype, attributes["weight_loader"]
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        self.numbered = {
            "w13_weight": Numbered((num_experts, rows, 1), 0, load),
            "w2_weight": Numbered((num_experts, 1, intermediate_size_per_partition), 1, load),
        }
        for name, numbered in self.numbered.items():
            layer.register_parameter(name, numbered.param)
        for name, size in (("w13_bias", rows), ("w2_bias", hidden_size)) if self.moe.has_bias else ():
            bias = nn.Parameter(torch.zeros(num_experts, size, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(bias, attributes)
            layer.register_parameter(name, bias)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        made = {name: self._stacks(layer, name) for name in self.numbered}
        del self.numbered
        if not any(isinstance(stack, QTensor) for stacks in made.values() for stack in stacks):
            for name, (stack,) in made.items():
                setattr(layer, name, ready(stack))
            layer._replace_quant_method(UnquantizedFusedMoEMethod(self.moe))
            layer.quant_method.process_weights_after_loading(layer)
            return
        for name, stacks in made.items():
            layer.register_parameter(name, None)
            setattr(layer, f"{name}s", nn.ParameterList(ready(stack) for stack in stacks))

    def _stacks(self, layer: Any, name: str) -> list[Tensor]:
        """The matrices of all experts, [E, .., K] each: one, or several whose outputs are to be concatenated."""
        numbered, param = self.numbered[name], getattr(layer, name)
        numbered.check(param, f"{name} of {layer.layer_name}")
        experts = []
        for part in param.unbind():
            pieces = [piece.to(param.device, self.dtype) for piece in numbered.pieces(part)]
            experts.append(one_below_the_other(pieces))
        return [_stacked(each) for each in zip(*experts, strict=True)]

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        experts, chosen = layer.local_num_experts, topk_ids.shape[1]
        expert = topk_ids.flatten().long()
        if layer.expert_map is not None:  # -1: owned by another process
            local = layer.expert_map[expert]
            expert = torch.where(local < 0, experts, local)
        expert, order = expert.sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(experts, device=x.device), right=True).int()
        weight = topk_weights.flatten()[order].unsqueeze(1)
        here = (expert < experts).unsqueeze(1)

        rows = x[order // chosen]
        if layer.apply_router_weight_on_input:
            rows = (rows * weight).to(x.dtype)
        y = self.following(_product(rows, layer.w13_weights, ends, getattr(layer, "w13_bias", None), expert))
        y = _product(y, layer.w2_weights, ends, getattr(layer, "w2_bias", None), expert).float()
        if not layer.apply_router_weight_on_input:
            y = y * weight
        unsorted = torch.empty_like(y)
        unsorted[order] = torch.where(here, y, 0)
        return unsorted.view(-1, chosen, y.shape[1]).sum(1).to(x.dtype)


def _following(layer: Any) -> Callable[[Tensor], Tensor]:
    """The function applied after the first product."""
    activation, limit = layer.activation, layer.swiglu_limit
    plain = next((each for each in FUNCTIONS if activation in (each, each.without_mul())), None)
    if plain is None or limit is not None:
        known = sorted(each.value for each in FUNCTIONS)
        limited = "" if limit is None else f" with a limit of {limit}"
        raise ArgumentError(f"experts are computed with one of {known}, not with {activation.value}{limited}")
    function = FUNCTIONS[plain]
    if not activation.is_gated:
        return function

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return gated


def _product(rows: Tensor, stacks: Any, ends: Tensor, bias: Tensor | None, expert: Tensor) -> Tensor:
    y = torch.cat([F.grouped_mm(rows, stack.transpose(-1, -2), offs=ends) for stack in stacks], -1)
    return y if bias is None else y + bias[expert.clamp(max=len(bias) - 1)]


def _stacked(matrices: tuple[Tensor, ...]) -> Tensor:
    quantized = [each for each in matrices if isinstance(each, QTensor)]
    if not quantized:
        return torch.stack(matrices)
    if len(quantized) < len(matrices):
        raise ArgumentError("of the experts of one layer some are quantized and some are not: quantize all or none")
    return stacked(quantized)
