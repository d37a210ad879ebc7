"""Before and after training: prepare_ a float model, train it as ever, convert_ it to the quantized one.

``prepare_`` and ``convert_`` do not change modules, names or shapes, so that a checkpoint of the float model is one of
the prepared model too: its state_dict() holds the float values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from bitport import plugins
from bitport.algorithms import algorithm
from bitport.algorithms.apply import apply
from bitport.calibrate.observe import input_scales
from bitport.errors import ArgumentError
from bitport.nn.fsdp import refuse_fsdp
from bitport.nn.quantize import check_finite
from bitport.nn.targets import find_targets
from bitport.ops.device import check_device
from bitport.report import LayerReport, Report
from bitport.schemes import Choice, Plan, Recipe, Scheme, Target
from bitport.schemes.plan import refuse_static
from bitport.tensor import QTensor
from bitport.tensor.parts import FLOATS
from bitport.tensor.sharded import is_sharded, own, sharded_like
from bitport.train.gradients import Gradients, gradients_of
from bitport.train.tensor import Rounding, TrainedTensor

ROUNDED_GRADIENTS = ("linear", "experts")
"""Kinds of weights whose gradients can be rounded: those of products that sum over the last axis of the input."""


def prepare_(
    model: nn.Module,
    recipe: str | Scheme | Recipe | Any,
    *,
    gradients: str | Gradients | None = None,
    calibrate: Iterable[Any] | Callable[[nn.Module], Any] | None = None,
) -> Plan:
    """From now on ``model`` computes with rounded weights and inputs, and trains the float ones: ``prepare_(model,
    "int4-g32")``. Make the optimizer afterwards: parameters are new objects. Returns what was chosen, and why.

    ``recipe``: as :func:`bitport.quantize_` takes it.
    ``gradients``: how the backward pass is rounded, a name of :data:`GRADIENTS` or a Gradients: training in low
    precision. None: gradients are not rounded: training for a quantized model.
    ``calibrate``: batches to run through the model, or a function that runs it; for schemes with a static input scale.
    """
    plugins.load()
    targets, rounded = find_targets(model), gradients_of(gradients)
    plan = Recipe.of(recipe).resolve(targets)
    by_name = {target.name: target for target in targets}
    chosen = [(by_name[choice.name], choice.scheme) for choice in plan.quantized if choice.scheme is not None]
    for target, scheme in chosen:
        _check(model, target, scheme, rounded)
    static = {target: scheme.act for target, scheme in chosen if scheme.static}
    if calibrate is None:
        refuse_static(plan.choices, "give calibrate=batches")
    scales = input_scales(model, static, calibrate) if static and calibrate is not None else {}
    made: dict[str, nn.Parameter] = {}
    for target, scheme in chosen:
        if target.storage not in made:
            param = _param(model, target)
            how = Rounding(scheme, rounded, target.kind, target.transposed)
            scale = scales.get(target.name)
            tensor = TrainedTensor(param.data, how, None if scale is None else scale.to(param.device))
            made[target.storage] = nn.Parameter(tensor, requires_grad=param.requires_grad)
        _set(model, target, made[target.storage])
    for module in model.modules():
        params = module.named_parameters(recurse=False, remove_duplicate=False)
        if names := [name for name, param in params if isinstance(param, TrainedTensor)]:
            module.register_state_dict_post_hook(_write_values)
            module.register_load_state_dict_post_hook(_StillPrepared(names))
    return plan


def convert_(model: nn.Module, *, measure: bool = True) -> Report:
    """Quantize the prepared weights of ``model`` in place to the numbers that it was trained with. ``measure``: work
    out the error of each weight for the report."""
    before = sum(param.nbytes for param in model.parameters())
    nearest = algorithm("rtn")
    done: dict[int, tuple[nn.Parameter, LayerReport]] = {}
    layers = []
    prepared = [*_prepared(model)]
    for target, param in prepared:
        check_finite(param.value, target)
    for target, param in prepared:
        tied = id(param) in done
        if not tied:
            choice = Choice(target.name, param.scheme, "trained in it")
            outcome = apply(nearest, param.value, target, param.scheme, None, param.act_scale, measure=measure)
            outcome = outcome.as_parameter()
            done[id(param)] = outcome.q, outcome.report(choice, param.nbytes)  # type: ignore[assignment]
        q, layer = done[id(param)]
        _set(model, target, q)
        layers.append(layer if not tied else _tied(layer, target.name))
    _forget(model)
    return Report(tuple(layers), before, sum(param.nbytes for param in model.parameters()), algorithm="rtn")


def release_(model: nn.Module) -> nn.Module:
    """Turn the prepared weights of ``model`` back into ordinary float parameters, in place; tied ones stay tied."""
    done: dict[int, nn.Parameter] = {}
    for target, param in _prepared(model):
        if id(param) not in done:
            done[id(param)] = nn.Parameter(param.value, requires_grad=param.requires_grad)
        _set(model, target, done[id(param)])
    _forget(model)
    return model


def _prepared(model: nn.Module) -> Iterator[tuple[Target, TrainedTensor]]:
    """Each name of each prepared weight; ArgumentError if there is none."""
    refuse_fsdp(model, "this", "load its full state_dict into a prepared model of one process, and use that")
    found = [(target, _param(model, target)) for target in find_targets(model)]
    prepared = [(target, param) for target, param in found if isinstance(param, TrainedTensor)]
    if not prepared:
        raise ArgumentError("no weight of this model is prepared; call prepare_(model, recipe) before training")
    yield from prepared


def _check(model: nn.Module, target: Target, scheme: Scheme, gradients: Gradients | None) -> None:
    param = _param(model, target)
    if is_sharded(param):
        raise ArgumentError(f"{target.name} is sharded; prepare_ the model first, then fully_shard it")
    if isinstance(param, TrainedTensor):
        raise ArgumentError(f"{target.name} is prepared for {param.scheme} already; release_(model) first")
    if isinstance(param, QTensor):
        raise ArgumentError(f"{target.name} is {param.scheme}; floats are trained: dequantize_(model) first")
    if param.dtype not in FLOATS:
        raise ArgumentError(f"{target.name} is {param.dtype}; cast the model to float32, bfloat16 or float16 first")
    if gradients is not None and target.kind not in ROUNDED_GRADIENTS:
        raise ArgumentError(
            f"{target.name} is of kind {target.kind!r}; gradients are rounded for {', '.join(ROUNDED_GRADIENTS)} only: "
            f"skip it by a rule, or leave out gradients="
        )
    if gradients is not None and not scheme.act:
        raise ArgumentError(
            f"{target.name}: {scheme} leaves inputs as they are, so no product is in low precision and rounded "
            f"gradients would only lose bits; choose a scheme that rounds inputs, or leave out gradients="
        )
    check_device(scheme, param.device)


def _param(model: nn.Module, target: Target) -> Any:
    return getattr(model.get_submodule(target.module), target.param)


def _set(model: nn.Module, target: Target, param: Any) -> None:
    setattr(model.get_submodule(target.module), target.param, param)


def _tied(layer: LayerReport, name: str) -> LayerReport:
    return dataclasses.replace(layer, name=name, tied=True)


def _write_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """After state_dict(): the float values, as a model that is not prepared has them. keep_vars=True keeps the
    parameters themselves."""
    for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
        kept = state.get(prefix + name)
        if kept is None or isinstance(kept, nn.Parameter):
            continue
        shard = own(kept)
        if isinstance(shard, TrainedTensor):
            state[prefix + name] = sharded_like(kept, shard.value)


class _StillPrepared:
    """After load_state_dict(): assign=True puts other parameters in the place of those in training."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __call__(self, module: nn.Module, keys: Any) -> None:
        for name in self.names:
            if not isinstance(own(getattr(module, name)), TrainedTensor):
                raise ArgumentError(
                    f"load_state_dict(.., assign=True) replaced {name}, which is in training, by an ordinary tensor: "
                    f"load with assign=False, or before prepare_()"
                )


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_post_hooks):
            for key, hook in list(hooks.items()):
                if hook is _write_values or isinstance(hook, _StillPrepared):
                    del hooks[key]
