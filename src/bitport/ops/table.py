"""The op table: schema, fake kernel, generic kernel, gradient, samples and error budget of every op of bitport.

Declaring an op registers it with torch in the ``bitport`` namespace:

* ``bitport::<op>`` runs the kernel that :mod:`bitport.ops.select` chooses among those registered for the device, with
  the generic kernel as the last resort, unless the device has its own kernel at PyTorch's dispatcher.
* ``bitport::<op>.choose`` (an overload with the same arguments, each str as the ints of its bytes) runs that choice
  even where a native kernel is at the dispatcher: native kernels fall back to it for calls they do not support.
* ``bitport::<op>.generic`` (an overload with the same arguments) is always the generic kernel: the specification.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bitport.errors import ArgumentError
from bitport.numerics import sqnr

LIB = torch.library.Library("bitport", "FRAGMENT")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments to try an op with, the expected float64 result, and the least acceptable SQNR in dB. An infinite
    budget: all bits must agree, and ``expected`` gives the :func:`bits`."""

    name: str
    args: tuple[Any, ...]
    expected: Callable[[], Tensor]
    budget: float

    def judged(self, result: Tensor | list[Tensor]) -> tuple[float, float]:
        """(SQNR of ``result``, margin over the budget) in dB; both NaN if NaNs are not where they should be."""
        wanted = self.expected()
        if self.budget == math.inf or isinstance(result, list):
            level = math.inf if torch.equal(bits(result), wanted) else -math.inf
            return level, level
        got = result.cpu().reshape(wanted.shape)
        numbers = ~wanted.isnan()
        if not torch.equal(numbers, ~got.isnan()):
            return math.nan, math.nan
        level = float(sqnr(wanted[numbers], got[numbers])) if numbers.any() else math.inf
        return level, level - self.budget


def bits(result: Tensor | list[Tensor]) -> Tensor:
    """All bytes of a result, its parts concatenated, as float64 on the CPU. Every NaN of more than 8 bits counts as the
    same: torch itself rounds one NaN to different bits in vectors and in single numbers."""
    parts = result if isinstance(result, list) else [result]
    return torch.cat([_one_nan(part.cpu()).contiguous().flatten().view(torch.uint8) for part in parts]).double()


def _one_nan(part: Tensor) -> Tensor:
    wide = part.is_floating_point() and part.dtype.itemsize > 1
    return part.masked_fill(part.isnan(), math.nan) if wide else part


@dataclasses.dataclass(frozen=True)
class Op:
    """An op of bitport, declared once: its schema, its meaning, and samples to test it with."""

    name: str
    schema: str
    check: Callable[..., None]
    """Raise ArgumentError unless the arguments fit together, without reading data. Runs before every kernel, even fake
    ones."""
    generic: Callable[..., Any]
    """The specification: readable, any device, standard torch ops."""
    fake: Callable[..., Any]
    """Shape, dtype and device of the result."""
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]]
    backward: Callable[..., Tensor] | None = None
    """(grad, *args) -> gradient of the first argument; rounding of the input is differentiated as straight-through."""
    bias_at: int | None = None
    """Index of the bias argument, whose gradient is the sum over rows."""
    rows_apart: Callable[..., bool] = lambda *args: True
    """(*args) -> whether each row of the result depends on that row only; False if a scale is measured over all rows.
    """
    decomposition: Callable[..., Any] | None = None
    """A traceable form, if the generic kernel reads data or calls another op; None means the generic kernel."""
    leading: bool = False
    """Whether the first argument, which has no gradient, may have any number of leading dimensions (for vmap)."""
    composed: bool = False
    """Whether the generic kernel is composed of differentiable ops, which provide its gradients and transforms."""

    @functools.cached_property
    def arguments(self) -> dict[str, str]:
        """The type of each argument, by its name."""
        each = self.schema[1 : self.schema.index(")")].split(", ")
        return {name.partition("=")[0]: kind for kind, name in (argument.split() for argument in each)}

    @property
    def overload(self) -> Any:
        """The callable ``torch.ops.bitport.NAME.default``."""
        return getattr(torch.ops.bitport, self.name).default


OPS: dict[str, Op] = {}
"""Every op, by name."""


