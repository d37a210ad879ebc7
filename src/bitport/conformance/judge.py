"""Whether one kernel computes one sample right, and if not, how it fails and where its author should look."""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bitport import layouts
from bitport.errors import BitportError
from bitport.layouts import Matrix
from bitport.numerics import FLOATS, Quantized
from bitport.ops import Impl, Op, Sample, Weight, select, table
from bitport.ops.select import refusal
from bitport.ops.table import bits

RAISED = (BitportError, *select.RAISED)
"""Errors that fail one sample but do not stop the run."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a kernel did on a sample: its SQNR and the margin over the budget in dB, and if it failed why."""

    kernel: str
    sqnr: float = -math.inf
    margin: float = -math.inf
    failure: str | None = None
    refused: str | None = None
    forced: bool = False


def judged(op: Op, sample: Sample, kernel: str, run: Callable[..., Any]) -> Outcome:
    """Compare ``run`` with the float64 result, and its manners with the contract: it writes into no argument, returns
    memory of its own, what the fake kernel promised, and remembers nothing."""
    before, process = _copies(sample.args), _process()
    try:
        got = run(*sample.args)
        promised = op.fake(*sample.args)
    except RAISED as error:
        return Outcome(kernel, failure=told(sample.name, error))
    wrong = _written(op, sample.args, before) or _unlike(got, promised) or _shared(op, sample.args, _parts(got))
    if _process() != process:
        wrong = f"it has changed the process: {_process()} instead of {process}"
    if wrong:
        return Outcome(kernel, failure=f"{sample.name}: {wrong}")
    level, margin = sample.judged(got)
    if not margin >= 0:
        level, margin = (-math.inf if math.isnan(each) else each for each in (level, margin))
        return Outcome(kernel, level, margin, f"{sample.name}: {_off(sample, got)}")
    try:
        wrong = _remembered(op, sample, run, got)
    except RAISED as error:
        wrong = told("a second call", error)
    return Outcome(kernel, level, margin, f"{sample.name}: {wrong}" if wrong else None)


