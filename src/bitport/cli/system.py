"""Capabilities of the machine, torch and the loaded backends, as data."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from bitport import plugins
from bitport.errors import BitportError
from bitport.layouts import LAYOUTS
from bitport.ops import IMPLS, OPS
from bitport.ops.select import GENERIC, own_kernel
from bitport.report.versions import installed_version, library_version

CPU_FEATURES = {
    "x86_64": {
        "avx2": "256-bit integer products",
        "avx512f": "512-bit vectors",
        "avx512_vnni": "int8 dot products",
        "avx512_bf16": "bf16 dot products",
        "amx_int8": "int8 matrix products",
        "amx_bf16": "bf16 matrix products",
    },
    "aarch64": {
        "asimd": "128-bit vectors",
        "asimddp": "int8 dot products",
        "i8mm": "int8 matrix products",
        "bf16": "bf16 matrix products",
        "sve": "scalable vectors",
    },
}
"""Machine -> flags of /proc/cpuinfo that kernels check, with their use."""


def versions() -> dict[str, str | None]:
    others = {name: installed_version(name) for name in ("torch", "safetensors", "numpy")}
    return {"bitport": library_version(), "python": platform.python_version(), **others}


def cpu() -> dict[str, Any]:
    """Facts about the CPU; ``features`` is empty without /proc/cpuinfo."""
    flags, model = _cpuinfo()
    known = CPU_FEATURES.get(platform.machine(), {})
    return {
        "machine": platform.machine(),
        "model": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "features": {name: (name in flags, use) for name, use in known.items()} if flags else {},
    }


def _cpuinfo() -> tuple[set[str], str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return set(), platform.processor()
    first: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        first.setdefault(name.strip(), value.strip())
    flags = first.get("flags", first.get("Features", ""))
    return set(flags.split()), first.get("model name", platform.processor())


def devices() -> list[dict[str, Any]]:
    """The CPU, then every accelerator that torch sees."""
    found = [{"device": "cpu", "type": "cpu", "name": cpu()["model"] or platform.machine()}]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        naming = getattr(module, "get_device_name", lambda index: accelerator.type)
        for index in range(torch.accelerator.device_count()):
            found.append({"device": f"{accelerator.type}:{index}", "type": accelerator.type, "name": naming(index)})
    return found


def backends() -> dict[str, Any]:
    """Load the backends. ``problem``: why one could not be loaded, or None; ``notes``: what each says about itself."""
    problem = None
    try:
        plugins.load()
    except BitportError as error:
        problem = f"broken: {error}"
    return {
        "loaded": list(plugins.loaded()),
        "installed": sorted(plugins.installed()),
        "notes": {} if problem else plugins.describe(),
        "problem": problem,
    }


def kernels(types: list[str]) -> list[dict[str, Any]]:
    """For every op and device type, the kernels in the order in which they are tried."""
    return [
        {
            "op": op,
            "device": kind,
            "kernels": [
                *([f"{kind}'s own"] if own_kernel(op, torch.device(kind)) else []),
                *(impl.name for impl in IMPLS.get((op, kind), [])),
                GENERIC,
            ],
        }
        for op in OPS
        for kind in dict.fromkeys(types)
    ]


def elsewhere(types: list[str]) -> dict[str, int]:
    """The number of kernels for each device type that is not among ``types``."""
    found: dict[str, int] = {}
    for (_, kind), impls in IMPLS.items():
        if impls and kind not in types:
            found[kind] = found.get(kind, 0) + len(impls)
    return found


def layouts() -> list[dict[str, Any]]:
    return [{"name": layout.name, "devices": list(layout.devices)} for layout in LAYOUTS.values()]


def environment(known: dict[str, str]) -> list[dict[str, str]]:
    """The environment variables that are set, including unknown ones starting with BITPORT_, which are likely typos."""
    names = [name for name in os.environ if name in known or name.startswith("BITPORT_")]
    return [
        {"name": name, "value": os.environ[name], "meaning": known.get(name, "bitport does not know this variable")}
        for name in sorted(names)
    ]