def as_given(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with autocast disabled inside. Autocast has already cast the input, and would round intermediate
    results and the dequantized weight once more."""

    def run(*args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return kernel(*args)
        with torch._C._DisableAutocast():
            return kernel(*args)

    return run


def declare(op: Op, run: Callable[..., Any]) -> None:
    """Register ``op`` with torch; ``run`` chooses among its kernels."""
    op = OPS[op.name] = dataclasses.replace(op, check=_of_tensors(op))

    def generic(*args: Any) -> Any:
        op.check(*args)
        return op.generic(*args)

    def fake(*args: Any) -> Any:
        op.check(*args)
        return op.fake(*args)

    texts = [at for at, kind in enumerate(op.arguments.values()) if kind == "str"]

    def choose(*args: Any) -> Any:
        given = list(args)
        for at in texts:
            given[at] = bytes(given[at]).decode()
        return run(*given)

    # The order matters: torch.ops.bitport.<name> calls the first overload that takes the arguments, and PyTorch aborts
    # at exit over an overload that follows two with the same arguments.
    LIB.define(op.name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIB.define(f"{op.name}.choose{op.schema.replace('str ', 'int[] ')}")
    LIB.define(f"{op.name}.generic{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for overload, kernel in (("", run), (".choose", choose), (".generic", generic)):
        LIB.impl(op.name + overload, kernel, "CompositeExplicitAutograd")
    for overload in ("", ".generic"):
        torch.library.register_fake(f"bitport::{op.name}{overload}", fake, lib=LIB)
    if op.composed:
        LIB.impl(op.name, _composed(op, run), "Autograd", with_keyset=True)
        torch.library.register_vmap(f"bitport::{op.name}", _mapped(op), lib=LIB)
    if op.backward is not None:
        LIB.impl(op.name, _differentiable(op, run), "Autograd", with_keyset=True)
    if op.backward is not None or op.leading:
        torch.library.register_vmap(f"bitport::{op.name}", _batched(op), lib=LIB)


def _of_tensors(op: Op) -> Callable[..., None]:
    """The op's check, with ArgumentError for a required tensor that is None, which torch does not reject. Since checks
    run on every call, None is only looked for after the check has failed on it."""
    tensors = [(at, name) for at, (name, kind) in enumerate(op.arguments.items()) if kind == "Tensor"]

    def check(*args: Any) -> None:
        try:
            op.check(*args)
        except AttributeError:
            for at, name in tensors:
                if args[at] is None:
                    raise ArgumentError(f"{name} must be a tensor, not None") from None
            raise

    return check


def lost_type(op: str, error: RuntimeError) -> bool:
    """Whether ``error`` comes from the chooser through C functions, which keep only its message, prefixed by the op's
    name. Calling the chooser from Python then raises the original error."""
    return str(error).startswith(f"bitport::{op}: ")


def has_tangent(*args: Any) -> bool:
    """Whether forward-mode AD is active on one of ``args``. Below the autograd key any of them may be a tangent."""
    if forward_ad._current_level < 0:
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return True
    return any(isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args)


def refuse_tangents(op: Op, *args: Any) -> None:
    """Refuse forward-mode AD: a kernel would silently drop the tangent, i.e. treat it as zero."""
    if has_tangent(*args):
        raise NotImplementedError(
            f"bitport::{op.name} has no forward-mode derivative: use F.linear with a QTensor, or backward()"
        )


def no_view(output: Tensor) -> Tensor:
    """Detach an output that is a view, so that in-place ops such as ReLU accept what an autograd.Function returned.
    F.linear of non-contiguous rows returns a view of a matrix that nothing else refers to."""
    return output.detach() if not torch.compiler.is_compiling() and output._is_view() else output


def _differentiable(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """The op at the Autograd key: like torch.library.register_autograd, at a third of its 8 us."""
    redispatch, below = op.overload._handle.redispatch_boxed, torch._C._after_autograd_keyset
    defaults = [argument.default_value for argument in op.overload._schema.arguments]

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keys = args
        with torch._C._AutoDispatchBelowAutograd():
            output = no_view(redispatch(keys & below, *inputs))
        _save(ctx, (*inputs, *defaults[len(inputs) :]))  # trailing arguments equal to their default are not passed
        return output

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (*_gradients(op, ctx, grad), None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    graded: Any = type(f"bitport_{op.name}", (torch.autograd.Function,), members)

    def autograd(keys: Any, *args: Any) -> Any:
        refuse_tangents(op, *args)
        try:
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return graded.apply(*args, keys)
            return redispatch(keys & below, *args)
        except RuntimeError as error:
            if not lost_type(op.name, error):
                raise
        return run(*args)

    return autograd


def _composed(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """The op at the Autograd key. If a gradient is needed, run the generic kernel, whose ops save what it requires."""
    redispatch, below = op.overload._handle.redispatch_boxed, torch._C._after_autograd_keyset

    def autograd(keys: Any, *args: Any) -> Any:
        if has_tangent(*args) or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            op.check(*args)
            return op.generic(*args)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return redispatch(keys & below, *args)
        except RuntimeError as error:
            if not lost_type(op.name, error):
                raise
        return run(*args)

    return autograd


def _mapped(op: Op) -> Callable[..., Any]:
    """vmap of the generic kernel, over any tensors its ops can be mapped over."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return torch.vmap(op.generic, in_dims)(*args), 0

    return vmap


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.inputs = tuple(None if isinstance(value, Tensor) else value for value in inputs)
    ctx.tensors_at = [at for at, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*(inputs[at] for at in ctx.tensors_at))


def gradient_of_bias(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the bias: the sum over rows, accumulated in the wider of both dtypes."""
    return grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.promote_types(grad.dtype, dtype)).to(dtype)


def _gradients(op: Op, ctx: Any, grad: Tensor) -> list[Any]:
    """Those of the inputs that :func:`_save` has saved."""
    inputs = list(ctx.inputs)
    for at, value in zip(ctx.tensors_at, ctx.saved_tensors, strict=True):
        inputs[at] = value
    grads: list[Any] = [None] * len(inputs)
    if ctx.needs_input_grad[0] and op.backward is not None:
        grads[0] = op.backward(grad, *inputs)
    if op.bias_at is not None and ctx.needs_input_grad[op.bias_at]:
        grads[op.bias_at] = gradient_of_bias(grad, inputs[op.bias_at].dtype)
    return grads


def _batched(op: Op) -> Callable[..., Any]:
    """vmap over the first argument only: leading dimensions of x are batch dimensions anyway."""

    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(f"bitport::{op.name} can be vmapped over its first argument only")
        if not op.rows_apart(x, *rest):
            return torch.stack([op.overload(each, *rest) for each in x.unbind(in_dims[0])]), 0
        return op.overload(x.movedim(in_dims[0], 0), *rest), 0

    return vmap