def told(where: str, error: Exception) -> str:
    """The error in one line, with the place in the source that raised it."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return f"{where}: {type(error).__name__}: {line}{_place(error)}".removeprefix(": ")


PASSED = {Path(module.__file__ or "").resolve() for module in (select, table)} | {Path(__file__).resolve()}
"""Files that an error passes through on its way from a kernel to here."""


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    torchs = Path(torch.__file__).resolve().parent
    for frame in reversed(frames):
        file = Path(frame.filename).resolve()
        if file not in PASSED and torchs not in file.parents and file.suffix == ".py":
            return f" [{frame.filename}:{frame.lineno}, in {frame.name}]"
    return ""


def answers_otherwise(impl: Impl, refused: bool, *args: Any) -> str | None:
    """How ``supports`` of the kernel depends on numbers: asked about tensors without any, it must answer the same."""
    mode = FakeTensorMode()
    try:
        fake = refusal(impl, *(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    except RAISED as error:
        return told("supports looks at numbers or addresses, not only at shapes, dtypes and devices", error)
    if refused != (fake is not None):
        return f"supports answers otherwise without the numbers, when a program is traced: {fake}"
    return None


def rows_differ(weight: Weight) -> str | None:
    """How the method ``rows`` of the weight's layout differs from rows of the plain weight; None if it has none."""
    layout = layouts.layout(weight.layout)
    cut = getattr(layout, "rows", None)
    if cut is None or weight.block_n > 1:
        return None
    plain = layout.unpack(weight.matrix, weight.parts)
    for start, stop in ((0, weight.n), (0, weight.n // 2), (weight.n // 64 * 32, weight.n), (1, weight.n)):
        parts = cut(weight.matrix, weight.parts, start, stop)
        if parts is None:
            continue
        here = Matrix(weight.dtype, stop - start, weight.k, 1, weight.block_k)
        wanted = (None if part is None else part[..., start:stop, :] for part in plain[:3])
        pairs = zip(layout.unpack(here, parts), (*wanted, plain.scale2), strict=True)
        if any(one is None or other is None or not _same(one, other) for one, other in pairs if one is not other):
            return f"rows {start} to {stop} of layout {layout.name} are not those of the plain weight"
    return None


def _copies(args: Sequence[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def _process() -> dict[str, Any]:
    return {"default dtype": torch.get_default_dtype(), "threads": torch.get_num_threads()}


def _parts(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [*result]


def _memory(parts: Sequence[Tensor]) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in parts if part.numel()}


def _written(op: Op, args: Sequence[Any], before: Sequence[Any]) -> str | None:
    found = [at for at, arg in enumerate(args) if isinstance(arg, Tensor) and not _same(arg, before[at])]
    return f"wrote into its arguments {found}: {', '.join([*op.arguments][at] for at in found)}" if found else None


def _shared(op: Op, args: Sequence[Any], parts: list[Tensor]) -> str | None:
    """Which argument lies in the memory of the result; torch's rules for ops forbid it."""
    of_result = _memory(parts)
    for name, arg in zip(op.arguments, args, strict=False):
        if isinstance(arg, Tensor) and _memory([arg]) & of_result:
            return f"the result lies in the memory of the argument {name}: return a copy"
    return None


NOT_ROUNDING = 20.0
"""dB. Numbers of an earlier call that are twice as large as they should be leave less, rounding leaves more."""


def _remembered(op: Op, sample: Sample, run: Callable[..., Any], first: Any) -> str | None:
    """What a second call shows that a kernel keeps: the memory of its result, or numbers that it has read. The second
    call has half of every float, in the same memory."""
    kept = _copies(_parts(first))
    floats = [arg for arg in sample.args if isinstance(arg, Tensor) and arg.dtype in FLOATS and 0 not in arg.stride()]
    before = _copies(floats)
    try:
        for arg in floats:
            arg.mul_(0.5)
        second, wanted = run(*sample.args), op.generic(*sample.args)
    finally:
        for arg, value in zip(floats, before, strict=True):
            arg.copy_(value)
    if _memory(_parts(first)) & _memory(_parts(second)) or not all(map(_same, _parts(first), kept)):
        return "a later call has written into the result of an earlier one: return new memory on each call"
    exact = sample.budget == math.inf or isinstance(wanted, list)
    right = bits(wanted) if exact else wanted.cpu().double()
    level = dataclasses.replace(sample, expected=lambda: right).judged(second)[0]
    if level >= NOT_ROUNDING:
        return None
    return "a second call, with other numbers in the same memory, has a wrong result: it computes with numbers it kept"


def _off(sample: Sample, got: Any) -> str:
    """How a result is off its budget, and where most."""
    wanted = sample.expected()
    if isinstance(got, list) or sample.budget == math.inf:
        return _differing(_parts(got), wanted)
    result = got.cpu().double().reshape(wanted.shape)
    level = sample.judged(got)[0] + 0.0  # -0.0 is 0.0
    error = (result - wanted).abs()
    error[result.isnan() != wanted.isnan()] = math.inf
    worst = int(error.nan_to_num(0, posinf=math.inf).argmax())
    at = [int(each) for each in torch.unravel_index(torch.tensor(worst), wanted.shape)]
    one, other = float(result.flatten()[worst]), float(wanted.flatten()[worst])
    return f"{level:.1f} dB, at least {sample.budget:.1f} wanted; furthest off at {at}: {one:.6g}, not {other:.6g}"


def _differing(got: list[Tensor], wanted: Tensor) -> str:
    """Return which of the parts differs in bits from the expected one, and where first."""
    at, wrong = 0, "scale2"
    for name, part in zip(Quantized._fields, got, strict=False):
        found = bits(part)
        expected = wanted[at : at + found.numel()]
        if not torch.equal(found, expected):
            wrong = f"{name}, {part.dtype} {[*part.shape]},"
            if found.shape == expected.shape:
                first = int((found != expected).nonzero()[0, 0]) // part.element_size()
                at_first = [int(each) for each in torch.unravel_index(torch.tensor(first), part.shape)]
                return f"{wrong} has other bits than it should have, first at {at_first}"
            break
        at += found.numel()
    return f"{wrong} has other bits than it should have"


def _unlike(got: Any, wanted: Any) -> str | None:
    """Return how a result differs from the fake kernel's, which traced programs rely on: shape, dtype, device, or not
    contiguous."""
    if not isinstance(got, (Tensor, list, tuple)):
        return f"the result is of type {type(got).__name__}, not a tensor"
    parts, promises = _parts(got), _parts(wanted)
    if len(parts) != len(promises):
        return f"the result has {len(parts)} tensors, not {len(promises)}"
    names = Quantized._fields if len(parts) == len(Quantized._fields) else ("",)
    for name, one, other in zip(names, parts, promises, strict=True):
        found, promised = (f"{part.dtype} {[*part.shape]} on {part.device}" for part in (one, other))
        if found != promised:
            return f"the result{name and f', part {name},'} is {found}, not {promised}"
        if not one.is_contiguous():
            return f"the result {found} is not contiguous: its strides are {one.stride()}"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal; torch cannot compare 8-bit floats."""
    return torch.equal(bits(one), bits(other))
