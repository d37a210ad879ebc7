"""The top-level functions plan, quantize_, dequantize_ and explain. Wiring only, no maths."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bitport import plugins
from bitport.algorithms import Algorithm, AlgorithmLike, expression
from bitport.algorithms import algorithm as algorithm_of
from bitport.algorithms.solving import Solving, check_data_used
from bitport.arguments import counts_of
from bitport.errors import ArgumentError, shortened
from bitport.nn.fsdp import refuse_fsdp
from bitport.nn.offloaded import refuse_offloaded
from bitport.nn.quantize import check_finite
from bitport.nn.targets import check_model, find_targets, uncompiled
from bitport.numerics import FLOATS
from bitport.ops.device import check_device, check_present
from bitport.report import LayerReport, Report
from bitport.report.explain import Explanation, explain_layer
from bitport.report.quantized import listed
from bitport.schemes import Choice, Plan, Recipe, RecipeLike, Target
from bitport.tensor import QTensor
from bitport.tensor.sharded import is_quantized, is_sharded, model_nbytes, nbytes_of, own, sharded_like, whole


def plan(model: nn.Module, recipe: RecipeLike) -> Plan:
    """What :func:`quantize_` would do with each weight of ``model``, and why; nothing is changed or computed, and the
    model may be on the meta device. The plan can be given to :func:`quantize_` instead of the recipe."""
    model = uncompiled(model)
    targets = {target.name: target for target in find_targets(model)}
    choices = Recipe.of(recipe).resolve(list(targets.values())).choices
    return Plan(tuple(_left_if_quantized(choice, targets[choice.name].weight(model)) for choice in choices))


def quantize_(
    model: nn.Module,
    recipe: RecipeLike,
    *,
    algorithm: AlgorithmLike = "rtn",
    calibrate: Iterable[Any] | Callable[[nn.Module], Any] | None = None,
    device: torch.device | str | int | None = None,
    measure: bool = True,
    progress: bool | None = None,
) -> Report:
    """Quantize the weights of ``model`` in place: ``quantize_(model, "int4")``.

    ``recipe``: which weights get which scheme: a scheme or its name (for all linear layers, attention projections and
    experts), a dict ``{pattern: scheme}`` over module names, of which the first match decides (``{"*": "int4"}`` covers
    embeddings, convolutions and recurrent layers too), or anything else that :meth:`Recipe.of` takes.
    ``algorithm``: how weights are rounded, by name or as an object of bitport.algorithms: "rtn" (to nearest), "clip",
    "hqq", "gptq", "signround". Weights that it cannot treat are rounded to nearest, and the report says so. Transforms,
    which change the model but not what it computes, may come first: "awq", "awq+gptq", ("awq", GPTQ()).
    ``calibrate``: batches to run through the model (each a tensor, or a tuple or dict of its arguments), or a
    function that runs it; for schemes with a static input scale and algorithms that look at inputs, an error without
    either. The model runs in eval mode. Padding counts as any other input: leave it out.
    ``device``: move the model there layer by layer, and quantize it there.
    ``measure``: compute the error of each weight for the report.
    """
    plugins.load()
    model, by, rules = uncompiled(model), algorithm_of(algorithm), Recipe.of(recipe)
    check_data_used(by, rules, calibrate)
    if device is not None:
        check_present(device)
    check_model(model)
    _refuse_learned(model)
    targets = find_targets(model)
    plan = rules.resolve(targets)
    by_name = {target.name: target for target in targets}
    chosen = [choice for choice in plan.quantized if not is_quantized(by_name[choice.name].weight(model))]
    _warn_of_others(model, by_name, plan.quantized)
    if chosen:
        refuse_fsdp(model, "quantize_")
    _check_sharded([choice for choice in chosen if is_sharded(by_name[choice.name].weight(model))], by, device)
    _check(model, by_name, chosen, device)
    solving = Solving(model, targets, chosen, by, calibrate, device)
    before = model_nbytes(model)
    told = {
        done.targets[0].storage: done.outcome.report(done.choice, done.value.nbytes)
        for done in solving.run(measure=measure, progress=progress)
    }
    by_name = solving.targets
    storages = {name: target.storage for name, target in by_name.items()}
    if device is not None:
        model.to(device)  # moves whatever is not quantized; quantized weights are already there

    def left(choice: Choice) -> LayerReport:
        weight = by_name[choice.name].weight(model)
        q, size = own(weight), nbytes_of(weight)
        if isinstance(q, QTensor):
            asked = "" if choice.scheme in (None, q.scheme) else f", not {choice.scheme}"
            return LayerReport(choice.name, str(q.scheme), f"is {q.scheme} already{asked}", size, size)
        if choice.name in solving.untied:
            since = f"{by.name} has untied it since: call quantize_ again to quantize it by itself"
            choice = dataclasses.replace(choice, reason=f"{choice.reason}; {since}")
        return LayerReport.kept(choice, size, size)

    return Report(listed(plan, storages, told, left), before, model_nbytes(model), rules.to_json(), expression(by))


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Dequantize every quantized parameter in place; tied parameters stay tied, sharded ones sharded."""
    check_model(model)
    refuse_fsdp(model, "dequantize_")
    refuse_offloaded(model)
    _refuse_learned(model)
    _refuse_trained(model)
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            q = own(param)
            if isinstance(q, QTensor):
                if id(param) not in done:
                    value = sharded_like(param, q.dequantize(dtype))
                    done[id(param)] = nn.Parameter(value, requires_grad=False)
                setattr(module, name, done[id(param)])
    return model


