"""Classes of transformers, diffusers and timm whose forward reshapes, indexes, concatenates, adds or scales a weight
itself, which needs a plain tensor, instead of only calling the layer that has it."""

from __future__ import annotations

from collections.abc import Mapping

POSITIONS = ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias")
QUERIES = ("queries_embedder", "queries_features", "level_embed")
PROMPTS = ("point_embed", "not_a_point_embed", "no_mask_embed")
TOKENS = ("iou_token", "mask_tokens", "hq_token", "obj_score_token")
SAM = ("Sam", "SamHQ", "Sam2", "Sam2Video", "Sam3Tracker", "Sam3TrackerVideo", "EdgeTam", "EdgeTamVideo")
CONCEPTS = ("cls_embed", "query_embed", "reference_points", "presence_token")
QUERIED = ("Detr", "ConditionalDetr", "TableTransformer", "DeformableDetr", "GroundingDino", "MMGroundingDino")
GRIDS = ("Glm4vVision", "Glm4vMoeVision", "GlmImageVision", "Cosmos3EdgeVision", "UnlimitedOcrVision", "CLIPSegVision")
CODEBOOKS = ("ChameleonVQVAE", "Emu3VQVAE", "JanusVQVAE", "GlmImageVQVAE", "")

READ_OTHERWISE: dict[str, tuple[str, ...]] = {
    "DeepseekV4GroupedLinear": ("",),
    "TDNNLayer": ("kernel",),
    "MobileBertLMPredictionHead": ("dense", "decoder"),
    "RwkvSelfAttention": ("output",),
    "RwkvFeedForward": ("value",),
    "LSHSelfAttention": ("query_key", "value"),
    "Gemma3nTextAltUp": ("prediction_coefs", "correction_coefs"),
    "RecurrentGemmaRecurrentBlock": ("conv_1d",),
    "DetrMHAttentionMap": ("k_proj",),
    "ConditionalDetrMHAttentionMap": ("k_proj",),
    "MaskFormerDetrMHAttentionMap": ("k_proj",),
    "DabDetrMHAttentionMap": ("k_linear",),
    "LayoutLMv2Encoder": POSITIONS,
    "LayoutLMv3Encoder": POSITIONS,
    "PPDocLayoutV2ReadingOrderEncoder": POSITIONS,
    "WeightStandardizedConv2d": ("",),
    **dict.fromkeys(("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"), ("",)),
    "ProphetNetDecoder": ("ngram_embeddings",),
    "Siglip2VisionEmbeddings": ("position_embedding",),
    **{f"{family}Embeddings": ("position_embedding",) for family in GRIDS},
    **dict.fromkeys(("HunYuanVLVisionPatchEmbed", "HYV4VLVisionPatchEmbed"), ("position_embedding",)),
    **dict.fromkeys(
        ("VoxtralEncoder", "Qwen2AudioEncoder", "AudioFlamingo3Encoder", "MossTranscribeDiarizeAudioModel"),
        ("embed_positions",),
    ),
    **{f"{family}VectorQuantizer": ("embedding",) for family in CODEBOOKS},
    "DacVectorQuantize": ("codebook",),
    **{f"{family}Model": ("query_position_embeddings",) for family in QUERIED},
    **dict.fromkeys(("LwDetrModel", "RfDetrModel"), ("reference_point_embed", "query_feat")),
    **{f"{family}ForUniversalSegmentation": ("query",) for family in ("Eomt", "EomtDinov3", "Videomt")},
    "DeepseekOcr2VisionModel": ("query_768_resolution", "query_1024_resolution"),
    "OmDetTurboDecoder": ("tgt_embed",),
    "OneFormerTextMapper": ("prompt_ctx",),
    **dict.fromkeys(("DebertaEncoder", "DebertaV2Encoder", "SEWDTransformerEncoder"), ("rel_embeddings",)),
    "DabDetrModel": ("query_refpoint_embeddings", "patterns"),
    **dict.fromkeys(
        ("MaskFormerTransformerModule", "Mask2FormerTransformerModule", "OneFormerTransformerModule"), QUERIES
    ),
    **{f"{family}PromptEncoder": PROMPTS for family in SAM},
    **{f"{family}MaskDecoder": TOKENS for family in SAM},
    **dict.fromkeys(("Sam3GeometryEncoder", "Sam3DetrDecoder"), CONCEPTS),
    **dict.fromkeys(("Sam3LiteTextGeometryEncoder", "Sam3LiteTextDetrDecoder"), CONCEPTS),
    "FirUpsample2D": ("Conv2d_0",),
    "MMAudioMPConv1d": ("",),
    "ChannelsProj": ("proj",),
}
"""Class -> its children ("": itself) whose weights get the kind "other"."""


def is_read_otherwise(module: str, classes: Mapping[str, str]) -> bool:
    """Whether READ_OTHERWISE lists the class of ``module`` itself, or for an ancestor's class the child that contains
    it. ``classes``: class name of each module, by module name."""
    names = module.split(".")
    children = ((".".join(names[:at]), name) for at, name in enumerate(names))
    return any(name in READ_OTHERWISE.get(classes.get(of, ""), ()) for of, name in (*children, (module, "")))
