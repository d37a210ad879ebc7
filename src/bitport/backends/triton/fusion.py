"""Whether the compiler may contract a multiplication and an addition to an fma. Every launch sets this explicitly: by
default Triton up to 3.9 does, the last of these with a warning, and later versions do not."""

from __future__ import annotations

FUSED = {"enable_fp_fusion": True}
"""For sums of products, which otherwise take twice as many instructions."""
EXACT = {"enable_fp_fusion": False}
"""For quantization, whose steps must each round by itself, as in numerics."""
