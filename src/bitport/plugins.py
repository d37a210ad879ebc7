"""Loading of backends, built in and from installed packages.

A backend is a module that registers kernels and layouts on import. Backends are loaded on first use of a device, never
by ``import bitport``. Packages provide theirs through the entry point group ``bitport.backends``. A broken backend
fails loudly; ``BITPORT_DISABLE=name,name`` skips backends.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from bitport.errors import ArgumentError, BackendError

GROUP = "bitport.backends"
IN_TREE = ("cpu", "cuda", "xpu", "mps", "triton", "xla")

FAILURES = (
    *(ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError),
    *(ArithmeticError, AssertionError, LookupError, NameError, SyntaxError),
)
"""What an unfinished package, or one written for another version of bitport, may raise."""

_loaded: dict[str, Any] = {}
"""The modules of the backends, by name."""
_broken: dict[str, Exception] = {}
"""What loading raised, by backend. Not retried: the first attempt may already have registered some of its kernels."""
_started = False
_lock = threading.RLock()


def installed() -> dict[str, importlib.metadata.EntryPoint]:
    """Backends that installed packages provide, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _check_names() -> None:
    """Raise ArgumentError if two packages provide a backend of the same name, or a package reuses a built-in name: one
    of the two would be dropped silently."""
    first: dict[str, str] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        other = first.setdefault(entry.name, entry.value)
        if entry.name in IN_TREE or other != entry.value:
            there = "one of bitport's own" if entry.name in IN_TREE else f"{other}, of another package"
            raise ArgumentError(
                f"the backend {entry.value} of an installed package is called {entry.name}, and so is {there}: give "
                f"its entry point in {GROUP} another name, or uninstall one of the packages"
            )


def load() -> tuple[str, ...]:
    """Load every backend once and return the names of the loaded ones. Other threads block until all are loaded; a
    backend that failed fails again on every call. Torch modes are disabled meanwhile, so that tables of the backends
    are real tensors even under ``with torch.device("meta")``, fake tensors, or another library's mode."""
    global _started
    with _lock:
        if not _started:
            _started = True  # loading a backend may call load() again
            try:
                with torch._C.DisableTorchFunction(), _disable_current_modes():
                    _load()
            except BaseException:
                _started = False
                raise
    return loaded()


def loaded() -> tuple[str, ...]:
    return tuple(_loaded)


def _load() -> None:
    _check_names()
    found: dict[str, Callable[[], Any]] = {
        name: functools.partial(importlib.import_module, f"bitport.backends.{name}") for name in IN_TREE
    }
    found |= {name: entry.load for name, entry in installed().items()}
    disabled = {name for each in os.environ.get("BITPORT_DISABLE", "").split(",") if (name := each.strip())}
    if unknown := sorted(disabled - set(found)):
        raise ArgumentError(f"BITPORT_DISABLE: no backend is called {', '.join(unknown)}; there are {', '.join(found)}")
    for name, bring in found.items():
        if name not in disabled and name not in _loaded:
            _loaded[name] = _brought(name, bring)


def _brought(name: str, bring: Callable[[], Any]) -> Any:
    if name not in _broken:
        try:
            return _imported(bring())
        except FAILURES as error:
            _broken[name] = error
    cause = _broken[name]
    module = "bitport's own" if name in IN_TREE else installed()[name].value
    raise BackendError(
        f"the backend {name} ({module}) cannot be loaded: {type(cause).__name__}: {cause}. Update or repair its "
        f"package, or leave it out: BITPORT_DISABLE={name}"
    ) from cause


def _imported(module: Any) -> Any:
    """Raise TypeError for a function: unlike one in the group ``torch.backends`` it would never be called."""
    if callable(module):
        raise TypeError(
            "its entry point names a function, and a backend is imported, not called: name the module alone, and "
            "register where it is imported"
        )
    return module


def module_of(registered: Any) -> str:
    """Return the module that defined a function, a part of one, or a class: it tells packages apart."""
    return str(getattr(registered, "func", registered).__module__)


def describe() -> dict[str, list[str]]:
    """What each loaded backend reports about itself for ``bitport doctor``, from its function ``describe``."""
    return {name: _described(_loaded[name]) for name in load() if hasattr(_loaded[name], "describe")}


def _described(module: Any) -> list[str]:
    try:
        return module.describe()
    except FAILURES as error:
        return [f"its describe() has failed: {type(error).__name__}: {error}"]


def tune() -> Iterator[tuple[str, str]]:
    """Tune the kernel choice of each loaded backend on this machine, by its function ``tune``, which saves its result
    for later processes. Yields (backend, a line on what it found)."""
    for name in load():
        if hasattr(_loaded[name], "tune"):
            for line in _loaded[name].tune():
                yield name, line
