"""Count the machine instructions per weight in the inner loop of a product, and derive its ceiling, without a GPU.

    python -m bench.gpu.instructions --target sm90 --schemes int4 int8 --rows 1 16

Kernels are compiled for the chip according to its table and disassembled. Products of few rows should be limited by
memory alone; this shows whether something else comes first. ``ceiling`` is weights per second if the busiest pipe never
stalled: not a time, which only the device can tell, but an upper bound. ``goal`` is the rate of a product that reaches
GOAL of the memory bandwidth, or of the matrix units if they are the limit; a loop has room if that is at most SHARE of
its ceiling, and is ``short`` otherwise. ``ahead`` is the number of bytes of codes that the programs of a multiprocessor
have in flight. A loop is assumed to be one step: one that ptxas has unrolled counts too high.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from bench.gpu.absent import SHARED, compiling
from bitport.backends.triton import kernels
from bitport.numerics import NUMBER_TYPES, quantize
from bitport.ops import Weight
from bitport.report.text import markdown
from bitport.schemes import preset

GOAL = 0.85
SHARE = 0.7
"""Share of a pipe's peak that a loop with barriers and dependences is expected to sustain. Assumed."""
LATENCY = 700e-9
"""Seconds from a load to its data under memory load. Assumed."""


class Chip(NamedTuple):
    multiprocessors: int
    clock: float
    bandwidth: float
    products: float
    """16-bit multiplications per second, by its matrix units."""
    floats: int
    """Threads whose float32 addition or multiplication a multiprocessor issues per clock."""


CHIPS = {
    "sm80": Chip(108, 1.41e9, 2.04e12, 156e12, 64),
    "sm90": Chip(132, 1.755e9, 3.35e12, 495e12, 128),
    "sm100": Chip(148, 1.85e9, 8.0e12, 1125e12, 128),
}
"""A100 with 80 GB, H100 SXM and B200, from their data sheets."""
REGISTERS = 65536
"""Of a multiprocessor, 32 bits each."""
PIPES = {
    "tensor": (0, r"\w*MMA|WARPGROUP"),
    "memory": (32, r"LD|ST|SHFL|RED|ATOM|UTMA"),
    "float": (128, r"FFMA|FADD|FMUL|IMAD"),
    "half": (64, r"HADD2|HFMA2|HMUL2"),
    "unpack": (64, r"F2FP\S*UNPACK"),
    "convert": (16, r"F2FP|F2F|F2I|I2F\b|MUFU"),
    "uniform": (0, r"U[A-Z]|R2UR|S2UR|BAR|BRA|NOP|DEPBAR|MEMBAR|FENCE|SYNCS|ELECT|WARPSYNC|VOTE|CCTL|ERRBAR|CALL"),
    "integer": (64, r""),
}
"""Pipe -> number of threads whose instructions a multiprocessor issues per clock, and the pattern of its opcodes; the
first match applies. From NVIDIA's programming guide, throughput of native arithmetic instructions, compute capability
8.0 to 10.0; the lowest where types or chips differ. 0: not a limit; float: see Chip; integer takes all others."""
ISSUE = 128
"""Threads' instructions of any kind per clock."""


class Loop(NamedTuple):
    name: str
    """Name of the kernel."""
    per_weight: dict[str, float]
    """Pipe, or "all" -> thread instructions per weight."""
    opcodes: Counter[str]
    registers: int
    spilled: int
    """Bytes of local memory."""
    shared: int
    ahead: float
    ceiling: float
    goal: float

    def has_room(self) -> bool:
        return self.goal <= SHARE * self.ceiling


def of(target: str, scheme: str, dtype: torch.dtype, rows: int, k: int = 4096) -> Loop:
    """The inner loop of the kernel that the chip's table chooses."""
    chosen = preset(scheme)
    parts = quantize(torch.randn(256, k, generator=torch.Generator().manual_seed(0)).to(dtype), chosen.weight)
    weight = Weight.of(parts, chosen.weight, 256, k)
    op = "dyn_linear" if chosen.act else "linear"
    args = (torch.zeros(rows, k, dtype=dtype), *weight, *((chosen.act, None) if chosen.act else ()), None)
    with compiling(target) as made:
        run = next(run for its, _, run, refuses in kernels.KERNELS if its == op and not refuses(*args))
        run(*args)
    kernel = next(each for each in made if each.name in ("gemv", "tiles"))
    moved = sum(part.nbytes for part in parts if part is not None) / (256 * k)
    chip = CHIPS[target]
    goal = GOAL * min(chip.bandwidth / moved, chip.products / rows)
    return counted(kernel, target, NUMBER_TYPES[weight.dtype].bits, goal)


