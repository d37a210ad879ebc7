"""What is measured."""

from __future__ import annotations

from bitport.evaluate.algorithms import MIXED
from bitport.evaluate.compare import BASELINE

NEAREST = "rtn"
SCHEMES = (
    *(BASELINE, "int8", "int4", "int3", "int2", "nf4", "int4-g32", "nvfp4", "mxfp4", "int6", "int5", "fp8", "int8-dyn"),
    *("int4-g32-fzero", "int4-sym", "int3-g32", "int2-g32", "mxfp8", "fp8-row"),
)
OWN = "int4-g32-fzero"
"""The scheme whose grid the file of the model has."""

ALGORITHMS = {
    "int4": ("clip", "hqq", "gptq", "awq", "awq+gptq", "signround", MIXED),
    "int3": ("clip", "hqq", "gptq", "awq", "awq+gptq", "signround", MIXED),
    "int2": ("clip", "hqq", "gptq", "awq", "awq+gptq"),
    "nvfp4": ("smooth", "gptq", "smooth+gptq"),
    "mxfp4": ("smooth", "gptq", "smooth+gptq"),
}
"""Of two bits without signround, which takes long; of float4 those that help rounded inputs too, without rotation,
which needs an output head that is not tied."""

REFERENCE_SCHEMES = ("int4-g64", "int3-g64")
"""In groups of 64: llm-compressor refuses weights whose width is no multiple of the group, and here that is 9 * 64."""
MSE = "mse+"
REFERENCE_ALGORITHMS = {"gptq": "gptq", f"{MSE}gptq": "gptq", "awq": "awq"}
"""Of llm-compressor, and what is closest to it here. "mse+": after its search for ranges, which GPTQ has here."""

PLAN = (
    *((scheme, NEAREST) for scheme in SCHEMES),
    *((scheme, algorithm) for scheme, algorithms in ALGORITHMS.items() for algorithm in algorithms),
    *((scheme, each) for scheme in REFERENCE_SCHEMES for each in dict.fromkeys(REFERENCE_ALGORITHMS.values())),
)
REFERENCE_PLAN = tuple((scheme, algorithm) for scheme in REFERENCE_SCHEMES for algorithm in REFERENCE_ALGORITHMS)
GRIDS = (OWN, "int4-g32", "int4", "int3", "int2", "nf4", "mxfp4", "int6", "int8")
"""Schemes whose rounding errors are compared with those of weights that were not rounded before."""
