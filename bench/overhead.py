"""Overhead of a quantized linear beyond its arithmetic: a 64x64 layer, one row, bfloat16, one thread, eager.

Two measurements, the first in grad mode, under no_grad and under inference_mode:

* dispatch: the path F.linear -> QTensor -> op -> selector -> kernel, with a kernel that is nn.Linear's own product on a
  precomputed dense weight. Its time relative to nn.Linear's is what bitport adds to any kernel.
* schemes: the full time with the kernel that the CPU would choose.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport
from bench.measure import header, record
from bitport.evaluate.timing import interleaved, medians, ratio
from bitport.ops import Impl, register_kernel, unregister_kernel
from bitport.report.text import table

SIZE = 64
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
DISPATCHED = {"weight-only": ("int8", "linear"), "int8 activation": ("int8-dyn", "dyn_linear")}


@contextlib.contextmanager
def dense_kernel(op: str, dense: Tensor) -> Iterator[None]:
    """Within this context ``op`` on the CPU is F.linear with ``dense``, with priority over every other kernel."""
    impl = Impl(op, "dense", "cpu", lambda x, *rest: F.linear(x, dense, rest[-1]), lambda *args: None, priority=1 << 20)
    register_kernel(impl)
    try:
        yield
    finally:
        unregister_kernel(impl)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def layer(scheme: str | None = None) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(SIZE, SIZE, dtype=torch.bfloat16)
    if scheme is not None:
        bitport.quantize_(module, scheme, measure=False)
    return module


def dispatch(repetitions: int = 101) -> list[dict[str, Any]]:
    """One row per kind of op and mode: microseconds of both, and their ratio."""
    rows = []
    x = torch.randn(1, SIZE, dtype=torch.bfloat16)
    plain = layer()
    for kind, (scheme, op) in DISPATCHED.items():
        quantized = layer(scheme)
        with one_thread(), dense_kernel(op, plain.weight.detach()):
            for mode, context in MODES.items():
                with context():
                    candidates = {"linear": lambda: plain(x), "quantized": lambda q=quantized: q(x)}
                    times = interleaved(candidates, repetitions=repetitions, seconds=0.001, clock=time.thread_time)
                rows.append(_row("dispatch", kind, mode, times))
    return rows


def schemes() -> list[dict[str, Any]]:
    """The same for every preset, with the kernel that the CPU chooses."""
    x = torch.randn(1, SIZE, dtype=torch.bfloat16)
    plain = layer()
    names = [name for name, scheme in bitport.PRESETS.items() if not scheme.static]
    candidates: dict[str, Callable[[], Any]] = {"linear": lambda: plain(x)}
    for name in names:
        candidates[name] = functools.partial(layer(name), x)
    with one_thread(), torch.no_grad():
        times = interleaved(candidates, repetitions=21, seconds=0.001, clock=time.thread_time)
    return [_row("scheme", name, "no_grad", {"linear": times["linear"], "quantized": times[name]}) for name in names]


def _row(what: str, name: str, mode: str, times: dict[str, list[float]]) -> dict[str, Any]:
    middle = medians(times)
    return {
        "what": what,
        "name": name,
        "mode": mode,
        "linear_us": round(middle["linear"] * 1e6, 2),
        "quantized_us": round(middle["quantized"] * 1e6, 2),
        "ratio": round(ratio(times, "quantized", "linear"), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="append the rows to bench/results/overhead.jsonl")
    parser.add_argument("--dispatch-only", action="store_true", help="leave out the schemes' own kernels")
    options = parser.parse_args()
    rows = dispatch() + ([] if options.dispatch_only else schemes())
    keys = ("what", "name", "mode", "linear_us", "quantized_us", "ratio")
    print(table(keys, [tuple(str(row[key]) for key in keys) for row in rows]))
    if options.json:
        with one_thread():
            print(f"appended to {record('overhead', header(), rows).name}")


if __name__ == "__main__":
    main()
