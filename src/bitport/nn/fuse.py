"""Fusion of linear layers with the activation that is their only consumer into one op."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from bitport.nn.targets import check_model
from bitport.ops.product import linear_then
from bitport.ops.select import IMPLS
from bitport.tensor import QTensor

ACTIVATIONS = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
"""Class name of an activation module (torch or transformers) -> what it computes. torch's GELU may also be by tanh,
by its attribute ``approximate``."""

UNTRACEABLE = (TypeError, AttributeError, ValueError, RuntimeError, LookupError, AssertionError)
"""What a forward that depends on values, or does not accept proxies, raises while traced; fx.proxy.TraceError is a
ValueError."""


class Fused(list[str]):
    """What was fused, one line each."""

    left: list[str]
    """Which other modules have a quantized layer and an activation, and why nothing in them was fused."""


class _OneLevel(fx.Tracer):
    """Traces a call with the parameters without default, and one level only: children are leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: dict[str, Any] | tuple[Any, ...] | None = None
    ) -> tuple[Any, list[Any]]:
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in _required(root_fn))]


def fuse_activations_(model: nn.Module) -> Fused:
    """Fuse ``activation(linear(x))`` and ``activation(linear(x)) * y`` into one op, in place, in every module whose
    forward only calls its children and multiplies their results. Returns what was fused, e.g.
    ``"model.layers.0.mlp: silu(gate_proj) * .."``, with the reasons for what was not as ``.left``.

    Modules keep their class, children, parameters and hooks; only ``forward`` is replaced on the instance. Linear
    layers and activations with hooks of their own are left alone, and so are those whose device has no fused kernel.
    Hooks and adapters added later still run.

    What a forward does is found out by calling it with placeholders for the parameters that have no default. So calls
    that give more, or anything but tensors, run the forward as it was, and modules that do something else in training
    are left alone. A forward that branches on other attributes, or on the type of a tensor, keeps to the branch that it
    takes now: call this after the model is set up.
    """
    check_model(model)
    fused = Fused()
    fused.left = []
    for name, module in list(model.named_modules()):
        try:
            fused += [f"{name}: {what}" for what in _fuse(module)]
        except _LeftError as why:
            fused.left.append(f"{name}: {why}")
    return fused


class _LeftError(Exception):
    """Why nothing in a module is fused."""


def _fuse(module: nn.Module) -> list[str]:
    children = dict(module.named_children())
    layers = {name: child for name, child in children.items() if isinstance(getattr(child, "weight", None), QTensor)}
    activations = {name: child for name, child in children.items() if type(child).__name__ in ACTIVATIONS}
    if not layers or not activations:
        return []
    if "forward" in vars(module) or isinstance(module, fx.GraphModule):
        raise _LeftError("its forward was replaced or generated before")
    if not any(map(_then, activations.values())):
        raise _LeftError(f"{', '.join(activations)}: hooks or a forward of its own")
    unfit = [f"{name}: {why}" for name, layer in layers.items() if (why := _unfit(layer))]
    if len(unfit) == len(layers):
        raise _LeftError("; ".join(unfit))
    graph = _traced(module)
    done = [what for node in list(graph.nodes) if (what := _rewrite(graph, node, children))]
    if not done:
        raise _LeftError("; ".join(["no activation alone takes the result of a layer that can be fused", *unfit]))
    graph.lint()
    original = type(module).forward
    module.forward = types.MethodType(_either(type(fx.GraphModule(module, graph)).forward, original), module)
    return done


def _traced(module: nn.Module) -> fx.Graph:
    """The graph of ``module``, the same in training and evaluation."""
    modes = {each: each.training for each in module.modules()}
    graphs = []
    try:
        for training in (True, False):
            for each in modes:
                each.training = training
            graphs.append(_OneLevel().trace(module))
    except UNTRACEABLE as error:
        raise _LeftError(f"its forward cannot be traced: {type(error).__name__}: {error}") from error
    finally:
        for each, training in modes.items():
            each.training = training
    if strange := [node for node in graphs[0].nodes if not _is_known(node)]:
        raise _LeftError(
            f"its forward does not only call children and multiply their results: {strange[0].format_node()}"
        )
    if str(graphs[0]) != str(graphs[1]):
        raise _LeftError("its forward does something else in training")
    return graphs[0]


def _required(forward: Callable[..., Any]) -> list[str]:
    """The names of the parameters after ``self`` that a call has to give."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *parameters = inspect.signature(forward).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind not in several]


def _either(fused: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``fused`` for calls like the traced one: tensors for the required parameters, and no others."""
    required = _required(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        alike = len(args) + len(kwargs) == len(required) and all(name in required for name in kwargs)
        if alike and all(isinstance(given, Tensor) for given in (*args, *kwargs.values())):
            return fused(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _rewrite(graph: fx.Graph, node: fx.Node, children: dict[str, nn.Module]) -> str | None:
    """Fuse the activation ``node`` with its linear layer and a multiplication that follows; describe what was fused, or
    return None if ``node`` is something else."""
    then = _then(children.get(str(node.target))) if node.op == "call_module" else None
    source = node.args[0] if node.args else None
    if then is None or not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return None
    layer = children.get(str(source.target))
    if _unfit(layer) or source.kwargs or len(source.args) != 1:
        return None
    last, times = node, None
    (user,) = node.users if len(node.users) == 1 else (None,)
    if user is not None and _is_product(user):
        others = [arg for arg in user.args if arg is not node]
        if len(others) == 1 and isinstance(others[0], fx.Node):
            last, times = user, others[0]
    with graph.inserting_before(last):
        both = (graph.get_attr(str(source.target)), graph.get_attr(str(node.target)))
        fused = graph.call_function(_fused, (source.args[0], *both, then, times))
    last.replace_all_uses_with(fused)
    for old in dict.fromkeys((last, node, source)):
        graph.erase_node(old)
    return f"{then}({source.target})" + (" * .." if times is not None else "")


def _fused(x: Tensor, layer: nn.Module, activation: nn.Module, then: str, times: Tensor | None) -> Tensor:
    """The fused op, or the modules one by one if an adapter, a hook or another activation was installed since."""
    if type(layer) is nn.Linear and not _watched(layer) and _then(activation) == then:
        return linear_then(x, layer.weight, layer.bias, then, times)
    y = activation(layer(x))
    return y if times is None else y * times


def _is_product(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (operator.mul, torch.mul) and not node.kwargs


def _is_known(node: fx.Node) -> bool:
    """Whether it is a call or product of results. (A number may be the value of an attribute, which can change.)"""
    if node.op in ("placeholder", "output"):
        return True
    results = all(isinstance(each, fx.Node) for each in (*node.args, *node.kwargs.values()))
    return results and (node.op == "call_module" or _is_product(node))


def _then(module: Any) -> str | None:
    name = ACTIVATIONS.get(type(module).__name__)
    if name is None or _watched(module):
        return None
    return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else name


def _unfit(layer: Any) -> str:
    """Why ``layer`` is not fused with what follows, or ""."""
    if type(layer) is not nn.Linear or not isinstance(layer.weight, QTensor):
        return f"{type(layer).__name__}, not nn.Linear with a quantized weight"
    if _watched(layer):
        return "hooks or a forward of its own"
    op, device = "dyn_linear_then" if layer.weight.scheme.act else "linear_then", layer.weight.device.type
    return "" if IMPLS.get((op, device)) else f"no fused kernel on {device}"


def _watched(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" in vars(module) or any(hooks) or _has_any_global_hook()
