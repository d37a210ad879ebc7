"""torch_xla's own quantized_matmul on the cases that bench.xla_page wrote: run where torch_xla is, without bitport.

PJRT_DEVICE=CPU python torch_xla_rows.py CASES.pt RESULTS.json
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


def attempt(args: list[Any], exact: torch.Tensor, device: Any) -> Any:
    """SQNR in dB, or why there is none."""
    try:
        moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return round(sqnr(exact, torch.ops.xla.quantized_matmul(*moved).cpu()), 1)
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]


def main() -> None:
    cases = torch.load(sys.argv[1], weights_only=True)
    devices = {"cpu": torch.device("cpu"), "xla": torch_xla.device()}
    rows = {
        name: {kind: attempt(case["args"], case["exact"], device) for kind, device in devices.items()}
        for name, case in cases.items()
    }
    with open(sys.argv[2], "w") as file:
        json.dump({"torch": torch.__version__, "torch_xla": torch_xla.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
