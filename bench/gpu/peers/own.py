"""bitport: one variant per scheme, with the kernel that the selector chooses for this device."""

from __future__ import annotations

from bench import suites
from bench.peers import own

SCHEMES = (*suites.SCHEMES, "fp8-row", "fp8-block", "mxfp8", "nvfp4", "int4-fp8")
"""The schemes of the CPU, and those with hardware support on a GPU."""

PACKAGES: tuple[str, ...] = ()  # identified by the commit
VARIANTS = {scheme: suites.class_of(scheme) for scheme in SCHEMES}
prepare = own.prepare
