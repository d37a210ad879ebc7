"""The tensor class of torchao in which a scheme is written, with its attributes and the configuration that creates it::

    Int8Tensor                 int8 without zero points: rows, groups or one scale; inputs as int8 (rows, one scale)
    Int4Tensor                 int4 without zero points in groups, inputs as is; in groups of 128 with float8 inputs
    IntxUnpackedToInt8Tensor   other integers in rows or groups, a byte each; inputs as is or int8-asym
    Float8Tensor               float8 in rows or with one scale, inputs as is or likewise
    MXTensor                   mxfp8 and mxfp4, inputs likewise
    NVFP4Tensor                nvfp4, inputs as is or likewise

Scales of the last two are in the layout of tensor cores, as torchao creates them. It also has blocks of 128x128, but
cannot load the files that it saves with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bitport.checkpoint.dtypes import name_of
from bitport.interop.checks import FLOAT8
from bitport.interop.codec import same_numbers
from bitport.interop.torchao.inputs import MX
from bitport.interop.torchao.integers import INTX
from bitport.numerics import Format
from bitport.numerics.format import FLOAT8_SCALES
from bitport.schemes import PRESETS, Scheme
from bitport.schemes.presets import CHANNEL, TENSOR


def typed(kind: str, value: Any) -> dict[str, Any]:
    """An object of torchao: the name of its class, and its attributes or, for an enum or dtype, its value."""
    return {"_type": kind, "_data": value}


def config(kind: str, version: int = 1, **attributes: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": attributes}


class Form(NamedTuple):
    kind: str
    said: dict[str, Any]
    """Its attributes, except for the dtype and shape of the weight and of its blocks."""
    config: dict[str, Any]


ROW, TENSOR_WISE = config("PerRow", dim=-1), config("PerTensor")
INT8 = {"int8": ROW, "int8-asym": ROW, "int8-tensor": TENSOR_WISE}
FP8 = {"fp8": ROW, "fp8-tensor": TENSOR_WISE}
"""Rounding of inputs -> the granularity of their scales."""
AUTO = typed("KernelPreference", "AUTO")


def form_of(scheme: Scheme) -> Form | None:
    """The form of ``scheme``; None if torchao has none."""
    fmt = scheme.weight
    for elements, (name, rule) in MX.items():
        if same_numbers(fmt, PRESETS[name].weight):
            return _mx(elements, rule) if scheme.act == name else None
    if same_numbers(fmt, PRESETS["nvfp4"].weight):
        return _nvfp4(scheme.act) if scheme.act in ("", "nvfp4") and not scheme.static else None
    if scheme.static or fmt.scale in FLOAT8_SCALES or fmt.zero == "float":
        return None
    if fmt.dtype in FLOAT8.values():
        return _float8(fmt, scheme.act)
    if fmt.dtype not in INTX or (fmt.dtype == "int1" and fmt.zero == "none"):
        return None
    return _int8(fmt, scheme.act) or _int4(fmt, scheme.act) or _intx(fmt, scheme.act)


def _int8(fmt: Format, act: str) -> Form | None:
    group = fmt.block[1] if fmt.block[0] == 1 else 0
    per = {CHANNEL: ROW, TENSOR: TENSOR_WISE}.get(fmt.block, config("PerGroup", group_size=group) if group else None)
    if fmt.dtype != "int8" or fmt.zero != "none" or per is None:
        return None
    if not act:
        said: dict[str, Any] = {"act_quant_kwargs": None, "reduce_range": False}
        return Form("Int8Tensor", said, config("Int8WeightOnlyConfig", 2, granularity=per))
    if act not in INT8 or group:
        return None
    mapping = typed("MappingType", "ASYMMETRIC" if act == "int8-asym" else "SYMMETRIC")
    kwargs = {"granularity": _bare(INT8[act]), "mapping_type": mapping, "reduce_range": False}
    said = {"act_quant_kwargs": typed("QuantizeTensorToInt8Kwargs", kwargs), "reduce_range": False}
    both = {"act_mapping_type": mapping, "granularity": [INT8[act], per]}
    return Form("Int8Tensor", said, config("Int8DynamicActivationInt8WeightConfig", 2, **both))


def _int4(fmt: Format, act: str) -> Form | None:
    if fmt.dtype != "int4" or fmt.zero != "none" or fmt.block[0] != 1 or not fmt.block[1]:
        return None
    if not act:
        said = {"activation_dtype": typed("torch.dtype", "bfloat16")}
        return Form("Int4Tensor", said, config("Int4WeightOnlyConfig", 2, group_size=fmt.block[1]))
    if act != "fp8" or fmt.block[1] != 128:
        return None
    said = {"activation_dtype": typed("torch.dtype", "float8_e4m3fn")}
    return Form("Int4Tensor", said, config("Float8DynamicActivationInt4WeightConfig", int4_packing_format="plain"))


def _intx(fmt: Format, act: str) -> Form | None:
    if fmt.block[0] != 1 or act not in ("", "int8-asym"):
        return None
    dtype = typed("torch.dtype", fmt.dtype)
    per = config("PerGroup", group_size=fmt.block[1]) if fmt.block[1] else config("PerAxis", axis=0)
    mapping = typed("MappingType", "SYMMETRIC" if fmt.zero == "none" else "ASYMMETRIC")
    said = {"target_dtype": dtype, "activation_quantization": "int8_asym_per_token" if act else None}
    weight = {"weight_dtype": dtype, "granularity": per, "mapping_type": mapping}
    made = config("IntxWeightOnlyConfig", 2, **weight)
    if act:
        weight = {"weight_dtype": dtype, "weight_granularity": per, "weight_mapping_type": mapping}
        made = config("Int8DynamicActivationIntxWeightConfig", 2, **weight)
    return Form("IntxUnpackedToInt8Tensor", said, made)


def _float8(fmt: Format, act: str) -> Form | None:
    dtype = typed("torch.dtype", name_of(fmt.number.storage))
    said: dict[str, Any] = {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": AUTO}
    per = {CHANNEL: ROW, TENSOR: TENSOR_WISE}.get(fmt.block)
    if not act and per is not None:
        return Form("Float8Tensor", said, config("Float8WeightOnlyConfig", 2, weight_dtype=dtype, granularity=per))
    if per is None or FP8.get(act) != per or fmt.dtype != "float8_e4m3":
        return None
    mm = typed("Float8MMConfig", {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False})
    kwargs = {"float8_dtype": dtype, "granularity": _bare(per), "mm_config": mm} | {
        "hp_value_lb": None,
        "hp_value_ub": None,
        "kernel_preference": AUTO,
    }
    said |= {"mm_config": mm, "act_quant_kwargs": typed("QuantizeTensorToFloat8Kwargs", kwargs)}
    return Form("Float8Tensor", said, config("Float8DynamicActivationFloat8WeightConfig", 2, granularity=per))


def _mx(elements: str, rule: str) -> Form:
    dtype, mode = typed("torch.dtype", elements), typed("ScaleCalculationMode", rule)
    common = {"elem_dtype": dtype, "block_size": 32, "kernel_preference": AUTO, "is_swizzled_scales": True}
    said = {**common, "act_quant_kwargs": typed("QuantizeTensorToMXKwargs", {**common, "scaling_mode": mode})}
    both: dict[str, Any] = {"activation_dtype": dtype, "weight_dtype": dtype, "scaling_mode": mode}
    return Form("MXTensor", said, config("MXDynamicActivationMXWeightConfig", **both))


def _nvfp4(act: str) -> Form:
    common = {"block_size": 16, "is_swizzled_scales": True, "use_triton_kernel": False}
    kwargs = typed("QuantizeTensorToNVFP4Kwargs", {**common, "use_dynamic_per_tensor_scale": True})
    made = config("NVFP4DynamicActivationNVFP4WeightConfig", use_triton_kernel=False)
    if not act:
        return Form("NVFP4Tensor", {**common, "act_quant_kwargs": None}, config("NVFP4WeightOnlyConfig"))
    return Form("NVFP4Tensor", {**common, "act_quant_kwargs": kwargs}, made)


def _bare(found: Any) -> dict[str, Any]:
    """Without the version, which only configurations have."""
    return typed(found["_type"], found["_data"])
