"""Settings of published models (with long lists and module names shortened) and layers with matching tensors: which
schemes result from each, or why it is refused. The tests of each format check the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bitport.errors import CheckpointError
from bitport.interop import bitnet, convert

from .published_files import (
    AMD4,
    AMD8,
    AUTO_ROUND,
    BLOCKS,
    E4M3,
    FILE,
    FLOAT8,
    FP4_EXPERTS,
    FP8_BLOCKS,
    INT4,
    OPT_4,
    OPT_8,
    STATIC,
    V4,
    V4_ATTENTION,
    V4_EXPERT,
    K,
    N,
    Q,
    Tensors,
    awq,
    beside,
    compressed,
    fp8,
    gptq,
    mlx,
    modelopt,
    nf4,
    nvfp4,
    of,
    packed,
    quark,
)

GEMMA = {"weight_scale": torch.ones(N, 1), "input_activation_scale": torch.ones(())}
READ: dict[str, tuple[dict[str, Any], Tensors, list[str]]] = {
    "TheBloke/Llama-2-7B-Chat-GPTQ": (
        {
            **{"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": True, "sym": True},
            **{"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"},
            "quant_method": "gptq",
        },
        of(**{Q: gptq(order=True)}),
        ["int4-sym"],
    ),
    "Qwen/Qwen-14B-Chat-Int8": (
        {
            **{"bits": 8, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False},
            **{"sym": True, "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"},
            "quant_method": "gptq",
        },
        of(transformer__h__0__attn__c_proj=gptq(8)),
        ["int8-g128"],
    ),
    "GPTQModel 1.7": (
        {
            **{"bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "lm_head": False},
            "meta": {
                **{"damp_auto_increment": 0.0025, "damp_percent": 0.1, "mse": 0.0, "quantizer": ["gptqmodel:1.7.4"]},
                **{"static_groups": False, "true_sequential": True, "uri": "https://github.com/modelcloud/gptqmodel"},
            },
            **{"pack_dtype": "int32", "quant_method": "gptq", "sym": True},
        },
        of(**{Q: gptq()}),
        ["int4-sym"],
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": (
        {
            **{"bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq"},
            **{"version": "gemm", "zero_point": True},
        },
        of(**{Q: {**awq(), "bias": torch.zeros(N).half()}}),
        ["int4"],
    ),
    "QuantTrio/DeepSeek-V3.2-Exp-AWQ": (
        {
            **{"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
            "modules_to_not_convert": ["mlp.gate.", "indexer", "model.layers.0.", "model.layers.60."],
        },
        of(model__layers__3__mlp__experts__0__up_proj=awq(), model__layers__3__mlp__gate={"weight": torch.ones(4, K)}),
        ["int4"],
    ),
    "AutoAWQ": (
        {
            **{"quant_method": "awq", "backend": "autoawq", "bits": 4, "group_size": 128, "version": "gemm"},
            **{"zero_point": True, "do_fuse": False},
        },
        of(**{Q: awq()}),
        ["int4"],
    ),
    "AutoAWQ, beside config.json": (
        {"quant_config.json": {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}},
        of(**{Q: awq()}),
        ["int4"],
    ),
    "AutoRound 0.12": (
        {
            **{**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "low_gpu_mem_usage": True},
            **{"autoround_version": "0.12.3", "block_name_to_quantize": "model.layers"},
            "extra_config": {"model.layers.0.linear_attn.in_proj_b": {"bits": 16, "data_type": "fp"}},
        },
        of(**{Q: gptq(g_idx=False), "model__layers__0__linear_attn__in_proj_b": {"weight": torch.ones(4, K)}}),
        ["int4-sym"],
    ),
    "AutoRound 0.14, without a model": (
        {
            **{**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "autoround_version": "0.14.2"},
            **{"model_free": True, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}},
        },
        of(**{Q: gptq(g_idx=False), "lm_head": {"weight": torch.ones(4, K)}}),
        ["int4-sym"],
    ),
    "moonshotai/Kimi-K2.5": (
        compressed(
            {**INT4, "group_size": 32},
            None,
            "pack-quantized",
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        ),
        of(
            language_model__model__layers__1__mlp__experts__0__gate_proj=packed(32),
            language_model__model__layers__0__mlp__gate_proj={"weight": torch.ones(N, K)},
        ),
        ["int4-g32-sym"],
    ),
    "moonshotai/Kimi-K3": (
        compressed(
            {**INT4, "group_size": 32, "scale_dtype": "torch.uint8", "type": "float", "zp_dtype": None},
            None,
            "mxfp4-pack-quantized",
            ignore=["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:.*vision_tower.*"],
            global_compression_ratio=None,
        ),
        {
            "language_model.model.layers.1.mlp.experts.0.w1.weight_packed": torch.zeros(N, K // 2, dtype=torch.uint8),
            "language_model.model.layers.1.mlp.experts.0.w1.weight_scale": torch.ones(N, K // 32, dtype=torch.uint8),
        },
        ["mxfp4-wo"],
    ),
    "W4A16 of llm-compressor, 2024": (
        compressed(
            INT4,
            None,
            "pack-quantized",
            global_compression_ratio=1.883165566487463,
            sparsity_config={
                **{"format": "dense", "global_sparsity": 0.14297135853065746, "registry_requires_subclass": False},
                **{"ignore": ["model.layers.0.mlp.up_proj"], "sparsity_structure": "unstructured"},
            },
        ),
        of(**{Q: packed(128)}),
        ["int4-sym"],
    ),
    "nm-testing/Meta-Llama-3.1-8B-Instruct-FP8-hf": (
        compressed(FLOAT8, FLOAT8, "naive-quantized", quantization_status="frozen"),
        of(**{Q: fp8(1, dtype=torch.bfloat16, inputs="input_scale")}),
        [STATIC],
    ),
    "W8A8": (
        compressed(
            {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None},
            {**INT4, "num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True, "observer": "memoryless"},
            "int-quantized",
            ignore=["lm_head", "embed_tokens"],
            global_compression_ratio=1.0,
            quantization_status="frozen",
        ),
        of(**{Q: {"weight": torch.zeros(N, K, dtype=torch.int8), "weight_scale": torch.ones(N, 1).bfloat16()}}),
        ["int8-dyn"],
    ),
    "zai-org/GLM-4.5-FP8, meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8": (
        compressed(
            {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None, "type": "float"},
            {**INT4, "num_bits": 8, "strategy": "token", "group_size": None, "type": "float", "dynamic": True},
            "float-quantized",
            ignore=["lm_head", "re:.*router", "model.layers.1.mlp.gate", "re:.*vision_model.*"],
        ),
        of(model__layers__1__mlp__experts__0__gate_proj=fp8(N, 1, dtype=torch.bfloat16)),
        ["fp8-row"],
    ),
    "W4AFP8 of llm-compressor": (
        compressed(
            {**INT4, "actorder": "weight"},
            {**INT4, "num_bits": 8, "strategy": "token", "group_size": None, "type": "float", "dynamic": True},
            "pack-quantized",
        ),
        of(**{Q: packed(128)}),
        ["int4-fp8"],
    ),
    "Qwen3-Next, NVFP4A16 of llm-compressor": (
        {
            "config_groups": {
                "group_0": {
                    "format": "nvfp4-pack-quantized",
                    "weights": {**OPT_4, "strategy": "tensor_group", "symmetric": True},
                    "targets": ["Linear"],
                }
            },
            **{"format": "nvfp4-pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors"},
            **{"quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}},
        },
        of(**{Q: nvfp4("weight_packed", "weight_global_scale", "")}),
        ["nvfp4-wo"],
    ),
    "Llama 3 of bitsandbytes": (
        {
            **{"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "float32"},
            **{"bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            **{"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False},
            **{"llm_int8_skip_modules": None, "llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False},
            "quant_method": "bitsandbytes",
        },
        of(**{Q: nf4()}),
        ["nf4"],
    ),
    "deepseek-ai/DeepSeek-R1, Qwen/Qwen3-32B-FP8, moonshotai/Kimi-K2-Instruct": (FP8_BLOCKS, BLOCKS, ["fp8-block"]),
    "deepseek-ai/DeepSeek-V3.2": (V4, BLOCKS, ["fp8-block"]),
    "MiniMaxAI/MiniMax-M2.5": (
        {
            **{**FP8_BLOCKS, "fmt": "float8_e4m3fn"},
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        of(model__layers__0__block_sparse_moe__experts__0__w1=fp8(1, 2, scale="weight_scale_inv")),
        ["fp8-block"],
    ),
    "stepfun-ai/Step-3.7-Flash-FP8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        BLOCKS,
        ["fp8-block"],
    ),
    "mistralai/Devstral, Ministral 3": (
        {
            **{"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None},
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
        of(**{Q: fp8(scale="weight_scale_inv", dtype=torch.bfloat16, inputs="activation_scale")}),
        [STATIC],
    ),
    "AutoFP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
        of(**{Q: fp8(1, inputs="input_scale")}) | {"model.layers.0.self_attn.kv_scale": torch.ones(1)},
        [STATIC],
    ),
    "sgl-project/DeepSeek-V4-Flash-FP8": (V4, V4_ATTENTION, ["fp8-block"]),
    "deepseek-ai/DeepSeek-V4-Flash": (V4, V4_ATTENTION | V4_EXPERT, ["fp8-block", FP4_EXPERTS]),
    "nvidia/Llama-3.1-70B-Instruct-FP8": (
        {FILE: beside("0.23.0", quant_algo="FP8", kv_cache_quant_algo="FP8", exclude_modules=["lm_head"])},
        of(**{Q: fp8(inputs="input_scale")}) | {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0)},
        [STATIC],
    ),
    "nvidia/DeepSeek-V3.1-NVFP4": (
        {
            FILE: beside(
                "0.22.1.dev750+g59a703703",
                quant_algo="NVFP4",
                kv_cache_quant_algo="FP8",
                group_size=16,
                exclude_modules=["lm_head", "model.layers.0.self_attn.kv_a_proj_with_mqa"],
            )
        },
        of(model__layers__3__mlp__experts__0__up_proj=nvfp4()),
        ["nvfp4-static"],
    ),
    "nvidia/DeepSeek-V4-Flash-NVFP4": (
        {
            **V4,
            **{"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "kv_cache_quant_algo": None},
            "group_size": 16,
            "quantized_layers": {"layers.0.ffn.experts": {"group_size": 16, "quant_algo": "NVFP4"}},
            "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
        },
        V4_ATTENTION | of(layers__0__ffn__experts__0__w1=nvfp4()),
        ["fp8-block", "nvfp4-static"],
    ),
    "nvidia/GLM-5.1-NVFP4": (modelopt("0.45.0.dev44+gc273ddb8a.d20260509"), of(**{Q: nvfp4()}), ["nvfp4-static"]),
    "nvidia/Qwen3.6-27B-NVFP4": (
        modelopt(
            "0.45.0",
            quant_algo="MIXED_PRECISION",
            config_groups={
                "group_0": {"input_activations": OPT_8, "weights": OPT_8, "targets": ["l.0.linear_attn.out_proj"]},
                "group_1": {"weights": OPT_4, "targets": ["l.0.mlp.gate_proj"]},
            },
            quantized_layers={
                "l.0.linear_attn.out_proj": {"quant_algo": "FP8"},
                "l.0.mlp.gate_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
            ignore=["mtp*", "mtp.layers.0*"],
        ),
        of(l__0__linear_attn__out_proj=fp8(inputs="input_scale"), l__0__mlp__gate_proj=nvfp4(inputs="")),
        [STATIC, "nvfp4-wo"],
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        {
            FILE: beside(
                "0.44.0",
                quant_algo="MIXED_PRECISION",
                kv_cache_quant_algo="FP8",
                quantized_layers={
                    "l.0.linear_attn.out_proj": {"quant_algo": "FP8"},
                    "l.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                },
                exclude_modules=["mtp.layers.0*", "mtp*"],
            )
        },
        of(l__0__linear_attn__out_proj=fp8(inputs="input_scale"), l__0__mlp__experts__7__gate_proj=nvfp4()),
        [STATIC, "nvfp4-wo"],
    ),
    "nvidia/MiniMax-M3-NVFP4": (
        {
            **{"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quant_method": "modelopt"},
            "exclude_modules": ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector"],
            "quantized_layers": {
                "l.0.mlp.down_proj": {"quant_algo": "MXFP8"},
                "l.3.block_sparse_moe.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16},
            },
        },
        of(
            l__0__mlp__down_proj={**fp8(), "weight_scale": torch.ones(N, K // 32, dtype=torch.uint8)},
            l__3__block_sparse_moe__experts__0__w1=nvfp4(),
        ),
        ["mxfp8", "nvfp4-static"],
    ),
    "openai/gpt-oss-20b": (
        {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
            "quant_method": "mxfp4",
        },
        {
            "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(2, N, K // 32, 16, dtype=torch.uint8),
            "model.layers.0.mlp.experts.gate_up_proj_scales": torch.ones(2, N, K // 32, dtype=torch.uint8),
            "model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(2, N),
            "model.layers.0.self_attn.sinks": torch.ones(8),
        },
        ["mxfp4-wo"],
    ),
    "meta-llama/Llama-3.1-405B-Instruct-FP8": (
        {
            **{"activation_scale_ub": 1200.0, "quant_method": "fbgemm_fp8"},
            "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"],
        },
        of(model__layers__1__mlp__down_proj=fp8(N, 1)),
        ["fp8-wo"],
    ),
    "amd/Llama-3.1-405B-Instruct-FP8-KV": (
        quark(AMD8, AMD8, ("*k_proj", "*v_proj"), version="0.6.0"),
        of(**{Q: fp8(inputs="input_scale"), Q.replace("q_proj", "k_proj"): fp8(inputs="input_scale")})
        | {"model.layers.0.self_attn.k_proj.output_scale": torch.tensor(1.0)},
        [STATIC],
    ),
    "Quark 0.9, MXFP4": (
        quark(AMD4, {**AMD4, "is_dynamic": True}, version="0.9", kv_cache_post_rope=False, kv_cache_quant_config={}),
        of(**{Q: {"weight": torch.zeros(N, K // 2).byte(), "weight_scale": torch.ones(N, K // 32).byte()}}),
        ["mxfp4"],
    ),
    "MLX, with gates of 8 bits": (
        {"quantization": {"bits": 4, "group_size": 64, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}},
        of(**{Q: mlx(), "model__layers__0__mlp__gate": mlx(8)}),
        ["int4-g64-fzero", "int8-g64-fzero"],
    ),
    "AutoRound 0.16, auto_round:mlx": (
        {
            "quantization": {
                **{"bits": 4, "group_size": 64, "lm_head": False},
                "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},
            },
            "quantization_config": {
                **{"quant_method": "auto-round", "packing_format": "mlx", "bits": 4, "group_size": 64, "sym": True},
                "data_type": "int",
            },
        },
        of(**{Q: mlx(), "model__layers__0__mlp__gate": mlx(8)}),
        ["int4-g64-fzero", "int8-g64-fzero"],
    ),
    "Qwen3-1.7B, NVFP4 of AutoRound": (
        {
            **{"bits": 4, "act_bits": 4, "data_type": "nv_fp", "act_data_type": "nv_fp4_with_static_gs"},
            **{"group_size": 16, "act_group_size": 16, "sym": True, "act_sym": True, "act_dynamic": True, "iters": 0},
            **{"autoround_version": "0.12.3", "quant_method": "auto-round"},
            "packing_format": "auto_round:llm_compressor",
        },
        of(**{Q: nvfp4("weight_packed", "weight_global_scale", "input_global_scale")}),
        ["nvfp4-static"],
    ),
    "microsoft/bitnet-b1.58-2B-4T": (
        {"linear_class": "autobitlinear", "quant_method": "bitnet", "quantization_mode": "offline"},
        of(**{Q: {"weight": torch.zeros(N // 4, K, dtype=torch.uint8), "weight_scale": torch.ones(1).bfloat16()}}),
        [str(bitnet.SCHEME)],
    ),
    "Gemma as transformers reads it": (
        {
            **{"quant_method": "gemma", "num_bits": 2, "quantize_embeddings": True, "modules_to_not_convert": []},
            "module_quant_configs": {"q_proj": {"num_bits": 8}},
        },
        of(
            **{Q: {"weight": torch.zeros(N, K, dtype=torch.int8), **GEMMA}},
            embed={
                "embedding_quantized": torch.zeros(N, K // 4, dtype=torch.uint8),
                "embedding_scale": torch.ones(N, 1),
            },
        ),
        ["custom(int2-channel, float32 scales)", "int8-static"],
    ),
}

OTHERS = ("aqlm", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "higgs", "humming", "sinq", "spqr", "vptq")
REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    **{method: ({"quant_method": method}, {"w": torch.ones(1)}, f"is quantized by '{method}'") for method in OTHERS},
    "2:4 of llm-compressor": (
        compressed(INT4, None, "marlin-24"),
        of(**{Q: {"weight_packed": torch.zeros(K // 32, 2 * N, dtype=torch.int32)}}),
        "format 'marlin-24'",
    ),
    "2:4 in float8": (
        compressed(
            {**FLOAT8, "strategy": "channel"},
            {**FLOAT8, "strategy": "token", "dynamic": True},
            "float-quantized",
            sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]},
        ),
        of(**{Q: {"compressed": torch.zeros(N, K // 2).to(E4M3), "weight_scale": torch.ones(N, 1)}}),
        "'sparse-24-bitmask'",
    ),
    "mlx-community/Qwen3-Coder-Next-4bit": (
        {"quantization": {"bits": 4, "group_size": 64, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}},
        of(model__layers__0__mlp__gate=mlx(8), model__layers__0__mlp__switch_mlp__up_proj=mlx(4, 2)),
        r"mlp\.switch_mlp\.up_proj: MLX stacks the experts",
    ),
}


def written(path: Path, said: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir()
    in_files = {name: text for name, text in said.items() if name.endswith(".json")}
    named = said if "quantization" in said else {"quantization_config": said} if not in_files else {}
    for name, text in {"config.json": {"dtype": "bfloat16", **named}, **in_files}.items():
        (path / name).write_text(json.dumps(text))
    save_file(tensors | {"model.norm.weight": torch.ones(K)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", READ)
def test_is_read(name: str, tmp_path: Path) -> None:
    said, tensors, schemes = READ[name]
    done = convert(written(tmp_path / "source", said, tensors), tmp_path / "out", progress=False)
    assert sorted(set(done.weights.values())) == sorted(schemes)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str, tmp_path: Path) -> None:
    said, tensors, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=words):
        convert(written(tmp_path / "source", said, tensors), tmp_path / "out", progress=False)
