"""The quantization_config of AMD Quark: for each layer a specification of its weight and one of its inputs::

    dtype         int4, uint4, int8, uint8, fp8_e4m3, fp6_e2m3, fp4
    qscheme       per_tensor; per_channel (ch_axis: the axis with a scale per index); per_group (group_size);
                  per_block (block_size)
    scale_format  e8m0 if scales are powers of two
    is_dynamic    inputs: whether scales are computed on each call
    symmetric     whether there is no zero point

A list of two specifications is nvfp4: that of the numbers, and that of their scales. A layer has the first
specification in layer_quant_config whose name or pattern matches, else that of its class, else the global one.

They are translated to the equivalent arguments of compressed-tensors.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from bitport.errors import CheckpointError
from bitport.interop.compressed_tensors.arguments import activation_of, format_of, formats_of, scheme_of
from bitport.interop.configuration import compiled, refuse_unknown, setting
from bitport.numerics import ACTIVATIONS
from bitport.schemes import Scheme

DTYPES = {
    **{name: ("int", 4) for name in ("int4", "uint4")},
    **{name: ("int", 8) for name in ("int8", "uint8")},
    **{"fp8_e4m3": ("float", 8), "fp6_e2m3": ("float", 6), "fp4": ("float", 4)},
}
STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_block": "block"}
POWERS = {"scale_format": "e8m0", "scale_type": "float8_e8m0fnu"}
"""Either of them means that scales are powers of two."""
FLOAT_SCALES = {"scale_format": ("float32",), "scale_type": ("float", "float32", "pof2")}
AXES = {"channel": (0,), "token": (1,), "group": (1, -1)}
"""The allowed values of ch_axis: inputs are treated as [sequences, tokens, K]."""
SPECIFICATION = {
    *("dtype", "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "is_dynamic", "is_scale_quant"),
    *("scale_format", "scale_type", "scale_calculation_mode", "mx_element_dtype", "zero_point_type"),
    *("observer_cls", "round_method", "qat_spec", "enable_buffer_reuse", "max_input_numel"),
}
LAYER = {"weight", "input_tensors", "output_tensors", "bias", "target_device"}
READ = {
    *("quant_method", "export", "global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude"),
    *("algo_config", "softmax_quant_spec", "kv_cache_quant_config", "kv_cache_group"),
}
NO_NUMBERS = {
    *("version", "quant_mode", "kv_cache_post_rope", "min_kv_scale", "log_severity_level", "shared_scale_groups"),
    *("quant_flow", "gpu_resident_blocks", "sync_moe_expert_input_amax", "keep_prequantized_layers"),
}
"""Settings without effect on the numbers of a weight."""
CHOOSING = ("smooth", "awq", "gptq", "gptaq", "autosmoothquant", "autoround", "qronos")
"""Algorithms that only choose numbers."""
ROTATION, ON_CALLS = "rotation", ("r3", "r4", "online_r1_rotation")
"""Rotations of inputs that are applied on each call."""
QUERIES = "q_proj"
"""The projection whose outputs are also rounded if keys and values are."""
USUAL = "even"
"""The default of scale_calculation_mode."""
PACKING = {"reorder": True, "order": False}
"""pack_method -> whether 4-bit codes are in the order of AWQ."""


@dataclasses.dataclass(frozen=True)
class Layer:
    scheme: Scheme
    """For integers, that without zero points."""
    signed: bool
    symmetric: bool
    upright: bool
    """Whether the weight and its scales are [N, K] in the file; groups of integers are not."""
    note: str


class Settings:
    """The settings of modules in a quantization_config, which is validated as a whole."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _check_algorithms(config)
        export = setting(config, "export", dict)
        stored, packing = setting(export, "weight_format", str), setting(export, "pack_method", str)
        if stored != "real_quantized" or packing not in PACKING:
            raise CheckpointError(
                f"Quark with weight_format {stored!r} and pack_method {packing!r}: real_quantized in "
                f"{' or '.join(PACKING)} is read"
            )
        self.reordered = PACKING[packing]
        self.cached = [
            *setting(export, "kv_cache_group", list, []),
            *setting(config, "kv_cache_group", list, []),
            *setting(config, "kv_cache_quant_config", dict, {}),
        ]
        excluded = setting(config, "exclude", list, [])
        self.excluded = {each for each in excluded if isinstance(each, str) and not _fits_more(each)}
        self.patterns = [_pattern(each) for each in excluded if not isinstance(each, str) or _fits_more(each)]
        own = setting(config, "layer_quant_config", dict, {})
        classes = setting(config, "layer_type_quant_config", dict, {})
        self.own = {name: _layer(setting(own, name, dict), f"layer_quant_config of {name}") for name in own}
        self.places = {name: at for at, name in enumerate(own)}
        self.globs = [name for name in own if _fits_more(name)]
        self.classes = {name: _layer(setting(classes, name, dict), f"the {name} layers") for name in classes}
        self.common = _layer(setting(config, "global_quant_config", dict), "global_quant_config")
        every = {"global_quant_config": config["global_quant_config"], **classes, **own}
        for name in (name for name, said in every.items() if said.get("output_tensors")):
            cached = any(fnmatch.fnmatchcase(name, str(pattern)) for pattern in self.cached)
            if not cached and not (self.cached and name.endswith(QUERIES)):
                raise CheckpointError(
                    f"quantization_config: {name} has output_tensors, and is no cache of keys and values; bitport "
                    f"rounds what goes into a product, not its result"
                )
        layers = [self.common, *self.classes.values(), *self.own.values()]
        self.notes = list(dict.fromkeys(layer.note for layer in layers if layer and layer.note))

    def of(self, module: str) -> Layer:
        """The settings of a ``module`` with quantized tensors; CheckpointError if the config says that it is not
        quantized."""
        if module in self.excluded or any(pattern.match(module) for pattern in self.patterns):
            raise CheckpointError(f"{module} has quantized tensors, and quantization_config excludes it")
        fits = [name for name in self.globs if fnmatch.fnmatchcase(module, name)][:1]
        fits += [module] if module in self.own else []
        name = min(fits, key=self.places.__getitem__, default=None)
        found = self.classes.get("Linear", self.common) if name is None else self.own[name]
        if found is None:
            raise CheckpointError(f"{module} has quantized tensors, and quantization_config does not say of which kind")
        return found


