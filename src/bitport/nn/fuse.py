"""Fusion of linear layers with the activation that is their only consumer into one op."""

from __future__ import annotations

import operator
import types
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

UNTRACEABLE = (fx.proxy.TraceError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError, KeyError)
"""What a forward that depends on values, or does not accept proxies, raises while traced."""


class _OneLevel(fx.Tracer):
    """Traces one level only: children are leaves."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def fuse_activations_(model: nn.Module) -> list[str]:
    """Fuse ``activation(linear(x))`` and ``activation(linear(x)) * y`` into one op, in place, in every module whose
    forward only calls its children and multiplies their results. Returns what was fused, e.g.
    ``"model.layers.0.mlp: silu(gate_proj) * .."``.

    Modules keep their class, children, parameters and hooks; only ``forward`` is replaced on the instance. Linear
    layers and activations with hooks of their own are left alone, and so are those whose device has no fused kernel.
    Hooks and adapters added later still run.
    """
    check_model(model)
    return [f"{name}: {what}" for name, module in list(model.named_modules()) for what in _fuse(module)]


def _fuse(module: nn.Module) -> list[str]:
    children = dict(module.named_children())
    if "forward" in vars(module) or isinstance(module, fx.GraphModule):
        return []
    if not any(map(_then, children.values())) or not any(map(_takes, children.values())):
        return []
    try:
        graph = _OneLevel().trace(module)
    except UNTRACEABLE:
        return []
    if not all(_is_known(node) for node in graph.nodes):
        return []
    done = [what for node in list(graph.nodes) if (what := _rewrite(graph, node, children))]
    if done:
        graph.lint()
        forward = type(fx.GraphModule(module, graph)).forward
        module.forward = types.MethodType(forward, module)
    return done


def _rewrite(graph: fx.Graph, node: fx.Node, children: dict[str, nn.Module]) -> str | None:
    """Fuse the activation ``node`` with its linear layer and a multiplication that follows; describe what was fused, or
    return None if ``node`` is something else."""
    then = _then(children.get(str(node.target))) if node.op == "call_module" else None
    source = node.args[0] if node.args else None
    if then is None or not isinstance(source, fx.Node) or source.op != "call_module" or len(source.users) != 1:
        return None
    layer = children.get(str(source.target))
    if not _takes(layer) or source.kwargs or len(source.args) != 1:
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
    return node.op in ("placeholder", "output", "call_module") or _is_product(node)


def _then(module: Any) -> str | None:
    name = ACTIVATIONS.get(type(module).__name__)
    if name is None or _watched(module):
        return None
    return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else name


def _takes(layer: Any) -> bool:
    if type(layer) is not nn.Linear or not isinstance(layer.weight, QTensor) or _watched(layer):
        return False
    op = "dyn_linear_then" if layer.weight.scheme.act else "linear_then"
    return bool(IMPLS.get((op, layer.weight.device.type)))


def _watched(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" in vars(module) or any(hooks) or _has_any_global_hook()
