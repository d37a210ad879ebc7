"""Small random transformers models unlike Llama, with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

DECODER = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
ENCODER = {
    key: DECODER[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
IMAGES = {**ENCODER, "image_size": 32, "patch_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DELTA_NET = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}
SAM = {"image_size": 32, "patch_size": 8}


def ids(length: int = 12) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) * 7 % 90 + 3


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def text() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def two_texts() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(7)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": noise(2, 3, 32, 32)}


def steps() -> dict[str, Tensor]:
    times = torch.arange(5).expand(2, 5)
    numbers = {"states": 17, "actions": 4, "rewards": 1, "returns_to_go": 1}
    return {**{name: noise(2, 5, size) for name, size in numbers.items()}, "timesteps": times}


class Kind(NamedTuple):
    model: str
    config: str
    fields: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = text


ZOO: dict[str, Kind] = {
    "t5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        two_texts,
    ),
    "deberta, one embedding for all positions": Kind(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**ENCODER, "vocab_size": 96, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "nomic bert, one matrix in its files for queries, keys and values": Kind(
        "NomicBertModel", "NomicBertConfig", {**ENCODER, "vocab_size": 96}
    ),
    "ibert, linear layers of its own": Kind("IBertForMaskedLM", "IBertConfig", {**ENCODER, "vocab_size": 96}),
    "ctrl, an embedding called w": Kind(
        "CTRLLMHeadModel", "CTRLConfig", {"vocab_size": 96, "n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4}
    ),
    "decision transformer, linear layers called embed": Kind(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "max_ep_len": 64},
        steps,
    ),
    "sam, embeddings of one row": Kind(
        "SamModel",
        "SamConfig",
        {
            "vision_config": {
                **{**SAM, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 96},
                **{"output_channels": 32, "num_pos_feats": 16, "window_size": 2, "global_attn_indexes": [1]},
            },
            "prompt_encoder_config": {**SAM, "hidden_size": 32, "image_embedding_size": 4, "mask_input_channels": 4},
            "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32},
        },
        lambda: {**image(), "input_points": torch.full((2, 1, 1, 2), 5.0)},
    ),
    "vit": Kind("ViTForImageClassification", "ViTConfig", IMAGES, image),
    "swin": Kind(
        "SwinModel",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        image,
    ),
    "llava": Kind(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "vision_config": {**IMAGES, "model_type": "clip_vision_model", "projection_dim": 64},
            "text_config": {**DECODER, "model_type": "llama"},
            "image_token_id": 95,
        },
        lambda: {**image(), "input_ids": torch.cat([torch.full((2, 16), 95), ids()], 1)},
    ),
    "wav2vec2, a convolution with its weight made of two": Kind(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **{**ENCODER, "vocab_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
        },
        lambda: {"input_values": noise(2, 2000)},
    ),
    "patchtst": Kind(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        {
            **{"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 64},
            **{"prediction_length": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96, "loss": "mse"},
        },
        lambda: {"past_values": noise(2, 32, 3)},
    ),
    "mamba, a weight without its module": Kind(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "qwen3 next": Kind(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**DECODER, **EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 48},
    ),
    "llama 4, transposed experts": Kind(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **{**DECODER, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4},
            **{"num_experts_per_tok": 1, "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [0, 1]},
            **{"no_rope_layers": [1, 0], "attention_chunk_size": 8},
        },
    ),
    "aria, transposed experts": Kind(
        "AriaTextForCausalLM", "AriaTextConfig", {**DECODER, "moe_num_experts": 4, "moe_topk": 2}
    ),
    "granite, experts one by one in its files": Kind(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "dbrx, experts below each other": Kind(
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **{"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        },
    ),
    "deepseek v4, a linear layer in groups": Kind(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **{**DECODER, "moe_intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 8, "sliding_window": 8},
            **{"n_routed_experts": 4, "n_shared_experts": 1},
        },
    ),
    "wav2vec2, a kernel in a linear layer": Kind(
        "Wav2Vec2ForXVector",
        "Wav2Vec2Config",
        {
            **{**ENCODER, "vocab_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
            **{"tdnn_dim": [32, 32], "tdnn_kernel": [3, 3], "tdnn_dilation": [1, 2], "xvector_output_dim": 32},
        },
        lambda: {"input_values": noise(2, 2000)},
    ),
    "mobilebert, a head of two weights": Kind(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        {**ENCODER, "vocab_size": 96, "embedding_size": 32, "intra_bottleneck_size": 32},
    ),
    "rwkv, weights that are scaled in place": Kind(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64, "rescale_every": 1},
    ),
    "layoutlm, a linear layer that is looked up in": Kind(
        "LayoutLMv3ForTokenClassification",
        "LayoutLMv3Config",
        {
            **{**ENCODER, "vocab_size": 96, "input_size": 32, "patch_size": 8, "coordinate_size": 8, "shape_size": 16},
            **{"max_position_embeddings": 64, "rel_pos_bins": 32, "rel_2d_pos_bins": 64},
        },
        lambda: {**text(), "bbox": torch.zeros(2, 12, 4, dtype=torch.int64)},
    ),
    "detr, a linear layer that is a convolution": Kind(
        "DetrForSegmentation",
        "DetrConfig",
        {
            **{"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
            **{"encoder_attention_heads": 8, "decoder_attention_heads": 8, "num_queries": 4},
            "use_timm_backbone": False,
            "backbone_config": {
                **{"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 32, 32]},
                **{"depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]},
            },
        },
        lambda: {"pixel_values": noise(2, 3, 64, 64)},
    ),
    "voxtral's encoder, a table of positions that is added whole": Kind(
        "VoxtralEncoder",
        "VoxtralEncoderConfig",
        {**ENCODER, "head_dim": 16, "num_mel_bins": 8, "max_source_positions": 12},
        lambda: {"input_features": noise(2, 8, 24)},
    ),
    "prophetnet, a table of which single rows are added": Kind(
        "ProphetNetModel",
        "ProphetNetConfig",
        {
            **{"vocab_size": 96, "hidden_size": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "ngram": 2},
            **{"num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 4},
            **{"num_decoder_attention_heads": 4, "max_position_embeddings": 64},
        },
        two_texts,
    ),
    "gemma 4, a table of which one row is read": Kind(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {
            "text_config": {
                **{**DECODER, "pad_token_id": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
                **{"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
                "global_head_dim": 16,
            },
            **{"vision_config": None, "audio_config": None},
            **{"image_token_id": 95, "audio_token_id": 94, "video_token_id": 93},
        },
    ),
}


def model_of(name: str) -> nn.Module:
    """Build the model in float32 and evaluation mode, with weights large enough that rounding them shows."""
    kind, special = ZOO[name], {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, kind.config)(**kind.fields, **(special if "vocab_size" in kind.fields else {}))
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind.model)(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.05)
    return model.eval()


def tensors(output: Any) -> list[Tensor]:
    """The float tensors in a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for each in inner for tensor in tensors(each)]


def outputs(model: nn.Module, name: str) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(**ZOO[name].inputs()))
