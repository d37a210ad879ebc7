"""The rounding of inputs in torchao, as an activation of bitport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bitport.interop.torchao.header import Entry

SYMMETRIC = "bitport rounds inputs to int8 with the scale amax / 127, torchao with amax / 127.5"
SEVEN_BITS = "inputs are rounded to all 8 bits, where torchao left one free for some processors (reduce_range)"
POWERS = "scales of inputs are rounded to powers of two by bitport's rule, not by scaling_mode of torchao"
MX = {"float8_e4m3fn": ("mxfp8", "RCEIL"), "float4_e2m1fn_x2": ("mxfp4", "EVEN")}
"""Type of elements -> the scheme, and the rule for scales of inputs that is bitport's."""


class Inputs(NamedTuple):
    act: str = ""
    static: bool = False
    note: str = ""


def inputs_of(entry: Entry) -> Inputs:
    """The rounding of inputs for a tensor; CheckpointError if it is not supported."""
    if entry.kind == "Int4Tensor":
        return _choice(entry, "activation_dtype", {None: "", "bfloat16": "", "float16": "", "float8_e4m3fn": "fp8"})
    if entry.kind == "IntxUnpackedToInt8Tensor":
        known = {None: "", "INT8_ASYM_PER_TOKEN": "int8-asym", "int8_asym_per_token": "int8-asym"}
        return _choice(entry, "activation_quantization", known)
    said = entry.said.get("act_quant_kwargs")
    if said is None:
        return Inputs()
    kind = said.get("_type") if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise entry.fail("act_quant_kwargs", f"{', '.join(KINDS)} are read")
    rounding, read = KINDS[kind]
    found = rounding(said, entry)
    if found is None:
        raise entry.fail("act_quant_kwargs", f"read is {read}")
    return found


def _choice(entry: Entry, key: str, known: Mapping[str | None, str]) -> Inputs:
    value = entry.said.get(key)
    if not isinstance(value, (str, type(None))) or value not in known:
        raise entry.fail(key, f"{', '.join(str(each) for each in known)} are read")
    return Inputs(known[value])


def _int8(said: Mapping[str, Any], entry: Entry) -> Inputs | None:
    per, mapping = _granularity(said), said.get("mapping_type", "SYMMETRIC")
    static = "act_quant_scale" in entry.parts
    note = SEVEN_BITS if said.get("reduce_range") else SYMMETRIC if mapping == "SYMMETRIC" and not static else ""
    if mapping == "SYMMETRIC" and per == "tensor":
        return Inputs("int8-tensor", static, note)
    acts = {"SYMMETRIC": "int8", "ASYMMETRIC": "int8-asym"}
    if per != "row" or static or not isinstance(mapping, str) or mapping not in acts:
        return None
    return Inputs(acts[mapping], False, note)


def _float8(said: Mapping[str, Any], entry: Entry) -> Inputs | None:
    acts = {"row": "fp8", "tensor": "fp8-tensor", "128": "fp8-128"}
    act = acts.get(_granularity(said))
    bounds = (said.get("hp_value_lb"), said.get("hp_value_ub"))
    if act is None or bounds != (None, None) or said.get("float8_dtype", "float8_e4m3fn") != "float8_e4m3fn":
        return None
    return Inputs(act)


def _mx(said: Mapping[str, Any], entry: Entry) -> Inputs | None:
    dtype = said.get("elem_dtype", "float8_e4m3fn")
    if not isinstance(dtype, str) or dtype not in MX or said.get("block_size", 32) != 32:
        return None
    act, rule = MX[dtype]
    return Inputs(act, False, "" if said.get("scaling_mode", "FLOOR") == rule else POWERS)


def _nvfp4(said: Mapping[str, Any], entry: Entry) -> Inputs | None:
    if said.get("block_size", 16) != 16:
        return None
    return Inputs("nvfp4", said.get("use_dynamic_per_tensor_scale") is not True)


def _granularity(said: Mapping[str, Any]) -> str:
    """The granularity: row, tensor, 128, or "" for any other."""
    found = said.get("granularity", {"_type": "PerRow"})
    if not isinstance(found, dict):
        return ""
    if found.get("_type") == "PerBlock" and found.get("block_size") == [1, 128]:
        return "128"
    whole = {"PerTensor": "tensor", "PerToken": "row", "PerRow": "row" if found.get("dim", -1) == -1 else ""}
    return whole.get(str(found.get("_type")), "")


KINDS: dict[str, tuple[Callable[[Mapping[str, Any], Entry], Inputs | None], str]] = {
    "QuantizeTensorToInt8Kwargs": (
        _int8,
        "PerRow, and PerTensor if it is symmetric; a fixed scale for PerTensor alone",
    ),
    "QuantizeTensorToFloat8Kwargs": (_float8, "e4m3 without bounds by PerRow, PerTensor or PerBlock [1, 128]"),
    "QuantizeTensorToMXKwargs": (_mx, "e4m3 or e2m1 in blocks of 32"),
    "QuantizeTensorToNVFP4Kwargs": (_nvfp4, "e2m1 in blocks of 16"),
}
"""Class -> the function that reads it, None for what it does not know, and what it knows."""
