r"""torch_xla's own quantized_matmul on the cases written by bench.xla_page, and bitport's on torch_xla's device.

    PJRT_DEVICE=CPU BITPORT_DISABLE=cpu,cuda,xpu,mps,triton PYTHONPATH=src \
        python bench/peers/torch_xla_rows.py CASES.pt RESULTS.json

Run this in an environment with torch_xla, which has torch 2.9. Importing bitport there only lacks F.grouped_mm, for
which a placeholder is defined.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch_xla
import torch_xla.experimental.xla_quantized_matmul


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    noise = (got.double() - exact).square().sum()
    return float(10 * (exact.square().sum() / noise).log10())


def attempt(op: Any, args: list[Any], exact: torch.Tensor, device: Any) -> Any:
    """SQNR in dB, or why there is none."""
    try:
        moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return round(sqnr(exact, op(*moved).cpu()), 1)
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]


def bitports_op() -> Any:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        torch.nn.functional.grouped_mm = None
    import bitport  # noqa: F401

    return torch.ops.bitport.quantized_matmul


def main() -> None:
    cases = torch.load(sys.argv[1], weights_only=True)
    theirs, xla = torch.ops.xla.quantized_matmul, torch_xla.device()
    routes = {"cpu": (theirs, torch.device("cpu")), "xla": (theirs, xla), "bitport": (bitports_op(), xla)}
    rows = {
        name: {route: attempt(op, case["args"], case["exact"], device) for route, (op, device) in routes.items()}
        for name, case in cases.items()
    }
    with open(sys.argv[2], "w") as file:
        json.dump({"torch": torch.__version__, "torch_xla": torch_xla.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
