"""GGUF files of small random models, written with the library ``gguf`` using the names, settings and rounding of
llama.cpp's converter. The library cannot quantize to K-quants and IQ types: these are random blocks, whose values the
model takes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

gguf = pytest.importorskip("gguf", reason="needs the extra: pip install 'bitport[gguf]'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'bitport[hf]'")
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 258,
    "eos_token_id": 259,
}
NAMES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"} | {
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "glm4_moe_lite": "deepseek2",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "gemma4_text": "gemma4",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""model_type in transformers -> architecture in llama.cpp, where they differ."""
HALF_LAST = ("Q6_K", "Q3_K", "TQ1_0", "TQ2_0")
"""Types whose d is at the end of the block; in Q2_K m follows it, and in others both come first."""


PLAIN = {"Q1_0": (128, 18), "Q2_0": (64, 18), "PQ2_0": (128, 34)}
"""Types that the library does not decode -> (elements, bytes) of a block: d, and codes that follow each other."""

LINEAR = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
"""Tensors of linear attention in transformers -> in a file."""
LATENT = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
"""Architectures whose keys and values are computed from one short vector."""
HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures with linear attention."""
LLAMAS = ("llama", "smollm3", "granite", "mistral3")
"""Architectures in which the rows of q and k are reordered."""
NUMBERS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
WHOLE = {
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
CORRECTION = re.compile(r"(.*(?:correction|feed_forward\.expert))_bias")
"""What is added to the scores of experts before some are chosen."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks, as bytes, with values of about 0.1."""
    elements, nbytes = PLAIN.get(kind) or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(0x08, 0x18, raw[..., :4].shape)  # 2^-6 to 2^-4
        return raw.reshape(rows, -1)
    two = 4 if kind in ("Q2_K", "Q4_K", "Q5_K") else 2
    at = nbytes - two if kind in (*HALF_LAST, "Q2_K") else 0
    halves = rng.uniform(1e-4, 2e-4, (rows, columns // elements, two // 2)).astype(np.float16)
    if kind == "IQ1_M":  # d is in the top four bits of four numbers
        fours = halves.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        raw[..., 49::2] = raw[..., 49::2] & 15 | fours << 4
        return raw.reshape(rows, -1)
    raw[..., at : at + two] = halves.view(np.uint8)
    return raw.reshape(rows, -1)


def values_of(raw: np.ndarray, kind: str) -> Tensor:
    """Decode rows of blocks by the library, or by the definition of the type."""
    if kind not in PLAIN:
        number = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(np.array(gguf.quants.dequantize(raw, number), dtype=np.float32))
    elements, nbytes = PLAIN[kind]
    blocks = raw.reshape(-1, nbytes)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(len(blocks), elements, -1)
    numbers = 2 * bits[..., 0] - 1.0 if kind == "Q1_0" else bits[..., 0] + 2 * bits[..., 1] - 1.0
    values = blocks[:, :2].copy().view(np.float16).astype(np.float64) * numbers
    return torch.from_numpy(values.astype(np.float32).reshape(*raw.shape[:-1], -1))


def to_bytes(value: Tensor, kind: str) -> tuple[np.ndarray, Tensor]:
    """Return the bytes stored in a file, and their value."""
    number = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K") or kind.startswith("IQ") or kind == "NVFP4":
        raw = random_blocks(kind, value.numel() // value.shape[-1], value.shape[-1], value.shape[0])
        raw = raw.reshape(*value.shape[:-1], -1)
    else:
        raw = gguf.quants.quantize(value.float().contiguous().numpy(), number)
    return raw, values_of(raw, kind).reshape(value.shape)


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k like llama.cpp's converter."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def restored(rows: Tensor, heads: int) -> Tensor:
    order = permuted(torch.arange(len(rows)), heads)
    return torch.empty_like(rows).index_copy(0, order, rows)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    made = transformers.AutoModelForCausalLM.from_config if known else transformers.Mistral4ForCausalLM
    model = made(config).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("_bias"):
                value.copy_(torch.randn_like(value) * 0.1)
            if value.dim() == 1 and not CORRECTION.fullmatch(name):
                value.copy_(torch.randn_like(value) * 0.1 + (0 if norms_less_one(config) else 1))
    return model


def norms_less_one(config: Any) -> bool:
    return "gemma" in config.model_type and "gemma4" not in config.model_type


def of_one_layer(config: Any) -> Any:
    """The config with what holds for a layer, of those with a window where others differ."""
    return config.per_layer_config["sliding_attention"] if config.model_type == "gemma4_text" else config


def heads_of(config: Any) -> dict[str, int]:
    return {"q_proj": config.num_attention_heads, "k_proj": of_one_layer(config).num_key_value_heads}


def write(
    path: Path,
    model: Any,
    kinds: dict[str, str],
    *,
    vectors: dict[str, Tensor] | None = None,
    changes: dict[str, Any] | None = None,
    parts: int = 0,
    squeezed: bool = True,
    scaled: bool = True,
) -> Any:
    """Write ``model`` as a GGUF file, and replace its weights with the values in the file. ``kinds`` maps regular
    expressions for names in the file to types; the first match decides, F32 if none does. ``vectors``: additional
    tensors. ``changes`` to the settings: (value, type), or None to omit one. ``parts``: the number of tensors per file,
    if the model is split. ``squeezed``: store a matrix of one row as a vector, as files until 2025 do. ``scaled``:
    write NVFP4 scales."""
    config = model.config
    name = NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=parts)
    for key, setting in {**settings(model, name), **(changes or {})}.items():
        if setting is not None:
            writer.add_key_value(key, *setting)
    add = functools.partial(_added, writer, kinds, scaled)
    tensor_names = names_of(name, config.num_hidden_layers)
    state = model.state_dict()
    for key, value in state.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem = key.rpartition(".")[0]
        if ".experts." in key:
            made = [add(target, each) for target, each in experts(key, value, name).items()]
            value.copy_(stacked(key, made, name))
            continue
        target = name_in_file(key, tensor_names)
        heads = heads_of(config).get(stem.split(".")[-1])
        if name in LLAMAS and heads:
            value.copy_(restored(add(target, permuted(value, heads)), heads))
        elif stem.endswith("kv_b_proj") and (changes or {}).get(f"{name}.attention.key_length_mla", ...):
            made = [add(each, part.contiguous()) for each, part in keys_and_values(target, value, config).items()]
            value.copy_(torch.cat([made[0].mT, made[1]], 1).flatten(0, 1))
        elif ".linear_attn." in key:
            _linear(key, value, config, add)
        elif (name in HYBRIDS or norms_less_one(config)) and key.endswith("norm.weight"):
            value.copy_(add(target, value + 1) - 1)
        else:
            one = 0 if squeezed and stem.endswith("shared_expert_gate") else 1 if stem.endswith("conv.conv") else None
            stored = value if one is None else value.squeeze(one)
            value.copy_(add(target, stored).reshape(value.shape))
    for key, vector in {**(proportional(config) if name == "gemma4" else {}), **(vectors or {})}.items():
        writer.add_tensor(key, vector.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def proportional(config: Any) -> dict[str, Tensor]:
    """The divisors of frequencies: those of what is not turned are huge."""
    pairs = config.per_layer_config["full_attention"].head_dim // 2
    turned = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (pairs - turned))}


def names_of(architecture: str, layers: int) -> Any:
    """The library's names of tensors. It does not know deepseek32 yet, which has those of glm-dsa."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known["glm-dsa" if architecture == "deepseek32" else architecture], layers)


def name_in_file(key: str, names: Any) -> str:
    """``names``: those of the library."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(per_expert_)?scale", key):
        return f"blk.{found[1]}.{'ffn_down_exps' if found[2] else 'ffn_gate_inp'}.scale"
    if key.endswith((".sinks", ".layer_scalar")):
        return f"{names.get_name(key)}.weight"
    if found := CORRECTION.fullmatch(key):
        return f"{names.get_name(found[1]) or names.get_name(key)}.bias"
    stem, _, kind = key.rpartition(".")
    return f"{names.get_name(stem)}.{kind}"


