"""Floats of AutoRound: layers are stored as another library stores them, with AutoRound's own settings::

    data_type    bits    group_size    inputs, if act_bits is below 16       stored as
    mx_fp        4, 8    32            the same numbers                      compressed-tensors: mxfp4, mxfp8
    nv_fp        4       16            the same, with a fixed global scale   compressed-tensors: nvfp4
    fp           8       any           activation_scheme                     transformers' fp8

A layer of mx_fp or nv_fp may have either, and other bits than the rest (``extra_config``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bitport.errors import CheckpointError
from bitport.interop import codec, compressed_tensors, float8
from bitport.interop.compressed_tensors.arguments import formats_of
from bitport.interop.compressed_tensors.groups import group_of
from bitport.interop.configuration import agreed, one_of, setting
from bitport.schemes import Scheme, preset

NAMES = {("mx_fp", 4): "mxfp4", ("mx_fp", 8): "mxfp8", ("nv_fp", 4): "nvfp4"}
"""(data_type, bits) -> scheme."""
KINDS = {"fp": ("fp",), "mx_fp": ("mx_fp", "mx_fp_rceil"), "nv_fp": ("nv_fp4_with_static_gs",)}
"""data_type -> those of inputs, act_data_type."""
FLOAT8 = ("activation_scheme", "weight_block_size", "fmt")
"""Settings of the files that are stored as transformers' fp8."""
KEPT = 16
"""The least number of bits that marks a layer, or its inputs, as not quantized."""


def reader_of(config: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], dtype: torch.dtype) -> codec.Reader:
    """The reader for a config with a data_type of KINDS. ``own``: regular expression -> settings of layers that are
    quantized otherwise."""
    if config["data_type"] != "fp":
        said = {"": config, **{pattern: {**config, **its} for pattern, its in own.items()}}
        groups = {
            pattern: group_of(scheme, [f"re:{pattern}" if pattern else "Linear"], *formats_of(scheme.weight))
            for pattern, scheme in ((pattern, _scheme(its, pattern)) for pattern, its in said.items())
        }
        return compressed_tensors.Reader({"config_groups": groups}, dtype)
    if own:
        raise CheckpointError(f"AutoRound in float8 with other settings for {', '.join(own)}: one for all is read")
    if (bits := setting(config, "bits", int, 8)) != 8:
        raise CheckpointError(f"AutoRound with data_type 'fp' of {bits} bits: 8 are read")
    theirs = {key: config[key] for key in FLOAT8 if key in config}
    if isinstance(config.get("group_size"), list):
        theirs["weight_block_size"] = agreed(config, ("weight_block_size", "group_size"), list)
    scheme = one_of(config, "activation_scheme", ("dynamic", "static"))
    theirs["activation_scheme"] = scheme if _rounds(config, "fp", bits, scheme == "dynamic") else None
    return float8.Reader(theirs, dtype)


def _scheme(said: Mapping[str, Any], pattern: str) -> Scheme:
    where = f"AutoRound with extra_config {pattern!r}" if pattern else "AutoRound"
    kind, bits = setting(said, "data_type", str), setting(said, "bits", int, 4)
    if (kind, bits) not in NAMES:
        kinds, told = dict.fromkeys(kind for kind, _ in NAMES), ", ".join(f"{kind} of {bits}" for kind, bits in NAMES)
        raise CheckpointError(f"{where}: data_type {kind!r} of {bits} bits beside {', '.join(kinds)}: {told} are read")
    name = NAMES[kind, bits]
    scheme = preset(name)
    if (group := setting(said, "group_size", int, scheme.weight.block[1])) != scheme.weight.block[1]:
        raise CheckpointError(f"{where}: {kind} in groups of {group}; those of {scheme.weight.block[1]} are read")
    return scheme if _rounds(said, kind, bits, True, where) else preset(f"{name}-wo")


def _rounds(said: Mapping[str, Any], kind: str, bits: int, dynamic: bool, where: str = "AutoRound") -> bool:
    """Whether inputs are rounded; CheckpointError if it is to other numbers than those of the weights. ``dynamic``:
    what act_dynamic must be."""
    rounded = setting(said, "act_bits", int, KEPT)
    if rounded >= KEPT:
        return False
    inputs = setting(said, "act_data_type", str, KINDS[kind][0])
    if rounded != bits or inputs not in KINDS[kind] or setting(said, "act_dynamic", bool, dynamic) != dynamic:
        raise CheckpointError(
            f"{where}: {kind} of {bits} bits with inputs in {inputs!r} of {rounded}; {' and '.join(KINDS[kind])} of "
            f"{bits} are read, with act_dynamic {dynamic}, or inputs of {KEPT} bits"
        )
    return True
