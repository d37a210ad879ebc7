"""Number formats of moments, and the tensors that hold them.

A tensor of 2 or more dimensions [N, ...] whose rows have at least a block is kept as the matrix [N, rest], so that a
slice of its rows has a slice of its state, as sharding by rows requires. Any other is one row, [1, elements], whose
blocks extend across the tensor's rows. It is held by a QTensor of the shape of the parameter, or of that row, so
moving, casting, saving and copying change no number. It stays in the plain layout, since no product uses it.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from bitport.errors import ArgumentError
from bitport.numerics import Format, quantize
from bitport.ops.optimizer_step import Moment
from bitport.schemes import Scheme
from bitport.tensor import QTensor, from_parts


@dataclasses.dataclass(frozen=True)
class States:
    """``signed`` and ``positive``: the formats of first and second moments; both None for floats of ``dtype``."""

    signed: Format | None
    positive: Format | None
    dtype: torch.dtype = torch.float32

    def format(self, positive: bool) -> Format | None:
        return self.positive if positive else self.signed


def _blocks(signed: str, positive: str, block: int) -> States:
    return States(Format(dtype=signed, block=(1, block)), Format(dtype=positive, block=(1, block)))


STATES: dict[str, States] = {
    "8bit": _blocks("dynamic8", "udynamic8", 256),
    "4bit": _blocks("dynamic4", "ulinear4", 128),
    "fp8": _blocks("float8_e4m3", "float8_e4m3", 256),
    "float32": States(None, None),
    "bfloat16": States(None, None, torch.bfloat16),
}
"""What ``states=`` may be: the formats of the moments (docs/optimizers.md)."""


def states_of(name: str) -> States:
    if name not in STATES:
        raise ArgumentError(f"unknown states={name!r}; allowed: {', '.join(STATES)}")
    return STATES[name]


def kept_shape(shape: tuple[int, ...], fmt: Format) -> tuple[int, ...]:
    """The shape of the QTensor that keeps a tensor of ``shape``: a single row if its own do not fill a block."""
    return tuple(shape) if math.prod(shape[1:]) >= fmt.block[1] else (1, math.prod(shape))


def zeros(param: Tensor, fmt: Format | None, dtype: torch.dtype) -> Tensor:
    """The initial moment of ``param``: in ``fmt``, or floats of ``dtype``."""
    if fmt is None:
        return torch.zeros(param.shape, dtype=dtype, device=param.device)
    return encoded(torch.zeros(param.shape, dtype=torch.float32, device=param.device), fmt, param.dtype)


def encoded(value: Tensor, fmt: Format, dtype: torch.dtype) -> QTensor:
    """``value`` rounded to the nearest numbers of ``fmt``, representing a tensor of ``dtype``."""
    shape = kept_shape(tuple(value.shape), fmt)
    parts = quantize(value.to(torch.float32).reshape(shape[0], math.prod(shape[1:])), fmt)
    return from_parts(parts, Scheme(weight=fmt), shape=shape, dtype=dtype)


def fits(kept: Tensor, param: Tensor) -> bool:
    """Whether it has the shape of a moment of ``param``, given its format."""
    shape = tuple(param.shape)
    return tuple(kept.shape) == (kept_shape(shape, kept.scheme.weight) if isinstance(kept, QTensor) else shape)


def moment_of(kept: Tensor, positive: bool) -> Moment:
    """Return it as the step takes it."""
    if isinstance(kept, QTensor):
        return Moment(kept.qdata, kept.scale, kept.scheme.weight, positive)
    return Moment(kept, positive=positive)


def loaded(saved: object, param: Tensor, fmt: Format | None, dtype: torch.dtype, what: str) -> Tensor:
    """A copy of ``saved`` on the device of ``param`` in this format; ArgumentError if it is no state of that tensor.
    Floats, as in a state of torch.optim, are rounded where codes are expected."""
    wanted = tuple(param.shape) if fmt is None else kept_shape(tuple(param.shape), fmt)
    if isinstance(saved, QTensor):
        if fmt is None or saved.scheme != Scheme(weight=fmt) or tuple(saved.shape) != wanted or saved.transposed:
            kind = str(dtype) if fmt is None else str(Scheme(weight=fmt))
            raise ArgumentError(
                f"{what} is {saved!r}; this tensor of shape {[*param.shape]} wants {kind} of shape {[*wanted]}: "
                f"load the state of the same model and options"
            )
        return saved.to_layout("plain").map_parts(lambda part: part.detach().to(param.device, copy=True))
    if not isinstance(saved, Tensor) or not saved.is_floating_point() or saved.shape != param.shape:
        given = f"{saved.dtype} {[*saved.shape]}" if isinstance(saved, Tensor) else type(saved).__name__
        raise ArgumentError(
            f"{what} is {given}; it must be a float tensor of shape {[*param.shape]}, as its parameter is"
        )
    if fmt is None:
        return saved.detach().to(param.device, dtype, copy=True)
    return encoded(saved.detach().to(param.device), fmt, param.dtype)
