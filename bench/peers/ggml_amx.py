"""ggml's products for AMX tiles. A peer of its own, since they were seen to crash: that must not take the others along."""

from __future__ import annotations

from bench.peers.ggml import PACKAGES, prepare

__all__ = ["PACKAGES", "VARIANTS", "prepare"]

VARIANTS = {"Q4_0 amx": "4-bit x int8", "Q4_K amx": "4-bit x int8", "Q8_0 amx": "8-bit x int8"}
