"""Small diffusers models with random weights, and a pipeline of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="needs the extra: pip install 'bitport[diffusers]'")
pytest.importorskip("accelerate", reason="needs the extra: pip install 'bitport[diffusers]'")
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

HIDDEN = 32


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=HIDDEN, pooled_projection_dim=HIDDEN, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=HIDDEN, caption_projection_dim=32, pooled_projection_dim=HIDDEN, pos_embed_max_size=8,
    )  # fmt: skip


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        text_dim=HIDDEN, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=HIDDEN, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


def vae() -> Any:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32, 32), latent_channels=4, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ENCODED = {"encoder_hidden_states": random(1, 6, HIDDEN), "timestep": torch.tensor([0.5])}
POOLED = {**ENCODED, "pooled_projections": random(1, HIDDEN, seed=2)}

COMPONENTS: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor]]] = {
    "flux": (
        flux,
        {
            **POOLED,
            "hidden_states": random(1, 16, 4),
            "img_ids": random(16, 3).abs().floor(),
            "txt_ids": torch.zeros(6, 3),
        },
    ),
    "sd3": (sd3, {**POOLED, "hidden_states": random(1, 4, 8, 8)}),
    "wan": (wan, {**ENCODED, "hidden_states": random(1, 4, 2, 8, 8)}),
    "unet": (unet, {**ENCODED, "sample": random(1, 4, 8, 8)}),
    "vae": (vae, {"sample": random(1, 3, 16, 16)}),
}
"""Name -> a function that builds the model, and inputs for it."""


def made(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return COMPONENTS[name][0]().eval()


def output(model: Any, name: str) -> torch.Tensor:
    dtype = model.dtype
    inputs = {key: value.to(dtype) for key, value in COMPONENTS[name][1].items()}
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def pipeline() -> Any:
    """Stable Diffusion: a CLIP text encoder with its tokenizer, a UNet, an autoencoder and a scheduler."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        encoder = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**sizes, **special, vocab_size=64, max_position_embeddings=16)
        )
    return diffusers.StableDiffusionPipeline(
        text_encoder=encoder.eval(), tokenizer=tokenizer(), unet=made("unet"), vae=made("vae"),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer of single letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    every = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    return transformers.CLIPTokenizer(
        vocab={token: at for at, token in enumerate(every)}, merges=[], model_max_length=16
    )


def image(pipe: Any) -> torch.Tensor:
    """Run two steps on a prompt, and return the image."""
    pipe.set_progress_bar_config(disable=True)
    made = pipe("a cat", num_inference_steps=2, height=16, width=16, output_type="pt",
                generator=torch.Generator().manual_seed(3))  # fmt: skip
    return made.images


def flux_pipeline(transformer: Any) -> Any:
    """A pipeline of a transformer alone, for prompts that are already encoded."""
    pipe = diffusers.FluxPipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=None,
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any, device: str = "cpu") -> torch.Tensor:
    """Run two steps on a prompt, and return the latents."""
    prompt = {"prompt_embeds": random(1, 6, HIDDEN), "pooled_prompt_embeds": random(1, HIDDEN, seed=2)}
    made = pipe(**{key: value.to(device) for key, value in prompt.items()}, num_inference_steps=2, height=64, width=64,
                output_type="latent", generator=torch.Generator().manual_seed(3))  # fmt: skip
    return made.images.cpu()
