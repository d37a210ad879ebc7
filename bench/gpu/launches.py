"""Host overhead of a product before the GPU starts: ``python -m bench.gpu.launches``; no GPU is needed.

Kernels are compiled for the target but not launched, so a call only measures Python: choosing the kernel, its blocks
and splits, allocating the result, and Triton's own part up to the launch. In microseconds, the minimum of several
turns, along with a PyTorch product of a single number on the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu.absent import TARGETS, compiling
from bitport.backends.triton.kernels import KERNELS
from bitport.report.text import table
from bitport.schemes import preset
from tests.backends.products import products

SCHEMES = ("int4", "int8", "nf4", "int8-dyn", "fp8-row", "mxfp4")
TURNS, CALLS = 7, 100


def chosen(op: str, *args: Any) -> Any:
    """Run the Triton kernel that accepts the call, asking them in the order of bitport.ops.select."""
    for name, _, run, refuses in KERNELS:
        if name == op and refuses(*args) is None:
            return run(*args)
    raise AssertionError(f"no kernel takes {op}")


def least(call: Callable[[], Any]) -> float:
    call()
    spent = []
    for _ in range(TURNS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        spent.append((time.process_time() - start) / CALLS)
    return 1e6 * min(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=sorted(TARGETS), default="sm90")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    given = parser.parse_args()
    one = torch.ones(1, 1)
    lines = [("F.linear of one number", "-", f"{least(lambda: F.linear(one, one)):.1f}")]
    for scheme in given.schemes:
        for rows in (1, 64):
            (sample,) = products(scheme, torch.bfloat16, "plain", n=1024, k=1024, m=rows)
            op = "dyn_linear" if preset(scheme).act else "linear"
            with compiling(given.target):
                spent = least(lambda op=op, args=sample.args: chosen(op, *args))  # type: ignore[misc]
            lines.append((scheme, str(rows), f"{spent:.1f}"))
    print(table(("scheme", "rows", "microseconds"), lines))


if __name__ == "__main__":
    main()
