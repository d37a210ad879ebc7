"""QuantizedLinear: a linear layer built from (in, out), for loading existing quantized weights.

Models quantized with ``quantize_`` do not need it: their nn.Linear stays, with a QTensor as weight.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from bitport.arguments import floats_of
from bitport.errors import ArgumentError
from bitport.nn.quantize import check_finite, quantize_target
from bitport.nn.targets import find_targets
from bitport.numerics import Quantized, number_type, to_storage
from bitport.ops.device import check_present
from bitport.schemes import Recipe, RecipeLike, Scheme, Target
from bitport.schemes.plan import refuse_static
from bitport.schemes.presets import scheme_of
from bitport.schemes.target import by_storage
from bitport.tensor import QTensor, from_parts, quantize_tensor


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with W in ``scheme``; W is zero until a weight is loaded."""

    weight: QTensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: str | Scheme = "int8",
        *,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not all(hasattr(size, "__index__") and size >= 0 for size in (in_features, out_features)):
            raise ArgumentError(f"in_features and out_features are sizes, not {in_features!r} and {out_features!r}")
        if device is not None:
            check_present(device)
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme_of(scheme)
        zeros = torch.zeros(out_features, in_features, device=device, dtype=floats_of(dtype, "dtype"))
        self._set(quantize_tensor(zeros, self.scheme))
        self.bias = nn.Parameter(zeros.new_zeros(out_features), requires_grad=False) if bias else None

    def _set(self, weight: QTensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[assignment]

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: str | Scheme) -> QuantizedLinear:
        """A new layer with the weight quantized to ``scheme``; a weight that is already a QTensor of it is kept. Hooks
        stay behind, on ``linear``; :func:`swap_linears_` keeps them."""
        if not isinstance(linear, nn.Linear):
            raise ArgumentError(f"from_linear takes an nn.Linear, not a {type(linear).__name__}")
        weight = linear.weight
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new.in_features, new.out_features, new.bias = linear.in_features, linear.out_features, linear.bias
        new.scheme = scheme_of(scheme)
        _check(weight, Target("", "weight", "linear", tuple(weight.shape), ""), new.scheme)
        if not isinstance(weight, QTensor):
            if new.scheme.static:
                raise ArgumentError(
                    f"{new.scheme} has a static input scale, which is measured by running the model: "
                    f"quantize_(model, .., calibrate=batches) it first; from_linear keeps a weight that is quantized"
                )
            weight = quantize_tensor(weight.detach(), new.scheme)
        new._set(weight)
        return new.train(linear.training)

    def load_quantized_weight(self, weight: Tensor, scaler: Tensor, zero_point: Tensor | None = None) -> None:
        """Load signed integer codes, one per int8, in the form of the PyTorch/XLA quantization page::

            per channel   weight [N, K]          scaler [N]         zero_point [N]
            per block b   weight [K/b, b, N]     scaler [K/b, N]    zero_point [K/b, N]

        value = weight * scaler - zero_point. The layer's scheme must have these blocks and a "float" zero for a
        zero_point (a preset's suffix ``-fzero``), "none" without.
        """
        fmt, number = self.scheme.weight, number_type(self.scheme.weight.dtype)
        n, k = self.out_features, self.in_features
        block = k if fmt.block == (1, 0) else fmt.block[1]
        if number.kind != "int" or fmt.block[0] != 1 or k % block:
            raise ArgumentError(f"{self.scheme} is not an integer scheme per channel or per group dividing {k}")
        if number.midpoint % 1:
            raise ArgumentError(f"one bit stands for -1/2 or 1/2, so {self.scheme} holds no integers: use 2 to 8 bits")
        if (zero_point is None) != (fmt.zero == "none") or fmt.zero == "int":
            raise ArgumentError(
                f"{self.scheme} has zero point kind {fmt.zero!r}: load a zero_point with '-fzero', none with '-sym'"
            )
        per_channel = isinstance(weight, Tensor) and weight.dim() == 2
        shapes = ((n, k), (n,)) if per_channel else ((k // block, block, n), (k // block, n))
        for name, part, shape in (
            ("weight", weight, shapes[0]),
            ("scaler", scaler, shapes[1]),
            ("zero_point", zero_point, shapes[1]),
        ):
            if not isinstance(part, Tensor) and (part is not None or name != "zero_point"):
                raise ArgumentError(f"{name} must be a tensor, not a {type(part).__name__}")
            if part is not None and tuple(part.shape) != shape:
                raise ArgumentError(f"{name} must have shape {[*shape]}, not {[*part.shape]}")
        if per_channel and block != k:
            raise ArgumentError(f"{self.scheme} has blocks of {block}; give the weight as [{k // block}, {block}, {n}]")
        signed = weight if per_channel else weight.flatten(0, 1).t()
        codes = signed.to(torch.int16) + int(number.midpoint)
        if weight.dtype != torch.int8 or bool(((codes < 0) | (codes > number.qmax)).any()):
            low = -int(number.midpoint)
            raise ArgumentError(f"weight must be int8 with values {low}..{low + number.qmax} for {number.name}")
        scale = (scaler[:, None] if per_channel else scaler.t()).contiguous()
        zero = None
        if zero_point is not None:
            shift = (zero_point[:, None] if per_channel else zero_point.t()).float()
            zero = (number.midpoint + torch.where(shift == 0, 0, shift / scale.float())).to(scale.dtype)
            if not bool(zero.isfinite().all()):
                raise ArgumentError(
                    "zero_point cannot be kept in units of codes where it is this large compared with scaler"
                )
        parts = Quantized(to_storage(codes.to(torch.uint8), number), scale, zero)
        scheme = dataclasses.replace(self.scheme, weight=dataclasses.replace(fmt, scale="input"))
        self._set(from_parts(parts, scheme, shape=(n, k), dtype=self.weight.dtype).to_device_layout())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, scheme={self.scheme}, bias={self.bias is not None}"


def swap_linears_(model: nn.Module, recipe: RecipeLike) -> list[str]:
    """Make each nn.Linear selected by ``recipe`` a QuantizedLinear, in place, and return their names. Only their class
    and weight change: shared layers, hooks, mode and bias stay. A weight is quantized under all its names, so that an
    embedding tied to it stays tied, for which ``recipe`` has to select both."""
    if type(model) is nn.Linear:
        raise ArgumentError("the model is itself a linear layer: convert it with QuantizedLinear.from_linear(..)")
    targets = find_targets(model)
    plan = Recipe.of(recipe).resolve(targets)
    chosen = [
        (target, scheme, module)
        for target in targets
        if (scheme := plan[target.name].scheme) is not None
        and target.param == "weight"
        and type(module := model.get_submodule(target.module)) is nn.Linear
    ]
    refuse_static(
        [plan[target.name] for target, _, module in chosen if not isinstance(module.weight, QTensor)],
        "quantize_(model, .., calibrate=batches) it first; swap_linears_ keeps weights that are quantized",
    )
    for target, scheme, module in chosen:
        _check(module.weight, target, scheme)
    tied = by_storage(targets)
    for target, scheme, module in chosen:
        if not isinstance(module.weight, QTensor):
            q = nn.Parameter(quantize_target(module.weight.detach(), target, scheme), requires_grad=False)
            for each in tied[target.storage]:
                each.put(model, q)
        module.__class__, module.scheme = QuantizedLinear, scheme  # type: ignore[assignment]
    return [target.module for target, _, _ in chosen]


def _check(weight: Tensor, target: Target, scheme: Scheme) -> None:
    """Raise ArgumentError unless ``weight`` is quantized to ``scheme`` or can be."""
    if not isinstance(weight, QTensor):
        check_finite(weight, target)
    elif weight.scheme != scheme:
        raise ArgumentError(
            f"{target.module or 'the layer'} is {weight.scheme} already, not {scheme}; dequantize_ it first"
        )
