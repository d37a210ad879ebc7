"""What the tensors of bitport do with a function of torch, or an aten op, that they are handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def function_for(table: Mapping[Any, Callable[..., Any]], func: Any) -> Callable[..., Any] | None:
    """What ``table`` has for the function. An op of a library, which need not be imported, is there by name."""
    return table.get(func) or table.get(getattr(func, "_qualified_op_name", None))


def handled(table: Mapping[Any, Callable[..., Any]], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What ``table`` makes of the op, or of the ops that it is made of; NotImplemented for any other."""
    handler = table.get(func)
    if handler is not None:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # torch wants the view of a normal tensor to be one
                return handler(func, *args, **kwargs)
        return handler(func, *args, **kwargs)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return func.decompose(*args, **kwargs)  # inference_mode hands over composite ops whole
    return NotImplemented
