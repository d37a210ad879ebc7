"""Backends are loaded once, either completely or with an error, no matter who asks first."""

from __future__ import annotations

import importlib.metadata
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bitport import plugins
from bitport.errors import ArgumentError, BackendError
from bitport.ops import OPS, Impl, register_kernel


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that offers one more backend, loaded by its argument, to a process where nothing is loaded."""
    plugins.load()

    def offered(load: Callable[[], object]) -> None:
        monkeypatch.setattr(plugins, "_started", False)
        monkeypatch.setattr(plugins, "_loaded", {})
        monkeypatch.setattr(plugins, "_broken", {})
        fake = type("Entry", (), {"load": staticmethod(load), "value": "acme_npu.backend"})
        monkeypatch.setattr(plugins, "installed", lambda: {"acme": fake})

    return offered


@pytest.mark.usefixtures("own_tables")
def test_a_broken_backend_fails_every_time(offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same error each time, although the kernels that it registered are still there."""

    def broken() -> object:
        register_kernel(Impl("linear", "acme", "cpu", OPS["linear"].generic, lambda *args: "not yet"))
        raise ImportError("its library is gone")

    offer(broken)
    for _ in range(2):
        said = r"the backend acme \(acme_npu.backend\) .* its library is gone. .* leave it out: BITPORT_DISABLE=acme"
        with pytest.raises(BackendError, match=said):
            plugins.load()
    assert plugins.loaded() == plugins.IN_TREE
    monkeypatch.setenv("BITPORT_DISABLE", "acme")
    assert plugins.load() == plugins.IN_TREE


def test_a_backend_that_cannot_describe_itself(offer: Callable[..., None]) -> None:
    def describe() -> list[str]:
        raise OSError("no driver")

    offer(lambda: types.SimpleNamespace(describe=describe))
    assert plugins.describe()["acme"] == ["its describe() has failed: OSError: no driver"]


def test_a_function_in_place_of_a_module(offer: Callable[..., None]) -> None:
    """It was loaded, never called, and its kernels were missing without a word."""
    called: list[bool] = []
    offer(lambda: lambda: called.append(True))
    with pytest.raises(BackendError, match="names a function, and a backend is imported, not called: name the module"):
        plugins.load()
    assert plugins.loaded() == plugins.IN_TREE
    assert not called


def test_a_backend_may_ask_while_it_is_loaded(offer: Callable[..., None]) -> None:
    offer(plugins.load)
    assert plugins.load() == (*plugins.IN_TREE, "acme")


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")], ids=["fake tensors", "meta"])
def test_modes_do_not_reach_backends(mode: AbstractContextManager[object], offer: Callable[..., None]) -> None:
    """Backends build tables from numbers while they are loaded."""
    seen: list[float] = []
    offer(lambda: seen.append(torch.arange(4.0).sum().item()))
    with mode:
        plugins.load()
    assert seen == [6.0]


def test_another_thread_waits(offer: Callable[..., None]) -> None:
    """Otherwise it would choose layouts and kernels from incomplete registries."""
    seen: list[tuple[str, ...]] = []
    other = threading.Thread(target=lambda: seen.append(plugins.load()))

    def load() -> object:
        other.start()
        other.join(0.2)
        return None

    offer(load)
    plugins.load()
    other.join()
    assert seen == [(*plugins.IN_TREE, "acme")]


def test_a_name_that_no_backend_has(offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    offer(lambda: None)
    monkeypatch.setenv("BITPORT_DISABLE", "acme, cdua")
    with pytest.raises(ArgumentError, match=r"no backend is called cdua; there are cpu, cuda, .*, acme"):
        plugins.load()
    monkeypatch.setenv("BITPORT_DISABLE", "acme, ")
    assert plugins.load() == plugins.IN_TREE


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, plugins.GROUP)


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        ([entry("cuda", "acme.backend")], "acme.backend .* is called cuda, and so is one of bitport's own"),
        ([entry("acme", "acme.backend"), entry("acme", "other.backend")], "other.backend .* acme.backend, of another"),
    ],
    ids=["as one of ours", "twice"],
)
def test_a_name_that_two_backends_have(
    offered: list[importlib.metadata.EntryPoint], said: str, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(lambda: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: offered)
    with pytest.raises(ArgumentError, match=said):
        plugins.load()


def test_one_package_found_twice_is_one_backend(offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be in sys.path under two names."""
    offer(lambda: None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry("acme", "acme.backend")] * 2)
    assert plugins.load() == (*plugins.IN_TREE, "acme")
