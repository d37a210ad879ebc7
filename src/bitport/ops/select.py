"""Kernel selection within one device.

PyTorch's dispatcher chooses by device. Within a device the first kernel, by priority, whose ``supports`` returns None
runs; the generic kernel is always last. A kernel can be forced by name, with :func:`use_kernel` or, for the whole
process, by the environment variable ``BITPORT_KERNEL`` (read at import), e.g. ``generic`` or
``linear=generic,dyn_linear=int_mm``. A forced kernel that cannot run is an error, never a fallback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bitport import plugins
from bitport.errors import KernelError
from bitport.missing import missing_for
from bitport.ops import table
from bitport.ops.table import OPS, Op

GENERIC = "generic"


@dataclasses.dataclass(frozen=True)
class Impl:
    """A kernel of ``op`` on devices of type ``device``. ``run`` and ``supports`` take the op's arguments. ``supports``
    returns why the kernel refuses them, or None; it may depend on shapes, dtypes and devices, and on
    what was measured of these (a table that ``bitport tune`` wrote), never on data or on other process-wide state.

    ``into``, of kernels for ``quantize``: takes the same arguments and the others of
    :func:`bitport.ops.convert.quantize_into`; returns whether it could write there."""

    op: str
    name: str
    device: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]
    priority: int = 0
    into: Callable[..., bool] | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """The result of kernel selection: ``kernel`` will run; ``refused`` are those tried before it, with reasons, after
    those that would have been tried but are missing."""

    kernel: str
    refused: tuple[tuple[str, str], ...]


IMPLS: dict[tuple[str, str], list[Impl]] = {}
"""The kernels that :func:`register_kernel` added, by op and device type, in the order in which they are asked."""

STEP = "optimizer_step"
"""The optimizer step also has kernels, but is not a torch op (bitport.ops.optimizer_step)."""


def register_kernel(impl: Impl) -> None:
    """Register a kernel. Kernels of higher priority are tried first; among equals, in order of registration.
    KernelError if the op is unknown or already has a kernel of this name on the device."""
    if ":" in impl.device:
        raise KernelError(
            f"kernel {impl.name!r} is for {impl.device!r}: device is a type, {impl.device.partition(':')[0]!r}; "
            "supports sees which of them the tensors are on"
        )
    if impl.op not in {*OPS, STEP}:
        raise KernelError(f"kernel {impl.name!r} is for {impl.op!r}, and there is no such op: {', '.join(OPS)}")
    known = IMPLS.setdefault((impl.op, impl.device), [])
    first = next((other for other in known if other.name == impl.name), None)
    if first or impl.name == GENERIC:
        there = f"of {plugins.module_of(first.run)}" if first else "in plain PyTorch"
        raise KernelError(
            f"{impl.op} on {impl.device} has a kernel named {impl.name!r} already, {there}; choose another name"
        )
    known.append(impl)
    known.sort(key=lambda other: -other.priority)
    changed()


def unregister_kernel(impl: Impl) -> None:
    """Undo :func:`register_kernel`."""
    IMPLS[impl.op, impl.device].remove(impl)
    changed()


WATCHERS: list[Callable[[], None]] = []
"""Callbacks for when kernels are registered, unregistered, forced or released."""

_watching = threading.Lock()


def changed() -> None:
    """Tell the watchers. One thread at a time, so that the last call leaves what the last change requires."""
    with _watching:
        for watcher in WATCHERS:
            watcher()


def _parse(setting: str) -> dict[str, str]:
    """ "name" forces every op ("*"), "op=name,op=name" single ones."""
    pairs = [item.rpartition("=") for item in str(setting).split(",") if item.strip()]
    named = all(name.strip() and (op.strip() or not sign) for op, sign, name in pairs)
    found = {op.strip() or "*": name.strip() for op, _, name in pairs}
    if not isinstance(setting, str) or not named or len(found) < len(pairs):
        raise KernelError(
            f"kernel setting {setting!r}: write a kernel's name for every op, or op=name,op=name with each op once, "
            f"e.g. linear=generic"
        )
    return found


def check_forced(wanted: dict[str, str]) -> None:
    """Raise KernelError for an unknown op, which would otherwise be ignored silently."""
    if unknown := sorted(set(wanted) - {"*", *OPS, STEP}):
        raise KernelError(f"cannot force a kernel of {', '.join(unknown)}: the ops are {', '.join(OPS)}")


ENVIRONMENT = _parse(os.environ.get("BITPORT_KERNEL", ""))
"""Its ops are checked once all are declared."""

FORCED: dict[int, dict[str, str]] = {id(ENVIRONMENT): ENVIRONMENT} if ENVIRONMENT else {}
"""The settings in force, each op (or "*") -> kernel name, from the first made to the last. Each has its id as its key:
blocks may end in any order, as those of several threads do."""


def forced(op: str) -> str | None:
    """Name of the kernel that is forced for ``op``, by the last setting that speaks of it, or None."""
    if FORCED:  # usually empty, and asked on every call
        for setting in reversed(list(FORCED.values())):  # a copy, which other threads do not change
            if kernel := setting.get(op, setting.get("*")):
                return kernel
    return None


@contextlib.contextmanager
def use_kernel(setting: str) -> Iterator[None]:
    """Force kernels within a block: ``with use_kernel("generic")`` or ``with use_kernel("linear=generic")``.

    The setting is that of the process: calls in other threads follow it too. Of several settings the one made last
    decides about the ops it names."""
    wanted = _parse(setting)
    check_forced(wanted)
    FORCED[id(wanted)] = wanted
    changed()
    try:
        yield
    finally:
        del FORCED[id(wanted)]
        changed()


DIRECT: dict[tuple[str, str, str], Callable[..., Any]] = {}
"""(op, device type, layout) -> direct entry to the native kernel for plain tensors, present while that kernel is the
first to be tried. It skips the chooser, which takes longer than such a kernel may run."""


def first(op: str, device: str) -> str | None:
    """Name of the kernel that is tried first; None if there is none or one is forced."""
    impls = IMPLS.get((op, device))
    return None if forced(op) or not impls else impls[0].name


CHOOSERS: dict[str, Callable[..., Any]] = {}
"""op -> the function that chooses and runs a kernel for already checked arguments."""


def _chooser(op: Op) -> Callable[..., Any]:
    known: dict[str, list[Impl]] = {}

    def choose(*args: Any) -> Any:
        if FORCED and (kernel := forced(op.name)):
            return call(op.name, *args, kernel=kernel)
        device = args[0].device.type
        impls = known.get(device)
        if impls is None:
            plugins.load()
            impls = known[device] = IMPLS.setdefault((op.name, device), [])
        for impl in impls:  # as first_that_takes, without the time that its calls take
            try:
                reason = impl.supports(*args)
            except RAISED as error:
                raise _raised(impl, error) from error
            if reason is None:
                return impl.run(*args)
            if type(reason) is not str:
                refusal(impl, *args)
        return op.generic(*args)

    return choose


def declare(op: Op) -> None:
    """Add ``op`` to the table and register its chooser with torch, for every device without a kernel of its own."""
    CHOOSERS[op.name] = table.as_given(_chooser(op))
    op = dataclasses.replace(op, generic=table.as_given(op.generic))
    table.declare(op, functools.partial(checked, op.name))


def checked(op: str, *args: Any) -> Any:
    OPS[op].check(*args)
    return CHOOSERS[op](*args)


def is_chooser(op: str, device: str) -> bool:
    """Whether PyTorch dispatches ``op`` on ``device`` to our chooser, i.e. no external kernel is registered there.

    Asking PyTorch takes 3 us, so the answer is cached until another module or library is loaded, or a Python kernel of
    the op comes or goes: nothing else can change it.
    """
    count = len(sys.modules) + len(torch.ops.loaded_libraries)
    seen = (count, _python_name(op, device) in _python_kernels)
    known = _seen.get((op, device))
    if known is None or known[0] != seen:
        plugins.load()
        known = _seen[op, device] = (seen, not own_kernel(op, torch.device(device)))
    return known[1]


@functools.cache
def _python_name(op: str, device: str) -> str:
    """The key of a Python kernel of ``op`` on ``device`` in torch.library."""
    return f"bitport/{op}/{torch._C._dispatch_key_for_device(device)}"


_seen: dict[tuple[str, str], tuple[tuple[int, bool], bool]] = {}
_python_kernels = torch.library._impls


def call(op: str, *args: Any, kernel: str | None = None) -> Any:
    """Run ``op`` with the kernel called ``kernel``, or without a name with the one that would be chosen."""
    if kernel is not None:
        plugins.load()
        return table.as_given(named(kernel, op, *args))(*args)
    try:
        return OPS[op].overload(*args)
    except RuntimeError as error:
        if not table.lost_type(op, error):
            raise
    return checked(op, *args)


def named(kernel: str, op: str, *args: Any) -> Callable[..., Any]:
    """The kernel called ``kernel``; KernelError if there is none, or if it refuses these arguments."""
    impl = _by_name(kernel, op, args[0].device.type, *args)
    return OPS[op].generic if impl is None else impl.run


def _by_name(kernel: str, op: str, device: str, *args: Any) -> Impl | None:
    if kernel == GENERIC:
        return None
    known = IMPLS.get((op, device), [])
    for impl in known:
        if impl.name == kernel:
            if reason := refusal(impl, *args):
                raise KernelError(f"kernel {kernel!r} was forced for {op} on {device}, but refuses this call: {reason}")
            return impl
    names = ", ".join([*(impl.name for impl in known), GENERIC])
    own = f"; the kernel that {device} has at the dispatcher has no name, and runs where none is forced"
    hint = own if op in OPS and own_kernel(op, torch.device(device)) else ""
    lacking = "".join(f"; {each.name} is missing: {each.reason}" for each in missing_for(op, device))
    raise KernelError(f"kernel {kernel!r} was forced for {op}, but {device} has only: {names}{hint}{lacking}")


def first_that_takes(op: str, device: str, *args: Any) -> tuple[Impl | None, list[tuple[str, str]]]:
    """The kernel that runs ``op`` with ``args`` on devices of type ``device`` unless they have their own (None: the
    generic one), and those that refused before it, with their reasons. KernelError if one is forced that cannot run."""
    if kernel := forced(op):
        return _by_name(kernel, op, device, *args), []
    refused: list[tuple[str, str]] = []
    for impl in IMPLS.get((op, device), ()):
        reason = refusal(impl, *args)
        if reason is None:
            return impl, refused
        refused.append((impl.name, reason))
    return None, refused


RAISED = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What ``supports`` of an unfinished kernel may raise."""


