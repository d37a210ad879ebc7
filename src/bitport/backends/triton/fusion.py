"""Whether the compiler may make one instruction of a product and a sum. Each launch says it: unless told, Triton up to
3.9 does, with a warning of the last of these, and later versions do not."""

from __future__ import annotations

FUSED = {"enable_fp_fusion": True}
"""For sums of products, which take twice as many instructions otherwise."""
EXACT = {"enable_fp_fusion": False}
"""For rounding, whose steps are those of numerics, each rounded by itself."""
