"""torchax (device "jax"): its environment finds the JAX functions in a table of its own. This module makes them visible
as kernels, for ``explain`` and for forcing one, and provides the device to the conformance suite.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from bitport.errors import DeviceError
from bitport.ops import OPS
from bitport.ops.outside import Outside


def refuses(op: str, *args: Any) -> str | None:
    from bitport.backends.xla.decode import unread

    return unread(args[9], args[10]) if op == "repack" else None


def kernel(op: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        from bitport.backends.xla.torchax_register import register

        with register().default_env():
            return OPS[op].overload(*args)

    return run


def device() -> Outside:
    if missing := [name for name in ("jax", "torchax") if importlib.util.find_spec(name) is None]:
        raise DeviceError(f"no device jax here: {' and '.join(missing)} not installed: pip install 'bitport[xla]'")
    from bitport.backends.xla.torchax_device import torchax_device

    return torchax_device(refuses)