def counted(kernel: CompiledKernel, target: str, bits: int, goal: float) -> Loop:
    chip, fixed = CHIPS[target], constants(kernel)
    threads, step = 32 * kernel.metadata.num_warps, fixed["BN"] * fixed["BK"]
    text, usage = disassembled(kernel)
    opcodes = Counter(inner_loop(text))
    found = Counter[str]()
    for opcode, count in opcodes.items():
        found[pipe_of(opcode)] += count
    per_weight = {name: count * threads / step for name, count in {"all": opcodes.total(), **found}.items()}
    limits = [ISSUE / per_weight["all"]]
    for name, (rate, _) in PIPES.items():
        rate = min(rate, chip.floats) if name == "float" else rate
        limits += [rate / per_weight[name]] if rate and per_weight.get(name) else []
    registers, spilled = int(usage["REG"]), int(usage["LOCAL"]) + int(usage["STACK"])
    held = min(REGISTERS // (-(-registers // 8) * 8 * threads), SHARED[target] // max(1, kernel.metadata.shared))
    stages = fixed.get("STAGES", kernel.metadata.num_stages)
    return Loop(
        kernel.name,
        per_weight,
        opcodes,
        registers,
        spilled,
        kernel.metadata.shared,
        held * (stages - 1) * step * bits / 8,
        min(limits) * chip.multiprocessors * chip.clock,
        goal,
    )


def constants(kernel: CompiledKernel) -> dict[str, Any]:
    source = kernel.src
    return {source.fn.arg_names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}


def pipe_of(opcode: str) -> str:
    return next(name for name, (_, pattern) in PIPES.items() if re.match(pattern, opcode))


def disassembled(kernel: CompiledKernel) -> tuple[str, dict[str, str]]:
    """(disassembly, resource usage: REG, STACK, LOCAL, ..)"""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text, usage = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    return text, dict(re.findall(r"(\w+):(\d+)", usage))


def inner_loop(text: str) -> list[str]:
    """Opcodes of the longest innermost loop."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s*/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            opcodes.append(found[1])
            to = re.search(r"`\((\.L\w+)\)", found[2]) if found[1].startswith("BRA") else None
            if to and labels.get(to[1], len(opcodes)) < len(opcodes) - 1:
                loops.append((labels[to[1]], len(opcodes)))
    begin, end = max((one for one in loops if not holds_another(one, loops)), key=lambda loop: loop[1] - loop[0])
    return opcodes[begin:end]


def holds_another(loop: tuple[int, int], loops: list[tuple[int, int]]) -> bool:
    return any(loop[0] <= begin and end <= loop[1] for begin, end in loops if (begin, end) != loop)


def rows_of_table(target: str, schemes: list[str], rows: list[int], dtype: torch.dtype) -> Iterator[list[str]]:
    for scheme in schemes:
        for m in rows:
            loop = of(target, scheme, dtype, m)
            loads = {name: count for name, count in loop.opcodes.items() if name.startswith(("LDG", "UTMA"))}
            yield [
                *(scheme, str(m), loop.name),
                *(f"{loop.per_weight.get(name, 0):.2f}" for name in ("all", *PIPES)),
                *(f"{loop.registers}", f"{loop.spilled}", f"{loop.shared >> 10} KiB", f"{loop.ahead / 1024:.0f} KiB"),
                *(f"{loop.ceiling / 1e12:.1f}", f"{loop.goal / 1e12:.1f}"),
                "" if loop.has_room() else "short",
                ", ".join(f"{name} {count}" for name, count in sorted(loads.items())),
            ]


HEADER = (
    *("scheme", "rows", "kernel", "all", *PIPES, "registers", "spilled", "shared", "ahead"),
    *("ceiling, T/s", "goal, T/s", "", "loads"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=CHIPS, default="sm90")
    parser.add_argument("--schemes", nargs="+", default=["int4", "int4-g32", "int8", "nf4", "fp8-wo", "mxfp4-wo"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args()
    found = rows_of_table(options.target, options.schemes, options.rows, getattr(torch, options.dtype))
    print(markdown(HEADER, found, words=(0, 2, len(HEADER) - 2, len(HEADER) - 1)))


if __name__ == "__main__":
    main()
