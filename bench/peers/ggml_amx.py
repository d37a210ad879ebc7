"""ggml's products for AMX tiles. A peer of its own: where they crash, the others should not have to start again."""

from __future__ import annotations

from bench.peers.ggml import PACKAGES, prepare

__all__ = ["PACKAGES", "VARIANTS", "prepare"]

VARIANTS = {"Q4_0 amx": "4-bit x int8", "Q4_K amx": "4-bit x int8", "Q8_0 amx": "8-bit x int8"}
