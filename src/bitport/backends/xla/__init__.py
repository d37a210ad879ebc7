"""XLA and TPU: every op as one JAX function (functions.py), and thin adapters for the ways in which torch reaches XLA.

    torchax      device "jax"    torchax_ops.register(), by the user: its tensors never come to PyTorch's dispatcher;
                                 a kernel called "jax" for every op stands for what its environment does
    torch_tpu    device "tpu"    likewise, for PyTorch's dispatcher
    torch_xla    device "xla"    likewise

Importing this brings in no JAX; a kernel does when it is first asked for.
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
    """For ``bitport doctor``."""
    wanted = ("jax", "torchax", "torch_tpu", "torch_xla")
    found = [name for name in wanted if importlib.util.find_spec(name)]
    missing = [name for name in wanted if name not in found]
    lines = [f"found: {', '.join(found)}"] if found else []
    if "jax" in missing or "torchax" in missing:
        lines.append("not installed: " + ", ".join(missing) + "; pip install 'bitport[xla]' brings jax and torchax")
    return lines
