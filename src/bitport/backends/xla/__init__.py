"""XLA and TPU: every op as one JAX function (functions.py), with thin adapters for the ways from torch to XLA.

    torchax      device "jax"    the user calls torchax_ops.register(): its tensors never reach PyTorch's dispatcher, so
                                 for every op a kernel called "jax" stands for what its environment does
    torch_tpu    device "tpu"    a kernel called "jax" for every op, through PyTorch's dispatcher
    torch_xla    device "xla"    likewise

Importing this does not import JAX; kernels do when they are first used.
"""

from __future__ import annotations

import importlib.util
from functools import partial

from bitport.backends.xla import k_major, torch_tpu_ops, torch_xla_ops, torchax_kernels
from bitport.layouts import register_layout
from bitport.ops import OPS, Impl, register_kernel
from bitport.ops.outside import OUTSIDE

register_layout(k_major.KMajor())
OUTSIDE["jax"] = torchax_kernels.device
for _op in OPS:
    register_kernel(Impl(_op, "jax", "jax", torchax_kernels.kernel(_op), partial(torchax_kernels.refuses, _op)))
    register_kernel(Impl(_op, "jax", "xla", torch_xla_ops.kernel(_op), torch_xla_ops.refuses))
    register_kernel(Impl(_op, "jax", "tpu", torch_tpu_ops.kernel(_op), torch_tpu_ops.refuses))


def describe() -> list[str]:
    """Describe the installed libraries for ``bitport doctor``."""
    wanted = ("jax", "torchax", "torch_tpu", "torch_xla")
    found = [name for name in wanted if importlib.util.find_spec(name)]
    missing = [name for name in wanted if name not in found]
    lines = [f"found: {', '.join(found)}"] if found else []
    if "jax" in missing or "torchax" in missing:
        lines.append("not installed: " + ", ".join(missing) + "; pip install 'bitport[xla]' brings jax and torchax")
    return lines
