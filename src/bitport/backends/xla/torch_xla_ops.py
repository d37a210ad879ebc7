"""torch_xla (device "xla"): an op on lazy tensors is recorded as the HLO of its JAX function.

That project ended with torch 2.9, which is older than bitport requires. If both are installed nonetheless, this kernel
is available, and the generic kernel is recorded like any torch code.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from bitport.backends.xla import static

NEEDS = ("torch_xla", "jax")


@functools.cache
def _missing() -> str | None:
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: pip install 'torch_xla[pallas]'" if absent else None


def refuses(*args: Any) -> str | None:
    return _missing()


def kernel(op: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        from torch_xla.core.xla_builder import call_jax

        tensors, shape = static.split(args)
        return call_jax(static.of_arrays(op, shape), tensors)

    return run
