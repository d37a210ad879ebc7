"""A peer that fails in every way: it gives wrong results, refuses, raises, hangs, or kills its process."""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("torch",)
VARIANTS = {"good": "bf16"} | dict.fromkeys(("refuses", "raises", "crashes", "wrong", "slow"), "4-bit")


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    if variant == "refuses":
        return "it does not want to"

    def run(x: Tensor) -> Tensor:
        if variant == "raises":
            raise ValueError("no such product")
        if variant == "crashes" and x.shape[0] > 1:
            print("about to crash", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if variant == "slow":
            time.sleep(0.3 * x.shape[0])
        return x @ weight.t() * (2 if variant == "wrong" else 1)

    return Prepared([run] * copies, weight.double, weight.nbytes)
