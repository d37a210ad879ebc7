"""Small versions of the tensors and settings of published models."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from bitport import preset
from bitport.numerics import NF4

Tensors = dict[str, Tensor]
N, K = 128, 256
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
STATIC = str(dataclasses.replace(preset("fp8"), static=True))
FP4_EXPERTS = str(dataclasses.replace(preset("mxfp4"), act="fp8-128"))


def gptq(bits: int = 4, group: int = 128, *, order: bool = False, g_idx: bool = True) -> Tensors:
    half = (1 << (bits - 1)) - 1
    qzeros = sum(half << (bits * at) for at in range(32 // bits))
    group_of = torch.arange(K, dtype=torch.int32) // group
    found = {
        "qweight": torch.zeros(K * bits // 32, N, dtype=torch.int32),
        "qzeros": torch.full((K // group, N * bits // 32), qzeros, dtype=torch.int32),
        "scales": torch.ones(K // group, N, dtype=torch.float16),
    }
    return {**found, "g_idx": group_of.flip(0) if order else group_of} if g_idx else found


def awq() -> Tensors:
    return {
        "qweight": torch.zeros(K, N // 8, dtype=torch.int32),
        "qzeros": torch.zeros(K // 128, N // 8, dtype=torch.int32),
        "scales": torch.ones(K // 128, N, dtype=torch.float16),
    }


def packed(group: int) -> Tensors:
    return {
        "weight_packed": torch.zeros(N, K // 8, dtype=torch.int32),
        "weight_shape": torch.tensor([N, K]),
        "weight_scale": torch.ones(N, K // group, dtype=torch.bfloat16),
    }


def fp8(*grid: int, scale: str = "weight_scale", dtype: torch.dtype = torch.float32, inputs: str = "") -> Tensors:
    found = {"weight": torch.zeros(N, K).to(E4M3), scale: torch.ones(grid).to(dtype)}
    return found | ({inputs: torch.ones(grid).to(dtype)} if inputs else {})


def nvfp4(packed: str = "weight", second: str = "weight_scale_2", inputs: str = "input_scale") -> Tensors:
    found = {packed: torch.zeros(N, K // 2, dtype=torch.uint8), "weight_scale": torch.ones(N, K // 16).to(E4M3)}
    return found | {name: torch.ones(1) for name in (second, inputs) if name}


def nf4() -> Tensors:
    state = {
        **{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [N, K]},
        **{"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04},
    }
    return {
        "weight": torch.zeros(N * K // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(N * K // 64, dtype=torch.uint8),
        "weight.quant_map": torch.tensor(NF4),
        "weight.nested_absmax": torch.ones(2),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def mlx(bits: int = 4, *lead: int) -> Tensors:
    codes = torch.arange(K * bits // 32, dtype=torch.int32).expand(*lead, N, -1).contiguous().view(torch.uint32)
    scales = torch.ones(*lead, N, K // 64, dtype=torch.bfloat16)
    return {"weight": codes, "scales": scales, "biases": 0.3 * scales}


def of(**layers: Tensors) -> Tensors:
    """Name tensors by layer; two underscores in a layer's name stand for a dot."""
    named = {name.replace("__", "."): tensors for name, tensors in layers.items()}
    return {f"{name}.{end}": tensor for name, tensors in named.items() for end, tensor in tensors.items()}


Q = "model__layers__0__self_attn__q_proj"
FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
BLOCKS = of(**{Q: fp8(1, 2, scale="weight_scale_inv")})
V4 = {**FP8_BLOCKS, "scale_fmt": "ue8m0"}
V4_ATTENTION = of(layers__0__attn__wq_a=fp8(1, 2, scale="scale", dtype=E8M0))
V4_EXPERT = {
    "layers.0.ffn.experts.0.w1.weight": torch.zeros(N, K // 2, dtype=torch.int8),
    "layers.0.ffn.experts.0.w1.scale": torch.ones(N, K // 32).to(E8M0),
}
AUTO_ROUND = {"bits": 4, "data_type": "int", "group_size": 128, "sym": True, "iters": 0, "quant_method": "auto-round"}
INT4 = {
    **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4},
    **{"observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"},
}
FLOAT8 = {"num_bits": 8, "strategy": "tensor", "type": "float"}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, stored: str, **more: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    said = {"config_groups": {"group_0": group}, "format": stored, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {**said, "quant_method": "compressed-tensors", "quantization_status": "compressed", **more}


OPT_KV = {"dynamic": False, "num_bits": 8, "type": "float"}
OPT_4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
OPT_8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def modelopt(version: str, **more: Any) -> dict[str, Any]:
    group = {"input_activations": OPT_4, "weights": OPT_4, "targets": ["Linear"]}
    said = {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "quant_algo": "NVFP4"}
    made = {"kv_cache_scheme": OPT_KV, "producer": {"name": "modelopt", "version": version}}
    return {**said, **made, "quant_method": "modelopt", **more}


def beside(version: str, **said: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt", "version": version}, "quantization": said}


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    said = {"ch_axis": None, "dtype": dtype, "group_size": None, "is_dynamic": False, "qscheme": qscheme}
    return {**said, "observer_cls": "PerTensorMinMaxObserver", "round_method": "half_even", "symmetric": None, **more}


def quark(weight: Any, inputs: Any, groups: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    layer = {"bias": None, "input_tensors": inputs, "output_tensors": None, "target_device": None, "weight": weight}
    export = {"min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}
    return {
        **{"algo_config": None, "exclude": ["lm_head"], "layer_type_quant_config": {}, "quant_method": "quark"},
        "export": {**export, "kv_cache_group": list(groups), "weight_merge_groups": None},
        "global_quant_config": layer,
        "layer_quant_config": {name: {**layer, "output_tensors": spec("fp8_e4m3", "per_tensor")} for name in groups},
        **{"quant_mode": "eager_mode", "softmax_quant_spec": None, **more},
    }


AMD8 = spec("fp8_e4m3", "per_tensor", scale_type="float")
AMD4 = spec("fp4", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0", scale_calculation_mode="even")
FILE = "hf_quant_config.json"
