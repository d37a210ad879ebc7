"""What is public, and what users may expect of it: the one place that says so. tools/reference.py makes the page."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

STABLE, BACKENDS, EXPERIMENTAL = "stable", "for backends", "experimental"

POLICY = f"""\
Every name to rely on; others may change with any version. How far to rely on it stands beside each module, and beside
the names in it of which something else is true:

- **{STABLE}**: what programs are written with. No patch release changes it. A minor release may deprecate a name, an
  argument or a behavior: it works as before, with a `FutureWarning` that says what to use instead, and stands under
  "Deprecated" in the changelog. The next minor release at the earliest removes it; after 1.0, only a major one.
- **{BACKENDS}**: what packages of device vendors import ([the contract](../src/bitport/backends/README.md)) to register
  kernels and layouts, and what these get. Until 1.0 a minor release may change it without a deprecation, and the
  changelog says what to do. So such a package should ask for the minor version that it was tested with, as in
  `bitport>=0.1,<0.2`. After 1.0 it is as stable as the rest.
- **{EXPERIMENTAL}**: new, or a part of the inside that others may look at and build on. Any release may change or
  remove it, and the changelog says so.

Further fields, arguments with defaults, and entries of tables are no such change. Files have
[a promise of their own](formats.md#what-later-versions-read)."""

MODULES = {
    "bitport": STABLE,
    "bitport.schemes": STABLE,
    "bitport.algorithms": STABLE,
    "bitport.checkpoint": STABLE,
    "bitport.stream": EXPERIMENTAL,
    "bitport.interop": STABLE,
    "bitport.train": STABLE,
    "bitport.train.optim": STABLE,
    "bitport.cache": STABLE,
    "bitport.nn": STABLE,
    "bitport.evaluate": STABLE,
    "bitport.report": STABLE,
    "bitport.export": EXPERIMENTAL,
    "bitport.integrations.huggingface": STABLE,
    "bitport.integrations.transformers": STABLE,
    "bitport.integrations.diffusers": STABLE,
    "bitport.integrations.kv_cache": STABLE,
    "bitport.integrations.lm_eval": STABLE,
    "bitport.ops": BACKENDS,
    "bitport.ops.outside": BACKENDS,
    "bitport.layouts": BACKENDS,
    "bitport.numerics": BACKENDS,
    "bitport.calibrate.inputs": EXPERIMENTAL,
    "bitport.calibrate.processes": EXPERIMENTAL,
    "bitport.conformance": BACKENDS,
    "bitport.errors": STABLE,
}
"""In the order of the page: what most users need, then what those need who bring kernels and devices."""

OTHERWISE = {
    EXPERIMENTAL: {
        "bitport.schemes": ("Target",),
        "bitport.algorithms": ("Algorithm", "TRANSFORMS", "Transform"),
        "bitport.checkpoint": ("Arrangement", "Entry", "Part", "Writer"),
        "bitport.interop": ("READERS", "WRITERS"),
        "bitport.train": ("GRADIENTS", "Gradients", "TrainedTensor"),
        "bitport.train.optim": ("STATES",),
        "bitport.cache": ("KeyValueStore", "StaticStore"),
        "bitport.integrations.kv_cache": ("StaticKVCache",),
        "bitport.nn": ("find_targets",),
        "bitport.ops": ("IMPLS",),
    },
    STABLE: {"bitport.numerics": ("ACTIVATIONS", "Format", "NUMBER_TYPES")},
}
"""Names that are something else than the rest of their module."""

SOME = {
    "bitport.calibrate.inputs": ("Inputs",),
    "bitport.calibrate.processes": ("Processes",),
    "bitport.ops.outside": ("OUTSIDE", "Outside", "outside"),
    "bitport.numerics": (
        *("ACTIVATIONS", "NUMBER_TYPES", "Format", "NumberType", "Params", "Quantized", "activation_format"),
        *("number_type", "choose_qparams", "quantize", "quantize_codes", "dequantize", "dequantize_codes"),
        *("fake_quantize", "pack_bits", "unpack_bits", "from_storage", "to_storage", "sqnr"),
    ),
}
"""Modules of which others need only these names."""


def names(module: str) -> Sequence[str]:
    return SOME.get(module) or importlib.import_module(module).__all__


def standing(module: str, name: str) -> str:
    other = (kind for kind, modules in OTHERWISE.items() if name in modules.get(module, ()))
    return next(other, MODULES[module])
