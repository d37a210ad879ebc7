"""A peer that shows what can go wrong: it is wrong, refuses, raises, or takes its process down."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from bench.peers.base import Prepared

PACKAGES = ("torch",)
VARIANTS = {"good": "bf16", "refuses": "4-bit", "raises": "4-bit", "crashes": "4-bit", "wrong": "4-bit"}


def prepare(variant: str, weight: Tensor, group: int, copies: int) -> Prepared | str:
    if variant == "refuses":
        return "it does not want to"

    def run(x: Tensor) -> Tensor:
        if variant == "raises":
            raise ValueError("no such product")
        if variant == "crashes" and x.shape[0] > 1:
            print("about to crash", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return x @ weight.t() * (2 if variant == "wrong" else 1)

    return Prepared([run] * copies, weight.double, weight.nbytes)
