"""What is measured."""

from __future__ import annotations

from bitport.evaluate.compare import BASELINE

NEAREST = "rtn"
SCHEMES = (
    *(BASELINE, "int8", "int4", "int3", "int2", "nf4", "int4-g32", "nvfp4", "mxfp4", "int6", "int5", "fp8", "int8-dyn"),
    *("int4-g32-fzero", "int4-sym", "int3-g32", "int2-g32", "mxfp8", "fp8-row"),
)
OWN = "int4-g32-fzero"
"""The scheme whose grid the file of the model has."""

ALGORITHMS = ("clip", "hqq", "gptq", "awq", "awq+gptq", "signround")
ALGORITHMS_OF = ("int4", "int3")
PLAN = (
    *((scheme, NEAREST) for scheme in SCHEMES),
    *((scheme, algorithm) for algorithm in ALGORITHMS for scheme in ALGORITHMS_OF),
)
GRIDS = (OWN, "int4-g32", "int4", "int3", "int2", "nf4", "mxfp4", "int6", "int8")
"""Schemes whose rounding errors are compared with those of weights that were not rounded before."""