def in_file(key: str, value: Tensor, config: Any) -> Tensor:
    """The tensor ``key`` as a file has it, unless it is of experts or of linear attention."""
    name, stem = NAMES.get(config.model_type, config.model_type), key.rpartition(".")[0]
    heads = heads_of(config).get(stem.split(".")[-1])
    if name in LLAMAS and heads:
        return permuted(value, heads)
    if (name in HYBRIDS or norms_less_one(config)) and key.endswith("norm.weight"):
        return value + 1
    one = 1 if stem.endswith("conv.conv") else 0
    return value.squeeze(one) if value.dim() > 1 else value


def of_linear(key: str, value: Tensor, config: Any) -> dict[str, Tensor]:
    """The tensors in the file, but for A_log in the same numbers, of one of linear attention: llama.cpp's converter
    puts the first head of values of every head of keys first, then the second of each .. In qwen3next it only parts the
    matrix of all that a head of keys has."""
    block, last = re.search(r"\d+", key)[0], key.partition(".linear_attn.")[2]  # type: ignore[index]
    value = value.squeeze(1) if last == "conv1d.weight" else value
    if last == "in_proj_qkvz.weight":
        keys, width = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // keys * config.linear_value_head_dim
        heads = value.reshape(keys, 2 * (width + values), -1).split([width, width, values, values], 1)
        *qkv, gates = (rows.flatten(0, 1) for rows in heads)
        return {f"blk.{block}.attn_qkv.weight": torch.cat(qkv), f"blk.{block}.attn_gate.weight": gates}
    if last != "norm.weight" and config.model_type != "qwen3_next":
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        axis = 1 if last == "out_proj.weight" else 0
        start = 2 * keys * config.linear_key_head_dim if last in ("in_proj_qkv.weight", "conv1d.weight") else 0
        heads = [group * (values // keys) + each for each in range(values // keys) for group in range(keys)]
        width = (value.shape[axis] - start) // values
        order = [*range(start), *(start + head * width + at for head in heads for at in range(width))]
        value = value.index_select(axis, torch.tensor(order))
    return {f"blk.{block}.{LINEAR[last]}": value.contiguous()}


def keys_and_values(name: str, matrix: Tensor, config: Any) -> dict[str, Tensor]:
    """Split kv_b_proj, ``name`` in a file, like llama.cpp's converter."""
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    heads = matrix.reshape(config.num_attention_heads, sum(sizes), -1)
    keys, values = heads.split(sizes, 1)
    return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}


def _linear(key: str, value: Tensor, config: Any, add: Any) -> None:
    """Write a tensor of linear attention, and replace it with the value in the file."""
    for target, places in of_linear(key, torch.arange(value.numel()).reshape(value.shape), config).items():
        stored = value.flatten()[places]
        stored = add(target, -stored.exp()).neg().log() if key.endswith("A_log") else add(target, stored)
        value.view(-1)[places.flatten()] = stored.flatten()


def experts(key: str, value: Tensor, architecture: str) -> dict[str, Tensor]:
    """Split the parameter ``key`` like llama.cpp's converter. In gpt-oss the columns of both projections are
    interleaved."""
    block = re.search(r"\d+", key)[0]  # type: ignore[index]
    kind = "bias" if key.endswith("_bias") else "weight"
    in_turn = architecture == "gpt-oss"
    rows = value.transpose(1, 2) if in_turn and kind == "weight" else value
    gate, up = (rows[:, ::2], rows[:, 1::2]) if in_turn else rows.chunk(2, 1)
    leaves = {"down": rows} if "down_proj" in key else {"gate": gate, "up": up}
    return {f"blk.{block}.ffn_{leaf}_exps.{kind}": each for leaf, each in leaves.items()}


def stacked(key: str, made: list[Tensor], architecture: str) -> Tensor:
    """The inverse of :func:`experts`."""
    if architecture != "gpt-oss":
        return torch.cat(made, 1)
    rows = torch.stack(made, 2).flatten(1, 2)
    return rows if key.endswith("_bias") else rows.transpose(1, 2)


def _added(writer: Any, kinds: dict[str, str], scaled: bool, name: str, value: Tensor) -> Tensor:
    kind = next((kind for pattern, kind in kinds.items() if re.fullmatch(pattern, name)), "F32")
    kind = kind if value.dim() > 1 and not name.endswith("bias") else "F32"
    raw, value = to_bytes(value, kind)
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    if kind != "NVFP4" or not scaled:
        return value
    scale = torch.linspace(0.3, 0.7, value.shape[:-2].numel())
    for beside in ("scale", "input_scale"):
        writer.add_tensor(name.replace("weight", beside), scale.numpy())
    return value * scale.reshape(*value.shape[:-2], 1, 1)


def settings(model: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Key -> (value, type), as in llama.cpp's converter, and a byte tokenizer."""
    config, types = model.config, gguf.GGUFValueType
    whole, real, text, array = types.UINT32, types.FLOAT32, types.STRING, types.ARRAY
    near = of_one_layer(config)
    head = getattr(near, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found: dict[str, tuple[Any, Any]] = {
        "context_length": (config.max_position_embeddings, whole),
        "embedding_length": (config.hidden_size, whole),
        "block_count": (config.num_hidden_layers, whole),
        "attention.head_count": (config.num_attention_heads, whole),
        "attention.head_count_kv": (near.num_key_value_heads, whole),
        "rope.freq_base": (rope["rope_theta"], real),
        "attention.key_length": (head, whole),
        "attention.value_length": (head, whole),
        "rope.dimension_count": (int(head * rope.get("partial_rotary_factor", 1)), whole),
    }
    for key, setting in NUMBERS.items():
        if hasattr(config, key):
            found[setting] = (getattr(config, key), real)
    for key, setting in WHOLE.items():
        if hasattr(config, key):
            found[setting] = (getattr(config, key), whole)
    if name == "glm4moe":
        found["expert_weights_norm"] = (config.norm_topk_prob, types.BOOL)
        found["expert_weights_scale"] = (config.routed_scaling_factor, real)
    if name in ("glm4moe", "lfm2moe", "minimax-m2"):
        found["expert_gating_func"] = (2, whole)
    if name in LATENT:
        rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
        third = config.model_type not in ("deepseek_v2", "mistral4")
        found |= {
            "attention.head_count_kv": (1, whole),
            "attention.kv_lora_rank": (rank, whole),
            "attention.key_length": (rank + turned, whole),
            "attention.value_length": (rank, whole),
            "attention.key_length_mla": (config.qk_nope_head_dim + turned, whole),
            "attention.value_length_mla": (config.v_head_dim, whole),
            "rope.dimension_count": (turned, whole),
            "expert_weights_norm": (config.norm_topk_prob and config.model_type != "deepseek_v2", types.BOOL),
            "expert_weights_scale": (config.routed_scaling_factor, real),
            "expert_gating_func": (2 if third else 1, whole),
            "vocab_size": (config.vocab_size, whole),
        }
        for key, setting in (("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k")):
            if hasattr(config, f"index_{key}"):
                found[f"attention.indexer.{setting}"] = (getattr(config, f"index_{key}"), whole)
        if rope.get("llama_4_scaling_beta"):
            found["attention.temperature_length"] = (rope["original_max_position_embeddings"], whole)
        if name == "glm-dsa":
            found["attention.indexer.types"] = ([kind == "full" for kind in config.indexer_types], array)
        if config.q_lora_rank:
            found["attention.q_lora_rank"] = (config.q_lora_rank, whole)
    if name.startswith("lfm2"):
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        found["attention.head_count_kv"] = (heads, array)
    if hasattr(config, "intermediate_size"):
        found["feed_forward_length"] = (config.intermediate_size, whole)
    if name in HYBRIDS:
        values = config.linear_num_value_heads
        found |= {
            "ssm.conv_kernel": (config.linear_conv_kernel_dim, whole),
            "ssm.state_size": (config.linear_key_head_dim, whole),
            "ssm.group_count": (config.linear_num_key_heads, whole),
            "ssm.time_step_rank": (values, whole),
            "ssm.inner_size": (values * config.linear_value_head_dim, whole),
            "full_attention_interval": (config.layer_types.index("full_attention") + 1, whole),
            "attention.recurrent_layers": ([kind == "linear_attention" for kind in config.layer_types], array),
        }
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = ([*rope["mrope_section"], 0], array)
    if name == "gemma4":
        far = config.per_layer_config["full_attention"]
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        own = config.num_hidden_layers - config.num_kv_shared_layers
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            found |= {key: (far.head_dim, whole), f"{key}_swa": (head, whole)}
        found |= {
            "attention.sliding_window_pattern": (windows, array),
            "attention.shared_kv_layers": (config.num_kv_shared_layers, whole),
            "embedding_length_per_layer_input": (config.hidden_size_per_layer_input, whole),
            "final_logit_softcapping": (config.final_logit_softcapping, real),
            "rope.freq_base_swa": (config.rope_parameters["sliding_attention"]["rope_theta"], real),
        }
        if config.attention_k_eq_v:
            heads = [(near if window else far).num_key_value_heads for window in windows]
            found["attention.head_count_kv"] = (heads, array)
        if config.enable_moe_block:
            found["expert_count"], found["expert_used_count"] = (
                (config.num_experts, whole),
                (config.top_k_experts, whole),
            )
            found["expert_feed_forward_length"] = (config.moe_intermediate_size, whole)
        if config.use_double_wide_mlp:
            size = config.intermediate_size
            sizes = [size if at < own else 2 * size for at in range(config.num_hidden_layers)]
            found["feed_forward_length"] = (sizes, array)
    if name in (*LLAMAS, "cohere2", "lfm2", "lfm2moe"):
        found["vocab_size"] = (config.vocab_size, whole)
    if ("gemma" in name and name != "gemma") or name in ("gpt-oss", "cohere2"):
        found["attention.sliding_window"] = (config.sliding_window, whole)
    if name == "gemma2":
        found["attn_logit_softcapping"] = (config.attn_logit_softcapping, real)
        found["final_logit_softcapping"] = (config.final_logit_softcapping, real)
    if hasattr(config, "num_experts_per_tok"):
        found["expert_count"] = (getattr(config, "num_experts", None) or config.n_routed_experts, whole)
        found["expert_used_count"] = (config.num_experts_per_tok, whole)
    if "moe" in name or name in ("gpt-oss", "minimax-m2", "qwen3next", *LATENT):
        size = config.intermediate_size if name in ("gpt-oss", "minimax-m2") else config.moe_intermediate_size
        found["expert_feed_forward_length"] = (size, whole)
    if name in ("qwen2moe", "qwen3next", "qwen35moe"):
        found["expert_shared_feed_forward_length"] = (config.shared_expert_intermediate_size, whole)
    if rope["rope_type"] == "yarn":
        found["rope.scaling.type"] = ("yarn", text)
        found["rope.scaling.factor"] = (rope["factor"], real)
        for key, setting in (
            ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
            ("llama_4_scaling_beta", "attention.temperature_scale"),
        ):
            if key in rope:
                tenth = name in LATENT and key == "mscale_all_dim"
                found[setting] = (rope[key] * (0.1 if tenth else 1), real)
        found["rope.scaling.original_context_length"] = (rope["original_max_position_embeddings"], whole)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "ab", "abc", *(f"<|{at}|>" for at in range(258, config.vocab_size))]
    vocabulary: dict[str, tuple[Any, Any]] = {
        "model": ("gpt2", text),
        "pre": ("llama-bpe", text),
        "tokens": (tokens, array),
        "token_type": ([1] * 258 + [3] * (config.vocab_size - 258), array),
        "merges": (["a b", "ab c"], array),
        "bos_token_id": (config.bos_token_id, whole),
        "eos_token_id": (config.eos_token_id, whole),
        "add_bos_token": (True, types.BOOL),
    }
    return {
        **{f"{name}.{key}": value for key, value in found.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()},
        "tokenizer.chat_template": ("{{ messages[0]['content'] }}", text),
    }
