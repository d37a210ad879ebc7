"""Quantization-aware training: prepare_ a float model, train it as usual, convert_ it to the quantized one.

``prepare_`` and ``convert_`` keep modules, names and shapes, and the state_dict() of a prepared model holds the float
values (bitport.train.state), so a checkpoint of the float model loads into the prepared one too.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bitport import plugins
from bitport.algorithms import RTN, Algorithm, AlgorithmLike
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.apply import apply
from bitport.algorithms.solving import Solving, check_data_used
from bitport.calibrate.inputs import Inputs
from bitport.calibrate.observe import input_scales
from bitport.errors import ArgumentError, shortened
from bitport.nn.fsdp import refuse_fsdp
from bitport.nn.quantize import check_finite
from bitport.nn.targets import check_model, find_targets, uncompiled
from bitport.numerics import FLOATS, Format, Quantized
from bitport.ops.device import check_device
from bitport.report import LayerReport, Report
from bitport.schemes import Choice, Plan, Recipe, RecipeLike, Scheme, Target
from bitport.schemes.plan import refuse_static, static_inputs
from bitport.schemes.target import by_storage
from bitport.tensor import QTensor
from bitport.tensor.parts import has_data
from bitport.tensor.sharded import is_sharded, model_nbytes, own
from bitport.train.fixed import Fixed, fixed_of, inside_cells
from bitport.train.gradients import Gradients, gradients_of
from bitport.train.scales import LEARNED, learns_scales, settle_scales_
from bitport.train.state import forget_, watch_state_
from bitport.train.tensor import PARTS, Rounding, TrainedTensor

ROUNDED_GRADIENTS = ("linear", "experts")
"""Kinds of weights that support rounded gradients: products that sum over the last axis of the input."""

OF_ONE_PROCESS = "load its full state_dict into a prepared model of one process, and use that"


def prepare_(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    algorithm: AlgorithmLike = "rtn",
    gradients: str | Gradients | None = None,
    calibrate: Iterable[Any] | Callable[[nn.Module], Any] | None = None,
    progress: bool | None = None,
) -> Plan:
    """Make ``model`` compute with rounded weights and inputs while training the float weights: ``prepare_(model,
    "int4-g32")``. Parameters remain the same objects, so that existing optimizers keep training them; a warning names
    those that could not be kept. Returns what was chosen, and why.

    ``recipe``: as for :func:`bitport.quantize_`.
    ``algorithm``: likewise; training starts from exactly the numbers that quantize_ would produce, and keeps the scales
    that the algorithm found. With "rtn", and for weights that the algorithm does not support, scales follow the range
    of the values.
    ``gradients``: how the backward pass is rounded, for training in low precision: a name in :data:`GRADIENTS` or a
    Gradients. None does not round gradients, for quantization-aware training.
    ``calibrate``: batches to run through the model, or a function that runs it; required by schemes with a static input
    scale and by algorithms that look at inputs.
    """
    plugins.load()
    model = uncompiled(model)
    targets, rounded, by = find_targets(model), gradients_of(gradients), algorithm_of(algorithm)
    rules = Recipe.of(recipe)
    check_data_used(by, rules, calibrate)
    plan = rules.resolve(targets)
    by_name = {target.name: target for target in targets}
    for choice in plan.quantized:
        if choice.scheme is not None:
            _check(model, by_name[choice.name], choice.scheme, rounded, by)
    starts = _starts(model, Solving(model, targets, plan.quantized, by, calibrate), progress)
    schemes = {choice.name: choice.scheme for choice in plan.choices if choice.scheme is not None}
    params = [_prepared_param(start, schemes[start.targets[0].name], rounded) for start in starts]
    _exchange_(model, [(start.targets, start.value, param) for start, param in zip(starts, params, strict=True)])
    watch_state_(model)
    return plan


class Start(NamedTuple):
    """What a weight starts training from. ``targets``: all its names; ``q``: the result of an algorithm, or None if its
    scales follow the values."""

    targets: Sequence[Target]
    value: Tensor
    act_scale: Tensor | None
    q: QTensor | None


def _starts(model: nn.Module, solving: Solving, progress: bool | None) -> list[Start]:
    if isinstance(solving.by, RTN):
        chosen = [solving.targets[choice.name] for choice in solving.chosen]
        scales = _scales(model, solving)
        return [
            Start(every, every[0].weight(model), scales.get(every[0].name), None)
            for every in by_storage(chosen).values()
        ]
    starts = []
    try:
        for _, targets, value, outcome in solving.run(measure=False, progress=progress):
            q = None if outcome.algorithm == RTN.name else outcome.q
            starts.append(Start(targets, value, outcome.q.act_scale, q))
    finally:
        for start in starts:  # undo the quantization that the inputs of later weights were measured with
            for target in start.targets:
                target.put(model, start.value)
    return starts


def _scales(model: nn.Module, solving: Solving) -> dict[str, Tensor]:
    if solving.calibrate is None:
        refuse_static(solving.chosen, "give calibrate=batches")
        return {}
    static = static_inputs(solving.chosen, solving.targets)
    return input_scales(model, static, solving.calibrate) if static else {}


def _prepared_param(start: Start, scheme: Scheme, gradients: Gradients | None) -> nn.Parameter:
    target = start.targets[0]
    value, fixed = start.value.detach(), None
    if start.q is not None:
        value, fixed = inside_cells(value, start.q, target), fixed_of(start.q)
    act_scale = None if start.act_scale is None else start.act_scale.to(value.device)
    tensor = TrainedTensor(value, Rounding(scheme, gradients, target.kind, target.transposed), act_scale, fixed=fixed)
    return nn.Parameter(tensor, requires_grad=start.value.requires_grad)


@dataclasses.dataclass(frozen=True)
class TrainedRounding:
    """Rounding with the fixed scales of the training."""

    fixed: Fixed
    name: ClassVar[str] = "trained"
    needs_inputs: ClassVar[bool] = False

    def refuses(self, fmt: Format, kind: str) -> str | None:
        return None

    def solve(self, w: Tensor, fmt: Format, inputs: Inputs | None = None) -> Quantized:
        return self.fixed.rounded(w, fmt)


def convert_(model: nn.Module, *, measure: bool = True) -> Report:
    """Quantize the prepared weights of ``model`` in place to the numbers that it was trained with, and merge learned
    scales into quantized weights. Existing optimizers still hold the float weights: delete them. The report also lists
    the weights that stay as they are.
    ``measure``: compute the error of each prepared weight for the report."""
    check_model(model)
    refuse_fsdp(model, "convert_", OF_ONE_PROCESS)
    before = model_nbytes(model)
    done: dict[int, tuple[nn.Parameter, LayerReport]] = {}
    prepared = [*_prepared(model, or_none=learns_scales(model))]
    for target, param in prepared:
        check_finite(param.value, target)
    layers = settle_scales_(model)
    for target, param in prepared:
        tied = id(param) in done
        if not tied:
            choice = Choice(target.name, param.scheme, "trained in it")
            by = RTN() if param.fixed is None else TrainedRounding(param.fixed)
            outcome = apply(
                by,
                param.value,
                target,
                param.scheme,
                act_scale=param.act_scale,
                measure=measure,
                pre_scale=param.pre_scale,
            ).as_parameter()
            done[id(param)] = outcome.q, outcome.report(choice, param.nbytes)  # type: ignore[assignment]
        q, layer = done[id(param)]
        target.put(model, q)
        layers.append(dataclasses.replace(layer, name=target.name, tied=tied))
    forget_(model)
    used = {layer.algorithm for layer in layers}
    name = next((name for name in (LEARNED, TrainedRounding.name) if name in used), RTN.name)
    return Report((*layers, *_left(model, layers)), before, model_nbytes(model), algorithm=name)


def _left(model: nn.Module, layers: Sequence[LayerReport]) -> Iterator[LayerReport]:
    """The weights that were neither trained nor had their scales learned: those that the recipe left, and what others
    have put in the place of a prepared weight, as transformers does when it resizes embeddings."""
    trained, storages = {layer.name for layer in layers}, set()
    for target in find_targets(model):
        if target.name not in trained:
            weight = target.weight(model)
            q, size, tied = own(weight), weight.nbytes, target.storage in storages
            scheme = str(q.scheme) if isinstance(q, QTensor) else None
            why = f"is {scheme} already" if scheme else "not prepared"
            yield LayerReport(target.name, scheme, why, size, size, tied=tied)
            storages.add(target.storage)


def release_(model: nn.Module) -> nn.Module:
    """Turn the prepared weights of ``model`` back into ordinary float parameters, in place. Tied weights stay tied, and
    existing optimizers keep training them, as after :func:`prepare_`."""
    check_model(model)
    refuse_fsdp(model, "release_", OF_ONE_PROCESS)
    prepared = [*_prepared(model)]
    weights = {target.storage: param for target, param in prepared}
    _exchange_(
        model,
        [
            (targets, weights[at], nn.Parameter(weights[at].value, requires_grad=weights[at].requires_grad))
            for at, targets in by_storage(target for target, _ in prepared).items()
        ],
    )
    forget_(model)
    return model


def _exchange_(model: nn.Module, weights: Sequence[tuple[Sequence[Target], Tensor, nn.Parameter]]) -> None:
    """Replace weights, given as (all names, old, new), keeping the parameter objects that optimizers refer to along
    with their attributes and hooks; torch refuses to swap tensors that a graph or a reducer holds."""
    replaced = []
    modules = {model.get_submodule(target.module) for targets, _, _ in weights for target in targets}
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:  # it holds its weights by weak references too, with which torch swaps none
        module._flat_weight_refs = []
    for targets, old, new in weights:
        noted = vars(old).keys() - vars(new).keys() - {"value", "rounding", *PARTS, "_is_param"}
        vars(new).update({name: vars(old)[name] for name in noted})
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if registered := getattr(old, hooks):
                setattr(new, hooks, registered)
        try:
            torch.utils.swap_tensors(old, new)
        except RuntimeError:
            replaced.append(targets[0].name)
            for target in targets:
                target.put(model, new)
    for module in recurrent:
        module._init_flat_weights()
    if replaced:
        warnings.warn(
            f"the parameters of {len(replaced)} weights ({shortened(replaced, 3)}) are new objects, since something "
            "else holds the old ones, such as an output with its graph or DistributedDataParallel: an optimizer made "
            "before does not train them. Make the optimizer, and whatever else holds parameters, afterwards; or "
            "delete first what holds them",
            stacklevel=3,
        )


def _prepared(model: nn.Module, *, or_none: bool = False) -> Iterator[tuple[Target, TrainedTensor]]:
    """Yield each name of each prepared weight; ArgumentError if there is none, unless ``or_none``."""
    found = [(target, target.weight(model)) for target in find_targets(model)]
    prepared = [(target, param) for target, param in found if isinstance(param, TrainedTensor)]
    if not prepared and not or_none:
        raise ArgumentError("no weight of this model is prepared; call prepare_(model, recipe) before training")
    yield from prepared


def _check(model: nn.Module, target: Target, scheme: Scheme, gradients: Gradients | None, by: Algorithm) -> None:
    param = target.weight(model)
    if is_sharded(param):
        raise ArgumentError(f"{target.name} is sharded; prepare_ the model first, then fully_shard it")
    if isinstance(param, TrainedTensor):
        raise ArgumentError(f"{target.name} is prepared for {param.scheme} already; release_(model) first")
    if isinstance(param, QTensor):
        raise ArgumentError(f"{target.name} is {param.scheme}; floats are trained: dequantize_(model) first")
    if param.dtype not in FLOATS:
        raise ArgumentError(f"{target.name} is {param.dtype}; cast the model to float32, bfloat16 or float16 first")
    if not isinstance(by, RTN) and not has_data(param):
        raise ArgumentError(f"{target.name} is on {param.device} and holds no numbers for {by.name}; load them first")
    if gradients is not None and target.kind not in ROUNDED_GRADIENTS:
        raise ArgumentError(
            f"{target.name} is of kind {target.kind!r}; gradients are rounded for {', '.join(ROUNDED_GRADIENTS)} only: "
            f"skip it by a rule, or leave out gradients="
        )
    if gradients is not None and not isinstance(by, RTN):
        raise ArgumentError(
            f"{target.name}: gradients= trains in low precision, where scales follow the values, and {by.name} finds "
            f"scales that are held: leave out one of gradients= and algorithm="
        )
    if gradients is not None and not scheme.act:
        raise ArgumentError(
            f"{target.name}: {scheme} leaves inputs as they are, so no product is in low precision and rounded "
            f"gradients would only lose bits; choose a scheme that rounds inputs, or leave out gradients="
        )
    check_device(scheme, param.device)
