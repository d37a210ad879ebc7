"""ggml's products for AMX tiles: a separate peer, so that a crash does not restart the others."""

from __future__ import annotations

from bench.peers.ggml import PACKAGES, prepare

__all__ = ["PACKAGES", "VARIANTS", "prepare"]

VARIANTS = {"Q4_0 amx": "4-bit x int8", "Q4_K amx": "4-bit x int8", "Q8_0 amx": "8-bit x int8"}