def _layer(said: dict[str, Any], what: str) -> Layer | None:
    refuse_unknown(said, LAYER, what)
    if said.get("bias"):
        raise CheckpointError(f"{what} has a quantized bias, which bitport has no form for")
    weight, inputs = (_specifications(said, key, what) for key in ("weight", "input_tensors"))
    if not weight:
        if inputs:
            raise CheckpointError(f"{what} has input_tensors without a weight, for which bitport has no form")
        return None
    told = _arguments(weight, f"the weight in {what}")
    if told.pop("dynamic"):
        raise CheckpointError(f"the weight in {what} is dynamic: it has no scales of its own")
    fmt = format_of(told | {"symmetric": True}, f"the weight in {what}")
    stored = formats_of(fmt)
    dtype, groups = weight[0]["dtype"], told["strategy"] == "group"
    powers = weight[0].get("scale_format") == POWERS["scale_format"]
    if not stored or (fmt.dtype == "int4" and told["strategy"] == "tensor") or (powers and fmt.scale != "e8m0"):
        scaled = f", scales {POWERS['scale_format']}" if powers else ""
        raise CheckpointError(f"the weight in {what}: {dtype} {weight[0]['qscheme']}{scaled} is not read")
    act, static = ("", False)
    if inputs:
        act, static = activation_of(_arguments(inputs, f"the inputs of {what}", inputs=True), f"the inputs of {what}")
    integers = fmt.number.kind == "int"
    return Layer(
        scheme_of(fmt, stored[0], act, static),
        signed=not dtype.startswith("u"),
        symmetric=not integers or told["symmetric"],
        upright=not (integers and groups),
        note=_note(act, inputs),
    )


def _note(act: str, inputs: list[dict[str, Any]]) -> str:
    fmt = ACTIVATIONS.get(act)
    mode = inputs[0].get("scale_calculation_mode") or USUAL if inputs else ""
    if fmt is None or fmt.scale != "e8m0" or fmt.scale_rule == mode:
        return ""
    return f"the powers of two that scale {act} inputs are chosen by {mode!r} there, and by {fmt.scale_rule!r} here"


