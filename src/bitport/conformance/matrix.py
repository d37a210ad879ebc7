"""The support matrix, scheme x device x dtype, from the results of conformance runs."""

from __future__ import annotations

from typing import Any

from bitport.ops import OPS

DEVICES = ("cpu", "cuda", "xpu", "mps", "tpu")
"""Devices that are always listed, those that bitport has kernels for; without a run the table says *not run*."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "float8 weight, float8 activation, tensor and row": ("fp8", "fp8-row"),
    "int4 weight (and 2 to 7 bits)": ("int4", "int2", "int3", "int5", "int6", "int7"),
    "int8 weight": ("int8",),
    "int8 weight, int8 activation, dynamic and static": ("int8-dyn", "int8-static"),
    "mxfp8": ("mxfp8",),
    "mxfp4, nvfp4, mxfp6": ("mxfp4", "nvfp4", "mxfp6"),
    "float8 128x128 blocks, 1x128 activation": ("fp8-block",),
    "int4 weight, int8 or float8 activation": ("int4-int8", "int4-fp8"),
    "float8 weight only": ("fp8-wo", "fp8-e5m2-wo"),
    "4-bit normal floats": ("nf4",),
}
"""Common name of a kind of quantization -> the presets that implement it."""

VARIANTS_OF = {
    "quantized_matmul": "the op of the PyTorch/XLA page, every row of its table and what it says No to",
    "int4pack_mm": "the tinygemm contract",
}

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

INTRODUCTION = """\
# Support matrix

Made by `make support` from `docs/support.json`; do not edit. Each cell is the worst signal-to-noise ratio in dB of all
results against a float64 product of the same quantized numbers, and in brackets by how much it exceeds its budget. The
budget is derived from the rounding of the dtype (`bitport.ops.samples`), so it is the same on every device.
**exact**: all bits agree. **-**: the op does not take that dtype. *not run*: the whole suite has not run on that device
yet; without kernels of its own a device computes the same by the generic kernel, with standard torch operations.
*refused*: layouts of other devices, which a device of another library cannot read.

The row cpu is of an x86 processor. The native kernels for 64-bit ARM have passed tests of their own in an emulator
(`make test-arm`), and in PyTorch 2.13 for ARM there those of every scheme, shape and instruction set
(`make test-arm-torch`); they have not run on hardware. Rows of torchax name what XLA compiled for: XLA:CPU is no TPU.
Each of their samples was computed twice, eagerly (`jax`) and compiled (`jax.jit`).

To add a device: `python -m bitport.conformance --device NAME --json docs/support.json`, then
`python -m bitport.conformance --table docs/support.json > docs/support.md` (`make support` does both for the CPU). The
device of torchax is called `jax`: `make support-xla`; `sim` is the example of a package of its own: `make support-sim`.
"""


OTHER_CHECKS = {
    "cuda": """\
The row cuda: on an NVIDIA H100 the kernels in Triton and in CUDA C++ passed tests of their own against float64, in
graphs and under `torch.compile` too (`python3 -m bench.gpu.pieces kernels tests`); that for int8 by 1 to 8 rows passed
them in an emulator alone. The suite has not run to its end there.
"""
}
"""Notes on devices without a run."""


def support_table(runs: dict[str, Any]) -> str:
    """Return the matrix in Markdown; ``runs`` is the saved JSON: device -> {"bitport", "torch", "rows"}."""
    devices = [*DEVICES, *sorted(set(runs) - set(DEVICES))]
    other = [text for device, text in OTHER_CHECKS.items() if device not in runs]
    parts = [INTRODUCTION, *other, _runs(devices, runs), "## Schemes\n", _header("asked for", "scheme")]
    for family, schemes in FAMILIES.items():
        lines = [line for scheme in schemes for line in _lines(scheme, runs, scheme_of=True)]
        parts += [f"| {family if at == 0 else ''} {line}" for at, line in enumerate(lines)]
    for op, title in VARIANTS_OF.items():
        parts += [f"\n## {op}: {title}\n", _header("variant")]
        subjects = dict.fromkeys(row["subject"] for run in runs.values() for row in run["rows"] if row["op"] == op)
        parts += [line for each in subjects for line in _lines(each, runs, scheme_of=False)]
    return "\n".join(parts) + "\n"


def _runs(devices: list[str], runs: dict[str, Any]) -> str:
    lines = ["| device | bitport | torch | samples | failed | refused |", "|---|---|---|---|---|---|"]
    for device in devices:
        if run := runs.get(device):
            samples = sum(row["samples"] for row in run["rows"])
            failed = sum(len(row["failures"]) for row in run["rows"])
            refused = sum(len(row.get("refused", ())) for row in run["rows"])
            lines.append(f"| {device} | {run['bitport']} | {run['torch']} | {samples} | {failed} | {refused} |")
        else:
            lines.append(f"| {device} | | | *not run* | | |")
    return "\n".join(lines) + "\n"


def _header(*first: str) -> str:
    names = (*first, "device", *DTYPES.values(), "ops", "kernels")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _lines(subject: str, runs: dict[str, Any], *, scheme_of: bool) -> list[str]:
    """Return one line per device that was run. ``scheme_of``: the subject is a scheme, which collects several ops, not
    a variant of one op."""
    lines = []
    for device, run in runs.items():
        rows = [row for row in run["rows"] if row["subject"] == subject and scheme_of == (row["op"] in WEIGHT_OPS)]
        if rows:
            cells = [_cell([row for row in rows if row["dtype"] == dtype]) for dtype in DTYPES]
            ops = ", ".join(dict.fromkeys(row["op"] for row in rows))
            kernels = ", ".join(dict.fromkeys(kernel for row in rows for kernel in row["kernels"]))
            lines.append(f"| {subject} | {device} | {' | '.join(cells)} | {ops} | {kernels} |")
    return lines


WEIGHT_OPS = tuple(name for name, op in OPS.items() if "data" in op.arguments and name != "repack")
"""Ops that take a quantized weight and compute with it."""


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    if failed := sum(len(row["failures"]) for row in rows):
        return f"**{failed} failed**"
    if not any(row["samples"] for row in rows):
        return "*refused*"
    rated = [row for row in rows if row["sqnr"] is not None]
    if not rated:
        return "**exact**"
    worst = min(rated, key=lambda row: row["margin"])
    return f"{worst['sqnr']:.0f} (+{worst['margin']:.0f})"
