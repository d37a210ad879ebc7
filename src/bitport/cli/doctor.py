"""``bitport doctor``: show what this installation has, what is missing, and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from bitport.cli import system
from bitport.cli.common import add_verb, show
from bitport.report.text import table


@dataclasses.dataclass(frozen=True)
class Extra:
    package: str
    install: str
    lost: str
    """What does not work without it."""


EXTRAS = (
    Extra("transformers", "pip install 'bitport[hf]'", "eval, compare, generate, explain, export, quantize --data"),
    Extra("tokenizers", "pip install 'bitport[hf]'", "reading text for eval, compare, generate, quantize --data"),
    Extra("gguf", "pip install 'bitport[gguf]'", "GGUF files with a tokenizer or with types IQ1 to IQ3"),
    Extra("diffusers", "pip install 'bitport[diffusers]'", "image and video models"),
    Extra("lm_eval", "pip install 'bitport[lm-eval]'", "eval --tasks"),
    Extra("onnx", "pip install 'bitport[onnx]'", "export --onnx"),
    Extra("executorch", "pip install 'bitport[executorch]'", "export --executorch"),
    Extra("triton", "pip install 'bitport[triton]'", "Triton kernels on GPUs; torch's own and generic kernels remain"),
    Extra("ml_dtypes", "pip install 'bitport[test]'", "test suite"),
    Extra("pytest", "pip install 'bitport[test]'", "test suite"),
)

VARIABLES = {
    "BITPORT_KERNEL": "forces kernels by name, such as generic, or linear=generic for one op",
    "BITPORT_CPU_ISA": "forces a variant of the native CPU kernels: scalar, avx2, avx512_vnni, avx512_bf16 or amx, on "
    "ARM neon, neon_dot or neon_matrix",
    "BITPORT_CACHE": "folder for the results of bitport tune (default: bitport in the user's cache folder)",
    "BITPORT_DISABLE": "does not load these backends, such as cpu,cuda",
}


def add_parser(verbs: Any) -> None:
    add_verb(
        verbs,
        "doctor",
        run,
        "Show what this installation can do. Devices, backends, kernels, layouts, and optional packages with the "
        "command that installs each. The exit code is 1 only if a backend is broken.",
        "",
        "--json",
    )


def run(args: argparse.Namespace) -> int:
    data = examine()
    show(args, data, _text(data))
    return 1 if data["backends"]["problem"] else 0


def examine() -> dict[str, Any]:
    backends = system.backends()
    devices = system.devices()
    return {
        "versions": system.versions(),
        "cpu": system.cpu(),
        "devices": devices,
        "backends": backends,
        "kernels": system.kernels([device["type"] for device in devices]),
        "kernels_elsewhere": system.elsewhere([device["type"] for device in devices]),
        "layouts": system.layouts(),
        "packages": [{**dataclasses.asdict(row), "version": system.installed_version(row.package)} for row in EXTRAS],
        "environment": system.environment(VARIABLES),
    }


def _text(data: dict[str, Any]) -> str:
    cpu, backends = data["cpu"], data["backends"]
    features = [f"{name}: {'yes' if has else 'no'}, {use}" for name, (has, use) in cpu["features"].items()]
    types = list(dict.fromkeys(device["type"] for device in data["devices"]))
    sections = [
        ("versions", [f"{name} {found}" for name, found in data["versions"].items()]),
        ("devices", [f"{device['device']}: {device['name']}" for device in data["devices"]]),
        ("CPU features", features or ["not known on this system"]),
        ("backends", _backends(**backends)),
        ("kernels, the first that takes a call runs it", _kernels(data["kernels"], types, data["kernels_elsewhere"])),
        ("layouts", [f"{row['name']}: {_layout_use(**row)}" for row in data["layouts"]]),
        ("optional packages", [_package(row) for row in data["packages"]]),
        ("environment", [f"{row['name']}={row['value']} ({row['meaning']})" for row in data["environment"]]),
    ]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines or ["none"])]) for title, lines in sections)


def _backends(loaded: list[str], installed: list[str], notes: dict[str, list[str]], problem: str | None) -> list[str]:
    said = [f"{name}: {line}" for name, lines in notes.items() for line in lines]
    return [", ".join(loaded) or "none", *said, *([problem] if problem else [])]


def _kernels(rows: list[dict[str, Any]], types: list[str], elsewhere: dict[str, int]) -> list[str]:
    by_op: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        by_op.setdefault(row["op"], {})[row["device"]] = row["kernels"]
    shown = table(("op", *types), [(op, *(", ".join(found[kind]) for kind in types)) for op, found in by_op.items()])
    slow = [kind for kind in types if all(len(found[kind]) == 1 for found in by_op.values())]
    notes = [f"{kind} has no kernels of its own: every op is computed correctly, but not fast" for kind in slow]
    if elsewhere:
        counts = ", ".join(f"{kind} ({count})" for kind, count in elsewhere.items())
        notes.append(f"and kernels for devices that are not here: {counts}")
    return [*shown.splitlines(), *notes]


def _layout_use(name: str, devices: list[str]) -> str:
    if name == "plain":
        return "canonical: on disk, between devices, and where no other is preferred"
    return f"preferred on {', '.join(devices)}" if devices else "on request"


def _package(row: dict[str, Any]) -> str:
    if row["version"]:
        return f"{row['package']} {row['version']}"
    return f"{row['package']} is missing: {row['install']}   without it: no {row['lost']}"
