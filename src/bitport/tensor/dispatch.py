"""Dispatch of torch functions and aten ops for bitport's tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo import eval_frame

Adding = Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]


def adding_to(table: dict[Any, Callable[..., Any]]) -> Adding:
    """Make a decorator ``implements(op, ...)`` that registers a function for these ops in ``table``."""

    def implements(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            table.update(dict.fromkeys(ops, fn))
            return fn

        return add

    return implements


def not_compiled_alone(function: Callable[..., Any], nor_what_it_calls: bool = False) -> Callable[..., Any]:
    """Let torch.compile trace ``function`` as part of what calls it only. In code that it leaves as it is, as that of
    torch.nn, it compiles each Python function by itself.

    For ``__torch_function__`` this goes wrong: torch finds the compiled code by the id of the torch function, and a
    method that is read from a tensor has none of its own for long, so that a weight's ``device`` could be its dtype. A
    recurrent layer would become a program of all its steps, and a new one for each number of steps."""
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if nor_what_it_calls else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def function_for(table: Mapping[Any, Callable[..., Any]], func: Any) -> Callable[..., Any] | None:
    """The handler of ``func`` in ``table``. Ops of other libraries are keyed by name, without importing them."""
    return table.get(func) or table.get(getattr(func, "_qualified_op_name", None))


def handled(table: Mapping[Any, Callable[..., Any]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the op by its handler in ``table``, or decompose a composite op; NotImplemented for any other."""
    handler = table.get(func)
    if handler is not None:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # torch requires a view of a normal tensor to be a normal tensor
                return handler(func, *args, **kwargs)
        return handler(func, *args, **kwargs)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)  # inference_mode does not decompose composite ops
    return NotImplemented