def explain(model: nn.Module, rows: int | Sequence[int] = (1, 64, 1024)) -> Explanation:
    """For each quantized weight: scheme, layout, and for each number of input rows (tokens at once) the kernel that
    will run and why each faster one is refused. For a sharded weight: for the shard of this process."""
    plugins.load()
    model, counts = uncompiled(model), counts_of(rows)
    check_model(model)
    if any(is_sharded(param) for param in model.parameters()):
        refuse_fsdp(model, "explain", "it multiplies with gathered weights: call unshard() of its modules first")
    targets = {target.name: target for target in find_targets(model)}
    learned = _learned(model)
    layers = []
    for name, param in model.named_parameters():
        q = own(param)
        if not isinstance(q, QTensor):
            continue
        if id(param) in learned:  # layers compute with changed scales, in the layout of the device
            name, kind = learned[id(param)]
            layers.append(explain_layer(name, kind, q.to_device_layout(), counts))
        else:
            target = targets.get(name, Target("", name, "linear", tuple(q.shape), ""))
            layers.append(explain_layer(name, target.kind, q, counts, target.note))
    if not layers:
        _refuse_trained(model)
    return Explanation(tuple(layers), counts)


def _learned(model: nn.Module) -> dict[int, tuple[str, str]]:
    if not any(isinstance(module, ParametrizationList) for module in model.modules()):
        return {}
    from bitport.train.scales import learned_weights  # lazy: only training needs this import

    return learned_weights(model)


def _refuse_learned(model: nn.Module) -> None:
    if learned := sorted(name for name, _ in _learned(model).values()):
        scales = f"the scales of {shortened(learned, 3)}"
        raise ArgumentError(f"{scales} are being learned: call bitport.train.convert_(model) first")


def _left_if_quantized(choice: Choice, weight: Tensor) -> Choice:
    q = own(weight)
    return Choice(choice.name, None, f"is {q.scheme} already") if isinstance(q, QTensor) else choice


def _refuse_trained(model: nn.Module) -> None:
    from bitport.train import TrainedTensor  # lazy: only training needs this import

    for name, param in model.named_parameters():
        if isinstance(own(param), TrainedTensor):
            raise ArgumentError(
                f"{name} is in training, which is not quantized yet: bitport.train.convert_(model) quantizes it, and "
                f"release_(model) makes it a float one"
            )


def _check(
    model: nn.Module, targets: dict[str, Target], chosen: list[Choice], device: torch.device | str | int | None
) -> None:
    """Check, before anything changes, that each weight is finite and its device can hold and compute its scheme."""
    pairs = set()
    for choice in chosen:
        weight = targets[choice.name].weight(model)
        if is_traceable_wrapper_subclass(weight) and not is_sharded(weight):
            raise ArgumentError(
                f"{choice.name} is a {type(weight).__name__}, not a float tensor; a model prepared by bitport.train is "
                f"quantized by its convert_(), or made a float one again by release_()"
            )
        if weight.dtype not in FLOATS:
            raise ArgumentError(
                f"{choice.name} is {weight.dtype}; cast the model to float32, bfloat16 or float16 first"
            )
        check_finite(whole(weight), targets[choice.name])
        where = torch.device(device) if device is not None else weight.device
        pairs.add((choice.scheme, where))
    for scheme, where in pairs:
        if scheme is not None:
            check_device(scheme, where)


def _warn_of_others(model: nn.Module, targets: dict[str, Target], asked: Sequence[Choice]) -> None:
    """Warn if a weight that is already quantized has another scheme than asked for."""
    held = [(choice, own(targets[choice.name].weight(model))) for choice in asked]
    other = [
        f"{choice.name} ({q.scheme}, not {choice.scheme})"
        for choice, q in held
        if isinstance(q, QTensor) and q.scheme != choice.scheme
    ]
    if other:
        warnings.warn(
            f"{len(other)} weights are quantized already, and stay as they are: {shortened(other, 3)}. "
            f"dequantize_(model) makes them floats, to quantize again; a rule 'skip' for them leaves out this warning",
            stacklevel=3,
        )


def _check_sharded(sharded: list[Choice], by: Algorithm, device: torch.device | str | int | None) -> None:
    """Refuse arguments that sharded weights do not support. Each process quantizes the gathered weight, so that the
    result equals that of the unsharded model."""
    if not sharded:
        return
    named = f"{len(sharded)} weights are sharded ({sharded[0].name}, ...)"
    if by.needs_inputs or any(choice.static for choice in sharded):
        raise ArgumentError(f"{named}; calibration needs the model in one piece: quantize_ first, then shard it")
    if device is not None:
        raise ArgumentError(f"{named}; they stay on the devices of their mesh: leave out device={device!r}")
