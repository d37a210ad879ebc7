"""TrainedTensor: a trainable float weight that products see rounded to the numbers it will be quantized to.

    value       the float weight, which the optimizer updates and training checkpoints hold; or a QTensor whose scales
                are learned, which products use directly (bitport.train.scales)
    act_scale   the fixed scale of a static activation, or None
    scale, zero, scale2, pre_scale    fixed results of an algorithm (bitport.train.fixed); None if the scales follow the
                value
    rounding    the scheme, and how the backward pass is rounded
    dtype       that of ``value``, except for a weight that was cast on its way into a product, as by autocast: rounding
                still applies to the uncast value, because the quantized weight is not affected by a cast either. The
                value is cast when it is accessed itself.

The module that holds it, its name and its shape are unchanged. torch operations fall into four groups:

    products (linear, matmul, convolution, embedding, grouped products)     use the rounded numbers
    products of other libraries (custom ops with a gradient)                are an error
    storage (detach, clone, to, slices at block boundaries)                 return another TrainedTensor
    arithmetic under no_grad (optimizers, averages), or with .data          uses ``value``

Arithmetic while gradients are recorded is an error, as it is for the quantized weight: it would use other numbers than
the products. Products without a rounded form (einsum) are always an error. ``floats()`` returns the value, for example
for a penalty on it.

The gradient is a straight-through estimate: d rounded(w) / dw = 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bitport.errors import ArgumentError
from bitport.schemes import Scheme
from bitport.tensor.cache_key import source_key
from bitport.tensor.dispatch import function_for, handled, not_compiled_alone
from bitport.tensor.methods import SET_DATA
from bitport.tensor.qtensor import QTensor, rows_of
from bitport.train.fixed import Fixed
from bitport.train.gradients import Gradients

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""torch functions that compute with the rounded numbers; filled by bitport.train.functions."""

ATEN: dict[Any, Callable[..., Any]] = {}
"""aten ops that store, slice or multiply; filled by bitport.train.aten. All others operate on ``value``."""


PARTS = ("act_scale", *Fixed._fields)
"""Attributes besides the value; each may be None."""

