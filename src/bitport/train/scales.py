"""Learn the scales of a quantized model, while codes and zero points stay as an algorithm chose them.

A weight that was the parameter ``layer.weight`` becomes a torch parametrization::

    layer.weight                                  the codes with the changed scales, as used by products
    layer.parametrizations.weight.original0       the change: float32, in the shape of the scales, initially 0
    layer.parametrizations.weight.0.quantized     the original quantized weight

    scale = round(original scale * (1 + change))            to the dtype of scales; d round(s) / ds = 1
    d weight / d change = (code - zero) * original scale

Changes are relative to the scale, so one learning rate suits weights and schemes of all magnitudes, and weight decay
pulls towards the initial scales.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from bitport.errors import ArgumentError
from bitport.nn.fsdp import refuse_fsdp
from bitport.nn.targets import check_model, find_targets, uncompiled
from bitport.numerics import dequantize, to_blocks
from bitport.ops.product import in_code_order
from bitport.report import LayerReport
from bitport.schemes import Choice, Plan, Target
from bitport.tensor import QTensor
from bitport.tensor.qtensor import rows_of
from bitport.tensor.sharded import is_sharded
from bitport.train.product import refuse_transforms
from bitport.train.tensor import Rounding, TrainedTensor

LEARNED = "scales learned"
"""What reports show in place of an algorithm."""


def learn_scales_(model: nn.Module) -> Plan:
    """Make the scales of the quantized weights of ``model`` trainable, while their codes stay: this improves the
    result of any algorithm or library, with a fraction of the memory that training the weights takes. Create the
    optimizer afterwards; :func:`convert_` ends the training. Returns which weights that concerns, and why not the
    others.

    Parameters that are not quantized are unaffected, and trained if they require a gradient.
    """
    model = uncompiled(model)
    check_model(model)
    refuse_fsdp(model, "learn_scales_")
    if learns_scales(model):
        raise ArgumentError("the scales of this model are learned already; convert_(model) ends that")
    choices: list[Choice] = []
    lists: dict[int, ParametrizationList] = {}
    for target in find_targets(model):
        module: Any = model.get_submodule(target.module)
        param = getattr(module, target.param)
        if reason := _why_not(param):
            choices.append(Choice(target.name, None, reason))
            continue
        choices.append(Choice(target.name, param.scheme, "its scales are learned"))
        known = lists.get(id(param))
        scales = Scales(param, target) if known is None else known[0]
        register_parametrization(module, target.param, scales, unsafe=True)
        made = module.parametrizations[target.param]
        module.parametrizations[target.param] = lists.setdefault(id(param), made)
        made.original0.requires_grad_(True)
    plan = Plan(tuple(choices))
    if not lists:
        raise ArgumentError(f"no scales of this model can be learned:\n{plan or 'it has no weights'}")
    return plan


def _why_not(param: Tensor) -> str:
    if is_sharded(param):
        return "sharded: learn_scales_ first, then shard the model"
    if not isinstance(param, QTensor):
        return "not quantized"
    if param.scale.dtype.itemsize == 1:
        return f"its scales are {param.scale.dtype}, too coarse to be learned"
    return ""


class Scales(nn.Module):
    """The parametrization of one weight, or of several that are tied."""

    def __init__(self, q: QTensor, target: Target) -> None:
        super().__init__()
        self.quantized: Any = nn.Parameter(q.to_layout("plain"), requires_grad=False)
        self.rounding = Rounding(q.scheme, kind=target.kind, transposed=target.transposed)

    def right_inverse(self, q: QTensor) -> tuple[Tensor]:
        """Called by torch for the parameter whose :meth:`forward` is ``q``."""
        return (torch.zeros_like(self.quantized.scale, dtype=torch.float32),)

    @torch._disable_dynamo
    def forward(self, change: Tensor) -> TrainedTensor:
        refuse_transforms()
        return _Changed.apply(change, self.quantized, self.rounding)


def with_change(q: QTensor, change: Tensor) -> QTensor:
    parts = q.plain()
    scale = (parts.scale.float() * (1 + change.float())).to(parts.scale.dtype)
    return q.replace(parts._replace(scale=scale), bits_layout="plain")


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, change: Tensor, q: QTensor, rounding: Rounding) -> TrainedTensor:
        ctx.q, ctx.rounding, ctx.dtype = q, rounding, change.dtype
        return TrainedTensor(with_change(q, change).to_device_layout(), rounding, q.act_scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        q, fmt = ctx.q, ctx.q.scheme.weight
        rows = in_code_order(rows_of(grad, ctx.rounding.kind, ctx.rounding.transposed), q)
        codes = dequantize(q.plain(), fmt, q.matrix.n, q.matrix.k, torch.float32)
        return to_blocks(rows.float() * codes, fmt.block).sum((-3, -1)).to(ctx.dtype), None, None


def learns_scales(model: nn.Module) -> bool:
    return any(_learned(model))


class _Learned(NamedTuple):
    name: str
    module: nn.Module
    param: str
    parametrizations: Any


def _learned(model: nn.Module) -> Iterator[_Learned]:
    """Yield each name of each weight whose scales are learned."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        for param, made in dict(getattr(module, "parametrizations", {})).items():
            if isinstance(made[0], Scales):
                yield _Learned(f"{module_name}.{param}".lstrip("."), module, param, made)


def learned_weights(model: nn.Module) -> dict[int, tuple[str, str]]:
    """id of a quantized weight whose scales are learned -> (the first name that it has in layers, its kind)."""
    return {
        id(each.parametrizations[0].quantized): (each.name, each.parametrizations[0].rounding.kind)
        for each in reversed([*_learned(model)])
    }


def settle_scales_(model: nn.Module) -> list[LayerReport]:
    """Replace the parametrizations by quantized parameters with the learned scales."""
    learned = [*_learned(model)]
    done: dict[int, nn.Parameter] = {}
    layers = []
    for each in learned:
        change = each.parametrizations.original0
        tied = id(change) in done
        if not tied:
            changed = with_change(each.parametrizations[0].quantized, change.detach())
            if not changed.scale.isfinite().all():
                raise ArgumentError(f"{each.name}: scales that were learned are NaN or infinite; nothing was converted")
            done[id(change)] = nn.Parameter(changed.to_device_layout(), requires_grad=False)
        q: Any = done[id(change)]
        layers.append(LayerReport(each.name, str(q.scheme), "", q.nbytes, q.nbytes, algorithm=LEARNED, tied=tied))
    changes = [each.parametrizations.original0 for each in learned]
    if any(change.grad is not None for change in changes) and not any(change.any() for change in changes):
        warnings.warn(
            "no scale has changed, though there are gradients: make the optimizer after learn_scales_, of the model's "
            "parameters as they are then",
            stacklevel=3,
        )
    for each in learned:
        _remove(each)
        each.module.register_parameter(each.param, done[id(each.parametrizations.original0)])
    return layers


def _remove(learned: _Learned) -> None:
    """Remove one parametrization; torch's own function would delete the property from a class shared with copies of the
    module."""
    module: Any = learned.module
    with_property = type(module)
    del module.parametrizations[learned.param]
    if len(module.parametrizations):
        left = {name: value for name, value in vars(with_property).items() if name != learned.param}
        module.__class__ = type(with_property.__name__, with_property.__bases__, left)
    else:
        del module.parametrizations
        module.__class__ = with_property.__base__