def _raised(impl: Impl, error: Exception) -> KernelError:
    return KernelError(
        f"{impl.op} on {impl.device}: supports of kernel {impl.name!r} has raised {type(error).__name__}: {error}; it "
        "must return None where the kernel takes the call, and otherwise a text that says why not"
    )


def refusal(impl: Impl, *args: Any) -> str | None:
    """Why ``impl`` refuses these arguments, or None; KernelError if ``supports`` raises or returns anything else."""
    try:
        reason = impl.supports(*args)
    except RAISED as error:
        raise _raised(impl, error) from error
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise KernelError(
        f"{impl.op}: supports of kernel {impl.name!r} has answered {reason!r}, which counts as a refusal: it must "
        "return None where the kernel takes the call, and otherwise a text that says why not"
    )


NATIVE = "bitport/native/torch"
"""The source path with which the native kernels are registered. They fall back to the chooser, so they count as one of
its kernels, not as a device's own."""


def own_kernel(op: str, device: torch.device) -> bool:
    """Whether ``device`` has its own kernel for ``op`` at PyTorch's dispatcher, registered from outside bitport."""
    key = torch._C._dispatch_key_for_device(device.type)
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"bitport::{op}", key):
        return False
    return f"\n{key}: registered at {NATIVE}" not in torch._C._dispatch_dump(f"bitport::{op}")


def decide(op: str, *args: Any) -> Decision:
    """Which kernel would run ``op`` with ``args``, and why each one before it was refused."""
    plugins.load()
    device, kernel = args[0].device, forced(op)
    if kernel is None and own_kernel(op, device):
        return Decision(f"{device.type}'s own (dispatcher)", ())
    try:
        impl, refused = first_that_takes(op, device.type, *args)
    except KernelError as error:
        if kernel is None:
            raise
        return Decision(f"error: {kernel} (forced)", ((kernel, str(error)),))
    if kernel:
        return Decision(f"{GENERIC if impl is None else impl.name} (forced)", ())
    missing = [each for each in missing_for(op, device.type) if impl is None or each.priority > impl.priority]
    earlier = [(each.name, f"missing: {each.reason}") for each in missing]
    return Decision(GENERIC if impl is None else impl.name, (*earlier, *refused))