OWN = ("aten", "prims", "_c10d_functional")
"""Namespaces of torch's own ops, of which the products are in the tables above."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """``kind``: that of the weight (bitport.schemes.KINDS); ``transposed``: it is stored as [.., K, N]."""

    scheme: Scheme
    gradients: Gradients | None = None
    kind: str = "linear"
    transposed: bool = False
    cut: bool = False
    """A shard that is not aligned to blocks: it can be stored and updated, but not rounded on its own."""
    gathered: bool = False
    """``value`` is memory that is refilled for each use, in its own dtype, regardless of the dtype of the tensor."""


class TrainedTensor(Tensor):
    """A parameter in training: it holds its float ``value``, which the optimizer updates, and products use it as it is
    rounded. :func:`prepare_` makes these."""

    value: Tensor
    act_scale: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    scale2: Tensor | None
    pre_scale: Tensor | None
    rounding: Rounding
    fsdp_pre_all_gather: Callable[..., Any]
    fsdp_post_all_gather: Callable[..., Any]

    @staticmethod
    def __new__(
        cls,
        value: Tensor,
        rounding: Rounding,
        act_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        fixed: Fixed | None = None,
    ) -> TrainedTensor:
        self = Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=dtype or value.dtype,
            device=value.device,
            requires_grad=False,
        )
        self.value, self.rounding, self.act_scale = value, rounding, act_scale
        self.hold(fixed)
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def scheme(self) -> Scheme:
        """The scheme that it is rounded to."""
        return self.rounding.scheme

    @property
    def fixed(self) -> Fixed | None:
        """The fixed scales that an algorithm found; None if the scales follow the values."""
        return None if self.scale is None else Fixed(self.scale, self.zero, self.scale2, self.pre_scale)

    @property
    def quantized(self) -> QTensor | None:
        """``value`` if it is already quantized, else None."""
        return self.value if isinstance(self.value, QTensor) else None

    def hold(self, fixed: Fixed | None) -> None:
        """Set or remove the fixed scales that it is rounded with."""
        self.scale, self.zero, self.scale2, self.pre_scale = fixed or (None,) * len(Fixed._fields)

    @property
    def recorded(self) -> bool:
        """Whether it is used as part of the model, rather than by an optimizer or as data taken from it."""
        return torch.is_grad_enabled() and _of_model(self)

    def rows(self) -> Tensor:
        """``value`` as the matrix [.., N, K] that is rounded."""
        if self.rounding.cut:
            raise ArgumentError(
                f"{self!r} is a shard, which is not rounded alone, or another view: use the whole weight"
            )
        rows = rows_of(self.value, self.rounding.kind, self.rounding.transposed)
        return rows if self.pre_scale is None else rows / self.pre_scale

    def with_value(self, value: Tensor, fixed: Fixed | None = None, **changes: Any) -> TrainedTensor:
        """``fixed``: the scales of the matrix ``value``; None: unchanged."""
        rounding = dataclasses.replace(self.rounding, **changes) if changes else self.rounding
        return TrainedTensor(value, rounding, self.act_scale, self.dtype, fixed or self.fixed)

    def floats(self) -> Tensor:
        """Return ``value`` for arithmetic whose gradient flows back to this tensor."""
        return _Floats.apply(self)

    def map_parts(self, fn: Callable[[Tensor], Tensor]) -> TrainedTensor:
        """A copy with ``fn`` applied to the value and to all other parts."""
        return self.map_beside(fn, fn(self.value), self.dtype)

    def map_beside(self, fn: Callable[[Tensor], Tensor], value: Tensor, dtype: torch.dtype) -> TrainedTensor:
        """A copy holding ``value``, with ``fn`` applied to the other parts."""
        act_scale = None if self.act_scale is None else fn(self.act_scale)
        fixed = self.fixed
        return TrainedTensor(value, self.rounding, act_scale, dtype, None if fixed is None else fixed.map(fn))

    # -- torch's protocols ---------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        beside = [name for name in PARTS if getattr(self, name) is not None]
        return ["value", *beside], (self.rounding, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> TrainedTensor:
        rounding, dtype = context
        fixed = Fixed(*(inner.get(name) for name in Fixed._fields)) if "scale" in inner else None  # type: ignore[arg-type]
        return cls(inner["value"], rounding, inner.get("act_scale"), dtype, fixed)

    def _stable_hash_for_caching(self) -> str:
        names, context = self.__tensor_flatten__()
        parts = [(name, part.dtype, [*part.shape]) for name in names for part in (getattr(self, name),)]
        return f"bitport.TrainedTensor {source_key()} {parts} {context}"

    @classmethod
    @not_compiled_alone
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = function_for(FUNCTIONS, func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = handled(ATEN, func, args, kwargs or {})
        if made is not NotImplemented:
            return made
        if (torch.is_grad_enabled() or _is_foreign_product(func)) and any(
            isinstance(arg, TrainedTensor) and _of_model(arg) for arg in tree_leaves((args, kwargs))
        ):
            raise outside_of_products(func)
        result = func(*tree_map(value_of, args), **tree_map(value_of, kwargs or {}))
        if not func._schema.is_mutable:
            return result
        returns = func._schema.returns  # in-place and out= ops return the argument itself
        written = (kwargs or {}).get("out", args[0])
        return written if len(returns) == 1 and returns[0].alias_info is not None else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = [*self.value.shape]
        return f"TrainedTensor({shape}, {self.scheme}, value={self.value.dtype} on {self.value.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedTensor:
        if id(self) not in memo:
            memo[id(self)] = _like(self, self.map_parts(torch.clone))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parameter = isinstance(self, torch.nn.Parameter)
        value, fixed = value_of(self), None if self.fixed is None else self.fixed.as_bytes()
        return _rebuild, (value, self.rounding, self.act_scale, fixed, parameter, self.requires_grad)

    def share_memory_(self) -> TrainedTensor:
        self.map_parts(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return self.value.is_shared()


class _Floats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: TrainedTensor) -> Tensor:
        return value_of(w).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _of_model(w: TrainedTensor) -> bool:
    """Whether it is the weight itself, rather than data taken from it."""
    return w.requires_grad or isinstance(w, torch.nn.Parameter)


def _is_foreign_product(func: Any) -> bool:
    """Whether it is an op of another library that a model may be made of: it has a gradient and writes nothing. Its
    kernel is called without recording gradients even where the model is trained."""
    autograd = torch._C.DispatchKey.Autograd
    return (
        func.namespace not in OWN and not func._schema.is_mutable and bool(func.has_kernel_for_dispatch_key(autograd))
    )


def outside_of_products(func: Any) -> ArgumentError:
    return ArgumentError(
        f"{func} on a weight in training, which can only be used in products (linear, embedding, convolution, matmul), "
        "like the quantized weight that it becomes. For a penalty on its values take weight.floats(); to leave this "
        "weight as it is, a rule 'skip'"
    )


def value_of(tensor: Any) -> Any:
    """The float tensor of a TrainedTensor, in the dtype that it was cast to; anything else unchanged."""
    if not isinstance(tensor, TrainedTensor):
        return tensor
    if tensor.value.dtype != tensor.dtype:
        if tensor.rounding.gathered:
            return tensor.value.to(tensor.dtype)
        tensor.value = tensor.value.to(tensor.dtype)
        tensor.pre_scale = None if tensor.pre_scale is None else tensor.pre_scale.to(tensor.dtype)
    return tensor.value


def _like(source: TrainedTensor, made: TrainedTensor) -> TrainedTensor:
    if isinstance(source, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=source.requires_grad)  # type: ignore[return-value]
    if source.is_leaf:
        made.requires_grad_(source.requires_grad)
    return made


def _rebuild(
    value: Tensor,
    rounding: Rounding,
    act_scale: Tensor | None,
    fixed: Fixed | None,
    parameter: bool,
    requires_grad: bool,
) -> TrainedTensor:
    fixed = None if fixed is None else fixed.from_bytes(rounding.scheme.weight)
    made = TrainedTensor(value, rounding, act_scale, fixed=fixed)
    if parameter:
        return torch.nn.Parameter(made, requires_grad=requires_grad)  # type: ignore[return-value]
    made.requires_grad_(requires_grad)
    return made


def _set_data(self: Tensor, value: Tensor) -> None:
    """``param.data = other``, including the parts, which torch's own setter would not update."""
    assert isinstance(self, TrainedTensor)
    if not isinstance(value, TrainedTensor):
        value = TrainedTensor(value, self.rounding, self.act_scale, fixed=self.fixed)
    with torch._C.DisableTorchFunctionSubclass():
        SET_DATA(self, value)
    self.value, self.act_scale, self.rounding = value_of(value), value.act_scale, value.rounding
    self.hold(value.fixed)


FUNCTIONS[SET_DATA] = _set_data
