"""Modules of transformers and diffusers that read a weight themselves: a rule for all leaves it as it is. It was
quantized, and the forward pass ended in an error, or that of a step in training or in generation."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.numerics import sqnr

from .zoo import DECODER, ENCODER, IMAGES, ids, noise, tensors


class Case(NamedTuple):
    path: str
    """Module and class."""
    config: str
    """Class of the configuration, in transformers; empty: ``fields`` are the arguments of the class."""
    fields: dict[str, Any]
    run: Callable[[Any], Any]
    needs: str = ""
    """Another library that the class wants."""


RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]}
PYRAMID = {**RESNET, "out_features": ["stage2", "stage3", "stage4"]}
WINDOWS = {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1], "num_heads": [2, 2, 2]}
WINDOWS = {**WINDOWS, "window_size": 4, "out_features": ["stage1", "stage2", "stage3"]}
DETR = {
    **{"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5},
}
DINO = {
    **{**DETR, "d_model": 64, "num_feature_levels": 3, "backbone_config": WINDOWS},
    "text_config": {**ENCODER, "model_type": "bert", "vocab_size": 1100},
}
VIT = {"model_type": "lw_detr_vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT = {**VIT, "image_size": 64, "patch_size": 16, "out_features": ["stage1", "stage2"], "window_block_indices": [0]}
LW = {
    **{"d_model": 32, "decoder_layers": 1, "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2},
    **{"decoder_ffn_dim": 32, "num_queries": 3, "group_detr": 1, "decoder_n_points": 2},
}
EOMT = {**IMAGES, "num_queries": 4, "num_blocks": 1, "num_upscale_blocks": 1}
GLM = {"depth": 1, "hidden_size": 64, "num_heads": 4, "image_size": 56, "patch_size": 14, "intermediate_size": 64}
PER_LAYER = {
    **{**DECODER, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0},
    **{"layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": [0.0, 0.0]},
    **{"laurel_rank": 8, "pad_token_id": 0},
}
LSH = {
    **{"hidden_size": 64, "vocab_size": 96, "attention_head_size": 16, "num_attention_heads": 4, "hash_seed": 1},
    **{"attn_layers": ["lsh"], "lsh_attn_chunk_length": 8, "num_buckets": 2, "feed_forward_size": 64},
    **{"axial_pos_embds": False, "is_decoder": True, "max_position_embeddings": 64, "eos_token_id": None},
}
GRID = torch.tensor([[1, 4, 4]])


def of_transformers(
    family: str, name: str, config: str, fields: dict[str, Any], run: Callable[[Any], Any], needs: str = ""
) -> Case:
    return Case(f"transformers.models.{family}.modeling_{family}.{name}", config, fields, run, needs)


def picture(model: nn.Module) -> Any:
    return model(noise(2, 3, 64, 64))


def two_pictures(model: nn.Module) -> Any:
    return model(noise(2, 3, 32, 32))


def picture_and_text(model: nn.Module) -> Any:
    return model(pixel_values=noise(1, 3, 64, 64), input_ids=torch.tensor([[101, 7, 1012, 9, 102]]))


def written(model: Any) -> Tensor:
    """The logits of tokens that are generated one by one."""
    told = model.generate(
        ids()[:1], max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(told.logits)


def in_training(model: nn.Module) -> Any:
    return model.train()(input_ids=ids()).logits


CASES = (
    of_transformers(
        "chameleon", "ChameleonVQVAEVectorQuantizer", "ChameleonVQVAEConfig", {"embed_dim": 16, "num_embeddings": 32},
        lambda m: m(noise(1, 16, 4, 4)),
    ),
    of_transformers(
        "emu3", "Emu3VQVAEVectorQuantizer", "Emu3VQVAEConfig", {"embed_dim": 16, "codebook_size": 32},
        lambda m: m(noise(1, 2, 16, 4, 4)).float(),
    ),
    of_transformers(
        "janus", "JanusVQVAEVectorQuantizer", "JanusVQVAEConfig", {"embed_dim": 16, "num_embeddings": 32},
        lambda m: m(noise(1, 16, 4, 4)),
    ),
    of_transformers(
        "glm_image", "GlmImageVQVAEVectorQuantizer", "GlmImageVQVAEConfig", {"embed_dim": 16, "num_embeddings": 32},
        lambda m: m(noise(1, 16, 4, 4)),
    ),
    of_transformers(
        "dac", "DacVectorQuantize", "DacConfig", {"codebook_size": 16, "codebook_dim": 8, "hidden_size": 32},
        lambda m: m(noise(1, 32, 6)),
    ),
    of_transformers("eomt", "EomtForUniversalSegmentation", "EomtConfig", EOMT, two_pictures, "scipy"),
    of_transformers(
        "eomt_dinov3", "EomtDinov3ForUniversalSegmentation", "EomtDinov3Config", EOMT, two_pictures, "scipy"
    ),
    of_transformers(
        "videomt", "VideomtForUniversalSegmentation", "VideomtConfig", EOMT, lambda m: m(noise(1, 2, 3, 32, 32)),
        "scipy",
    ),
    of_transformers(
        "deformable_detr", "DeformableDetrModel", "DeformableDetrConfig",
        {**DETR, "d_model": 64, "num_feature_levels": 3, "backbone_config": PYRAMID}, picture,
    ),
    of_transformers("grounding_dino", "GroundingDinoModel", "GroundingDinoConfig", DINO, picture_and_text),
    of_transformers("mm_grounding_dino", "MMGroundingDinoModel", "MMGroundingDinoConfig", DINO, picture_and_text),
    of_transformers(
        "dab_detr", "DabDetrModel", "DabDetrConfig",
        {**DETR, "hidden_size": 64, "num_patterns": 2, "backbone_config": {**RESNET, "out_features": ["stage4"]}},
        picture,
    ),
    of_transformers(
        "lw_detr", "LwDetrModel", "LwDetrConfig",
        {**LW, "backbone_config": {**VIT, "num_windows": 4}, "projector_scale_factors": [2.0], "c2f_num_blocks": 1},
        picture,
    ),
    of_transformers("rf_detr", "RfDetrModel", "RfDetrConfig", LW, picture),
    of_transformers(
        "glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", {**GLM, "out_hidden_size": 64},
        lambda m: m(noise(16, 1176), GRID),
    ),
    of_transformers(
        "glm4v_moe", "Glm4vMoeVisionModel", "Glm4vMoeVisionConfig", {**GLM, "out_hidden_size": 64},
        lambda m: m(noise(16, 1176), GRID),
    ),
    of_transformers(
        "glm_image", "GlmImageVisionModel", "GlmImageVisionConfig", GLM, lambda m: m(noise(16, 588), GRID)
    ),
    of_transformers(
        "clipseg", "CLIPSegVisionModel", "CLIPSegVisionConfig", IMAGES, lambda m: m(noise(1, 3, 48, 48))
    ),
    of_transformers(
        "hunyuan_vl", "HunYuanVLVisionPatchEmbed", "HunYuanVLVisionConfig", {**IMAGES, "max_image_size": 32},
        lambda m: m(noise(16, 192), [[1, 4, 4]]),
    ),
    of_transformers(
        "cosmos3_edge", "Cosmos3EdgeVisionEmbeddings", "Cosmos3EdgeVisionConfig", {**ENCODER, "patch_size": 8},
        lambda m: m(noise(16, 192), GRID),
    ),
    of_transformers(
        "unlimited_ocr", "UnlimitedOcrVisionEmbeddings", "UnlimitedOcrVisionConfig", IMAGES,
        lambda m: m(noise(1, 64, 6, 6)),
    ),
    of_transformers("gemma3n", "Gemma3nForCausalLM", "Gemma3nTextConfig", PER_LAYER, in_training),
    of_transformers(
        "recurrent_gemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig",
        {**DECODER, "num_hidden_layers": 3, "lru_width": 64, "eos_token_id": None, "pad_token_id": 0}, written,
    ),
    of_transformers("reformer", "ReformerModelWithLMHead", "ReformerConfig", LSH, written),
    Case(
        "diffusers.models.autoencoders.vae.VectorQuantizer", "",
        {"n_e": 32, "vq_embed_dim": 16, "beta": 0.25, "legacy": False}, lambda m: m(noise(1, 16, 4, 4)),
    ),
    Case(
        "diffusers.models.upsampling.FirUpsample2D", "", {"channels": 8, "out_channels": 16, "use_conv": True},
        lambda m: m(noise(1, 8, 8, 8)),
    ),
    Case(
        "diffusers.models.autoencoders.autoencoder_mmaudio.MMAudioMPConv1d", "",
        {"in_channels": 8, "out_channels": 16, "kernel_size": 3}, lambda m: m(noise(1, 8, 16)),
    ),
    Case(
        "diffusers.pipelines.shap_e.renderer.ChannelsProj", "", {"vectors": 8, "channels": 4, "d_latent": 16},
        lambda m: m(noise(2, 8, 16)),
    ),
)  # fmt: skip


def made(case: Case) -> nn.Module:
    path, _, name = case.path.rpartition(".")
    if case.needs:
        pytest.importorskip(case.needs)
    kind = getattr(pytest.importorskip(path), name)
    if not case.config:
        model = kind(**case.fields)
    else:
        described = importlib.import_module(path.replace(".modeling_", ".configuration_"))
        model = kind(getattr(described, case.config)(**case.fields))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.05, generator=torch.Generator().manual_seed(param.numel()))
    return nn.ModuleDict({"inner": model.eval(), "other": nn.Linear(16, 8)})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path.rpartition(".")[2])
def test_it_computes_its_dequantized_values(case: Case) -> None:
    """Float32 throughout: only the order of sums may differ."""
    model = made(case)
    bp.quantize_(model, {"*": "int8"})
    dense = bp.dequantize_(copy.deepcopy(model))
    with torch.no_grad():
        pairs = list(zip(*(tensors(case.run(each["inner"])) for each in (model, dense)), strict=True))
    assert pairs
    assert min(float(sqnr(expected, quantized)) for quantized, expected in pairs) > 90
