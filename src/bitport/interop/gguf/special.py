"""What individual architectures add to the config.json made by :mod:`bitport.interop.gguf.config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.gguf.keys import KEYS, Settings, predicting

PERMUTED = "Meta AI original pth"
"""The row order of attn_q and attn_k, as declared in old files; new ones use the same."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The same for all Llama models from 3.1; files have the resulting factors instead."""
LINEAR = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads")
"""The sizes of linear attention."""
INNER, EVERY, SECTIONS = "ssm.inner_size", "full_attention_interval", "rope.dimension_sections"
RECURRENT = "attention.recurrent_layers"
"""Whether each layer has linear attention; older files have EVERY alone."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose attention is scaled by hidden size / heads instead of the head size;
llama.cpp identifies them by this number, too."""


PERIODS = {
    **{"gpt-oss": 2, "gemma2": 2, "gemma3": 6, "gemma4": 6, "cohere2": 4},
    **{"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "smollm3": 4},
}
"""One of how many layers has full attention, or no rotary embedding (smollm3), unless a file or config.json says it."""


def nothing_more(settings: Settings, config: dict[str, Any]) -> None:
    pass


def llama(settings: Settings, config: dict[str, Any]) -> None:
    layout = settings.get("tensor_data_layout", (str,), PERMUTED)
    if layout != PERMUTED:
        raise CheckpointError(f"llama.tensor_data_layout is {short(layout)}; {PERMUTED!r} is read")
    rope = config["rope_parameters"]
    if (factors := settings.vector("rope_freqs.weight")) is not None:
        if rope["rope_type"] != "default":
            raise CheckpointError(f"the file has rope_freqs.weight and llama.rope.scaling.type, {rope['rope_type']!r}")
        rope |= _llama3(factors, rope["rope_theta"], config["head_dim"])


def _llama3(factors: Tensor, theta: float, head: int) -> dict[str, Any]:
    """The rope settings of transformers that yield ``factors``, [head / 2]."""
    if len(factors) != head // 2:
        raise CheckpointError(f"rope_freqs.weight has {len(factors)} numbers, not one for two of the {head} of a head")
    factor = float(factors.max())
    if not torch.allclose(llama3_factors(factor, theta, head), factors.double(), rtol=1e-4, atol=0):
        raise CheckpointError(f"rope_freqs.weight is not what Llama 3.1 and its successors have, with {LLAMA3}")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def llama3_factors(factor: float, theta: float, head: int) -> Tensor:
    """The divisor of each frequency, float64 [head / 2]: 1 for short wavelengths, ``factor`` for long ones, with a
    smooth transition."""
    wave = 2 * math.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = ((LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def smollm3(settings: Settings, config: dict[str, Any]) -> None:
    config["no_rope_layers"] = with_rope(config["num_hidden_layers"], PERIODS["smollm3"])


def with_rope(layers: int, every: int) -> list[int]:
    """1 for each layer, except 0 for every ``every``-th, which has no rotary embedding."""
    return [int((at + 1) % every != 0) for at in range(layers)]


def granite(settings: Settings, config: dict[str, Any]) -> None:
    """For granite, rope.scaling.finetuned says whether there are rotary embeddings at all."""
    if not settings.get("rope.scaling.finetuned", (bool,), True):
        raise CheckpointError("granite.rope.scaling.finetuned is False, which is a model without rotary embeddings")
    config["attention_multiplier"] = config["attention_multiplier"] or config["head_dim"] ** -0.5


def mistral3(settings: Settings, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise CheckpointError(f"mistral3 has attention.temperature_scale with yarn alone, not {rope['rope_type']!r}")
    rope["llama_4_scaling_beta"] = settings.real("attention.temperature_scale")
    key = "rope.scaling.yarn_log_multiplier"
    if (both := settings.get(key, (float,), None)) is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": settings.real(key) if both else 0.0}


def turned(settings: Settings, config: dict[str, Any]) -> None:
    head = config["head_dim"]
    count = settings.whole("rope.dimension_count", head, most=head)
    if count % 2:
        raise CheckpointError(
            f"{settings.architecture}.rope.dimension_count is {count}; dimensions are turned in pairs"
        )
    config["rope_parameters"]["partial_rotary_factor"] = count / head


def starcoder2(settings: Settings, config: dict[str, Any]) -> None:
    config["sliding_window"] = config["sliding_window"] or None


def cohere2(settings: Settings, config: dict[str, Any]) -> None:
    config["layer_types"] = windows(settings, config["num_hidden_layers"])


def phi3(settings: Settings, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    turned(settings, config)
    config["sliding_window"] = config["sliding_window"] or None
    original = settings.whole("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    attention = settings.real("rope.scaling.attn_factor", None)
    far, near = (settings.vector(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if far is None or near is None:
        if rope["rope_type"] != "default" or far is not near or attention is not None:
            raise CheckpointError("phi3 has rope_factors_long and rope_factors_short, or neither and no scaling")
        return
    rope |= {"rope_type": "longrope", "long_factor": far.tolist(), "short_factor": near.tolist()}
    rope |= {"original_max_position_embeddings": original}
    rope |= {} if attention is None else {"attention_factor": attention}


def qwen2moe(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp does not normalize the weights of the selected experts; old files lack the sizes of experts."""
    whole = config["intermediate_size"]
    config["moe_intermediate_size"] = config["moe_intermediate_size"] or whole // config["num_experts_per_tok"]
    config["shared_expert_intermediate_size"] = config["shared_expert_intermediate_size"] or whole
    config["norm_topk_prob"] = False


def qwen3moe(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp normalizes the weights of the selected experts to a sum of 1, regardless of the file."""
    config["norm_topk_prob"] = True


def glm4moe(settings: Settings, config: dict[str, Any]) -> None:
    """The first layers have no experts."""
    config["num_hidden_layers"] -= predicting(settings)
    turned(settings, config)
    config["num_nextn_predict_layers"] = 0


def lfm2(settings: Settings, config: dict[str, Any]) -> None:
    _convolving(settings, config)
    config["block_auto_adjust_ff_dim"] = False


def lfm2moe(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp normalizes the weights of the selected experts, and does not scale them."""
    _convolving(settings, config)
    config |= {"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}


def _convolving(settings: Settings, config: dict[str, Any]) -> None:
    """A layer with a convolution in place of attention is one with 0 heads of keys."""
    heads = config["num_key_value_heads"]
    some = {*heads} - {0} if isinstance(heads, list) else set()
    if len(some) != 1 or max(some) > config["num_attention_heads"]:
        key = f"{settings.architecture}.{KEYS['num_key_value_heads']}"
        raise CheckpointError(f"{key} is {short(heads)}; a list of 0 and one other number is read")
    config["num_key_value_heads"] = some.pop()
    config["layer_types"] = ["full_attention" if each else "conv" for each in heads]
    config["conv_bias"] = False


def qwen3next(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp normalizes the weights of the selected experts."""
    _linear(settings, config)
    config["norm_topk_prob"] = True


def qwen35(settings: Settings, config: dict[str, Any]) -> None:
    """Positions have three parts (SECTIONS), which are the same in text."""
    _linear(settings, config)
    sections = settings.get(SECTIONS, (list,))
    if len(sections) != 4 or not all(type(each) is int and each >= 0 for each in sections) or sections[3]:
        raise CheckpointError(f"{settings.architecture}.{SECTIONS} is {short(sections)}; three sizes and 0 are read")
    config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": sections[:3]}


def _linear(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp has one size for all heads of linear attention."""
    blocks = config["num_hidden_layers"]
    config["num_hidden_layers"] -= predicting(settings)
    keys, values, width = (config[key] for key in ("linear_num_key_heads", "linear_num_value_heads", LINEAR[1]))
    inner = settings.whole(INNER)
    if values % keys or inner != values * width:
        raise CheckpointError(
            f"{settings.architecture} has {values} heads of values, {inner} in all, for {keys} of keys; read are a "
            f"multiple of these, with {width} each"
        )
    config["linear_value_head_dim"] = width
    every = settings.whole(EVERY, PERIODS[str(settings.architecture)])
    config["layer_types"] = layer_types(config["num_hidden_layers"], every, "linear_attention")
    if (recurrent := settings.flags(RECURRENT, blocks)) is not None:
        kinds = ["linear_attention" if each else "full_attention" for each in recurrent]
        config["layer_types"] = kinds[: config["num_hidden_layers"]]
    turned(settings, config)


def gpt_oss(settings: Settings, config: dict[str, Any]) -> None:
    """The model does not round the correction range of yarn to integers, regardless of the file; llama.cpp does."""
    config["layer_types"] = windows(settings, config["num_hidden_layers"])
    _all_experts(settings, config)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False


def minimax_m2(settings: Settings, config: dict[str, Any]) -> None:
    """llama.cpp and the model normalize the weights of the selected experts."""
    turned(settings, config)
    _all_experts(settings, config)


def _all_experts(settings: Settings, config: Mapping[str, Any]) -> None:
    """Models in which all MLPs have experts have one size of them, which files say twice."""
    same = config["intermediate_size"]
    if settings.whole("expert_feed_forward_length", same) != same:
        raise CheckpointError(f"{settings.architecture}.expert_feed_forward_length is not feed_forward_length, {same}")


def gemma2(settings: Settings, config: dict[str, Any]) -> None:
    _gemma(settings, config)


def gemma3(settings: Settings, config: dict[str, Any]) -> None:
    _gemma(settings, config)
    near = {"rope_type": "default", "rope_theta": settings.real("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": near}


def _gemma(settings: Settings, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    largest = layers == LARGEST[str(settings.architecture)]
    usual = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    config["query_pre_attn_scalar"] = round(settings.real("attention.scale", usual**-0.5) ** -2)
    config["layer_types"] = windows(settings, layers)


def windows(settings: Settings, layers: int) -> list[str]:
    """The types of layers."""
    pattern = settings.get("attention.sliding_window_pattern", (int, list), PERIODS[str(settings.architecture)])
    if isinstance(pattern, int):
        return layer_types(layers, pattern or layers + 1)
    if len(pattern) != layers:
        raise CheckpointError(f"{settings.architecture}.attention.sliding_window_pattern is not of {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in pattern]


def layer_types(layers: int, every: int, others: str = "sliding_attention") -> list[str]:
    """``every``: the period of layers with full attention; ``others``: the type between them."""
    return [others if (at + 1) % every else "full_attention" for at in range(layers)]
