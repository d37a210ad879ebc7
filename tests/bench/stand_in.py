"""A device module on the CPU, in place of torch.cuda: its events read the host's clock, and its graphs record
operations with their tensors and replay them into the same memory."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.accelerator import Accelerator

CACHE = 1 << 16
FORBIDDEN = {"item", "_local_scalar_dense", "nonzero"}
"""A graph cannot capture operations that synchronize with the host."""


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        assert self._at

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)


class Stream:
    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in FORBIDDEN:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, results in self.steps:
                for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def recording(graph: Graph) -> Iterator[None]:
    with graph:
        yield


def module(name: str = "CUDAGraph") -> Any:
    properties = types.SimpleNamespace(name="stand-in", total_memory=1 << 30, L2_cache_size=CACHE, major=9, minor=0)
    parts = {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "synchronize": lambda: None,
        "graph": recording,
        "get_device_properties": lambda device: properties,
        name: Graph,
    }
    return types.SimpleNamespace(**parts)


def gpu() -> Accelerator:
    return Accelerator(torch.device("cpu"), module())
