"""vLLM's linear layers, embeddings and heads with weights from a bitport checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from bitport.errors import ArgumentError
from bitport.integrations.vllm.numbered import Numbered
from bitport.tensor import QTensor
from bitport.tensor.join import join


class Weights(LinearMethodBase):
    """Computes one layer. Matrices of the same scheme become one weight; those of different schemes stay separate, and
    their outputs are concatenated. A float layer is handed back to vLLM."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        cut_in_columns = isinstance(layer, RowParallelLinear)
        shape = (1, input_size_per_partition) if cut_in_columns else (sum(output_partition_sizes), 1)
        self.numbered = Numbered(shape, 1 if cut_in_columns else 0, attributes["weight_loader"])
        self.dtype = params_dtype
        layer.register_parameter("weight", self.numbered.param)

    def process_weights_after_loading(self, layer: Any) -> None:
        is_lookup, device = isinstance(layer, VocabParallelEmbedding), layer.weight.device
        if not is_lookup or not self.numbered.sources:  # a vocabulary is padded with zeros
            self.numbered.check(layer.weight, layer.prefix)
        pieces = [piece.to(device, self.dtype) for piece in self.numbered.pieces(layer.weight)]
        weights = one_below_the_other(pieces)
        del self.numbered
        layer.weight = ready(weights[0])
        if len(weights) == 1 and not isinstance(weights[0], QTensor):
            layer.quant_method = UnquantizedEmbeddingMethod() if is_lookup else UnquantizedLinearMethod()
            layer.quant_method.process_weights_after_loading(layer)
        self.further = [f"weight_{at}" for at in range(1, len(weights))]
        for name, weight in zip(self.further, weights[1:], strict=True):
            layer.register_parameter(name, ready(weight))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.further:
            return F.linear(x, layer.weight, bias)
        weights = [layer.weight, *(getattr(layer, name) for name in self.further)]
        y = torch.cat([F.linear(x, weight) for weight in weights], -1)
        return y if bias is None else y + bias

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, layer.weight)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Return the embedding to be used as the head: its weight is loaded later."""
        return embed_tokens


def one_below_the_other(pieces: list[Tensor]) -> list[Tensor]:
    """Concatenate ``pieces`` to as few matrices as possible."""
    made = pieces[:1]
    for piece in pieces[1:]:
        whole = _joined(made[-1], piece)
        if whole is None:
            made.append(piece)
        else:
            made[-1] = whole
    return made


def ready(weight: Tensor) -> nn.Parameter:
    """Return a parameter in the layout of its device."""
    made = weight.to_device_layout() if isinstance(weight, QTensor) else weight.contiguous()
    return nn.Parameter(made, requires_grad=False)


def _joined(a: Tensor, b: Tensor) -> Tensor | None:
    if not isinstance(a, QTensor) and not isinstance(b, QTensor):
        return torch.cat([a, b])
    try:
        return join([a, b], 0)
    except ArgumentError:  # different schemes, or a separate scale for all rows of each
        return None