def _specifications(said: Mapping[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    found = setting(said, key, (dict, list), [])
    each = found if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in each):
        raise CheckpointError(f"{what}: {key} must be a specification or a list of them, not {found!r}")
    return each


def _arguments(said: list[dict[str, Any]], what: str, *, inputs: bool = False) -> dict[str, Any]:
    """The equivalent arguments of compressed-tensors."""
    if len(said) == 2:
        return _two_levels(said, what, inputs)
    if len(said) != 1:
        raise CheckpointError(f"{what} has {len(said)} levels of scales: one is read, and two of nvfp4")
    spec = said[0]
    refuse_unknown(spec, SPECIFICATION, what)
    dtype, qscheme = setting(spec, "dtype", str), setting(spec, "qscheme", str)
    if dtype not in DTYPES or qscheme not in STRATEGIES or (inputs and dtype.startswith("u")):
        raise CheckpointError(
            f"{what}: dtype {dtype!r} with qscheme {qscheme!r}; {', '.join(DTYPES)} are read, {', '.join(STRATEGIES)}"
        )
    for key, known in FLOAT_SCALES.items():
        if spec.get(key) not in (None, POWERS[key], *known):
            raise CheckpointError(f"{what}: {key} {spec[key]!r}; {', '.join((POWERS[key], *known))} are read")
    if setting(spec, "zero_point_type", str, "int32") != "int32" or setting(spec, "is_scale_quant", bool, False):
        raise CheckpointError(f"{what} has zero points that are no integers, or is that of scales")
    strategy = "token" if inputs and qscheme == "per_channel" else STRATEGIES[qscheme]
    axis = setting(spec, "ch_axis", int, None)
    if axis is not None and strategy in AXES and axis not in AXES[strategy]:
        raise CheckpointError(
            f"{what}: {qscheme} with ch_axis {axis}; {' and '.join(map(str, AXES[strategy]))} is read"
        )
    kind, bits = DTYPES[dtype]
    return {
        "type": kind,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": kind == "float" or setting(spec, "symmetric", bool),
        "group_size": setting(spec, "group_size", int) if strategy == "group" else None,
        "block_structure": setting(spec, "block_size", list) if strategy == "block" else None,
        "scale_dtype": "torch.uint8" if any(spec.get(key) == value for key, value in POWERS.items()) else None,
        "dynamic": setting(spec, "is_dynamic", bool, False),
    }


def _two_levels(said: list[dict[str, Any]], what: str, inputs: bool) -> dict[str, Any]:
    """nvfp4: blocks of 16 with float8 scales, and one scale for all of them."""
    second = {key: value for key, value in said[1].items() if key != "is_scale_quant"}
    numbers, scales = (_arguments([spec], what, inputs=inputs) for spec in (said[0], second))
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "scale_dtype": None}
    if (numbers["num_bits"], numbers["strategy"], numbers["group_size"]) != (4, "group", 16) or any(
        scales[key] != value for key, value in wanted.items()
    ):
        raise CheckpointError(f"{what}: two levels of scales are read of fp4 in groups of 16, scaled by fp8_e4m3 alone")
    return {**numbers, "strategy": "tensor_group", "dynamic": "local" if numbers["dynamic"] else False}


def _check_algorithms(config: Mapping[str, Any]) -> None:
    found = setting(config, "algo_config", (list, dict), [])
    for each in found if isinstance(found, list) else [found]:
        said = each if isinstance(each, dict) else {}
        name = said.get("name")
        turned = name == ROTATION and not any(said.get(key) for key in ON_CALLS)
        if name not in CHOOSING and not turned:
            raise CheckpointError(
                f"Quark with the algorithm {name!r}, which may change inputs on each call: of {ROTATION} that without "
                f"{', '.join(ON_CALLS)} is read, and {', '.join(CHOOSING)}"
            )


def _fits_more(name: str) -> bool:
    """Whether it is a pattern that may match several modules: lists of names may have tens of thousands."""
    return name.startswith("re:") or not {*"*?["}.isdisjoint(name)


def _pattern(said: Any) -> re.Pattern[str]:
    if not isinstance(said, str):
        raise CheckpointError(f"quantization_config: exclude must be a list of strings, and has {said!r}")
    return compiled(said[3:] if said.startswith("re:") else fnmatch.translate(said))
