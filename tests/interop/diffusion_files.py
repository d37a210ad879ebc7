"""Small diffusion models, the original names and shapes of their tensors, and GGUF files of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from .files import config_in
from .gguf_files import gguf, to_bytes

diffusers = pytest.importorskip("diffusers", reason="needs the extra: pip install 'bitport[diffusers]'")
pytest.importorskip("accelerate", reason="needs the extra: pip install 'bitport[diffusers]'")
single_file = pytest.importorskip("diffusers.loaders.single_file_model")

WIDTH, TEXT = 256, 64
Shapes = dict[str, tuple[int, ...]]


class Original(NamedTuple):
    """A model in its original form; ``names`` maps the shapes of the model's tensors to those of the first
    publication."""

    architecture: str
    model: Callable[[], Any]
    names: Callable[[Shapes], Shapes]
    inputs: dict[str, Tensor]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def renamed(shapes: Shapes, rules: Mapping[str, str]) -> Shapes:
    found = {}
    for name, shape in shapes.items():
        for pattern, to in rules.items():
            name, done = re.subn(rf"^{pattern}\b", to, name)
            if done:
                break
        found[name] = shape
    return found


def joined(shapes: Shapes, parts: tuple[str, ...], whole: str) -> Shapes:
    """Replace ``parts`` with one tensor at the position of the first."""
    found: Shapes = {}
    for name, shape in shapes.items():
        part = next((part for part in parts if f".{part}." in name), None)
        name = name.replace(f".{part}.", f".{whole}.")
        found[name] = (found.get(name, (0,))[0] + shape[0], *shape[1:]) if part else shape
    return found


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=WIDTH // 2, in_channels=4, out_channels=4,
        text_dim=TEXT, freq_dim=32, ffn_dim=2 * WIDTH, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip


def wan_names(shapes: Shapes) -> Shapes:
    block = r"(blocks\.\d+)"
    attention = {"to_out.0": "o", "to_q": "q", "to_k": "k", "to_v": "v", "norm_q": "norm_q", "norm_k": "norm_k"}
    return renamed(
        shapes,
        {
            r"condition_embedder\.time_embedder\.linear_1": "time_embedding.0",
            r"condition_embedder\.time_embedder\.linear_2": "time_embedding.2",
            r"condition_embedder\.text_embedder\.linear_1": "text_embedding.0",
            r"condition_embedder\.text_embedder\.linear_2": "text_embedding.2",
            r"condition_embedder\.time_proj": "time_projection.1",
            "scale_shift_table": "head.modulation",
            "proj_out": "head.head",
            rf"{block}\.scale_shift_table": r"\1.modulation",
            rf"{block}\.norm2": r"\1.norm3",
            rf"{block}\.ffn\.net\.0\.proj": r"\1.ffn.0",
            rf"{block}\.ffn\.net\.2": r"\1.ffn.2",
            **{rf"{block}\.attn1\.{re.escape(ours)}": rf"\1.self_attn.{its}" for ours, its in attention.items()},
            **{rf"{block}\.attn2\.{re.escape(ours)}": rf"\1.cross_attn.{its}" for ours, its in attention.items()},
        },
    )


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=WIDTH // 4, num_attention_heads=4,
        joint_attention_dim=TEXT, caption_projection_dim=WIDTH, pooled_projection_dim=TEXT, pos_embed_max_size=8,
        dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def sd3_names(shapes: Shapes) -> Shapes:
    shapes = joined(shapes, ("attn.to_q", "attn.to_k", "attn.to_v"), "attn.qkv")
    shapes = joined(shapes, ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "attn2.qkv")
    shapes = joined(shapes, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.added_qkv")
    block = r"transformer_blocks\.(\d+)"
    x, context = r"joint_blocks.\1.x_block", r"joint_blocks.\1.context_block"
    return renamed(
        shapes,
        {
            r"pos_embed\.pos_embed": "pos_embed",
            r"pos_embed\.proj": "x_embedder.proj",
            r"time_text_embed\.timestep_embedder\.linear_1": "t_embedder.mlp.0",
            r"time_text_embed\.timestep_embedder\.linear_2": "t_embedder.mlp.2",
            r"time_text_embed\.text_embedder\.linear_1": "y_embedder.mlp.0",
            r"time_text_embed\.text_embedder\.linear_2": "y_embedder.mlp.2",
            r"norm_out\.linear": "final_layer.adaLN_modulation.1",
            "proj_out": "final_layer.linear",
            rf"{block}\.attn\.added_qkv": f"{context}.attn.qkv",
            rf"{block}\.attn\.norm_added_q": f"{context}.attn.ln_q",
            rf"{block}\.attn\.norm_added_k": f"{context}.attn.ln_k",
            rf"{block}\.attn\.to_add_out": f"{context}.attn.proj",
            rf"{block}\.(attn2?)\.norm_q": rf"{x}.\2.ln_q",
            rf"{block}\.(attn2?)\.norm_k": rf"{x}.\2.ln_k",
            rf"{block}\.(attn2?)\.to_out\.0": rf"{x}.\2.proj",
            rf"{block}\.(attn2?)\.qkv": rf"{x}.\2.qkv",
            rf"{block}\.norm1\.linear": f"{x}.adaLN_modulation.1",
            rf"{block}\.norm1_context\.linear": f"{context}.adaLN_modulation.1",
            rf"{block}\.ff\.net\.0\.proj": f"{x}.mlp.fc1",
            rf"{block}\.ff\.net\.2": f"{x}.mlp.fc2",
            rf"{block}\.ff_context\.net\.0\.proj": f"{context}.mlp.fc1",
            rf"{block}\.ff_context\.net\.2": f"{context}.mlp.fc2",
        },
    )


def ltx() -> Any:
    return diffusers.LTXVideoTransformer3DModel(
        in_channels=32, out_channels=32, num_attention_heads=2, attention_head_dim=WIDTH // 2, num_layers=2,
        cross_attention_dim=WIDTH, caption_channels=TEXT,
    )  # fmt: skip


def ltx_names(shapes: Shapes) -> Shapes:
    inner = {rf"(.*)\.norm_{each}": rf"\1.{each}_norm" for each in "qk"}
    return renamed(shapes, {"proj_in": "patchify_proj", "time_embed": "adaln_single", **inner})


def qwen() -> Any:
    return diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=TEXT, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=WIDTH, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=TEXT,
        axes_dims=[16, 24, 24], axes_lens=[64, 64, 64],
    )  # fmt: skip


def z_image_names(shapes: Shapes) -> Shapes:
    shapes = joined(shapes, ("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv")
    return renamed(
        shapes,
        {
            r"all_final_layer\.2-1": "final_layer",
            r"all_x_embedder\.2-1": "x_embedder",
            r"(.*)\.attention\.to_out\.0": r"\1.attention.out",
            **{rf"(.*)\.attention\.norm_{each}": rf"\1.attention.{each}_norm" for each in "qk"},
        },
    )


def unet() -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=TEXT, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


def unet_names(shapes: Shapes) -> Shapes:
    resnets = {
        r"down_blocks\.0\.resnets\.0": "input_blocks.1.0",
        r"down_blocks\.1\.resnets\.0": "input_blocks.3.0",
        r"mid_block\.resnets\.0": "middle_block.0",
        r"mid_block\.resnets\.1": "middle_block.2",
        **{rf"up_blocks\.{at // 2}\.resnets\.{at % 2}": f"output_blocks.{at}.0" for at in range(4)},
    }
    inner = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    return renamed(
        shapes,
        {
            r"time_embedding\.linear_1": "time_embed.0",
            r"time_embedding\.linear_2": "time_embed.2",
            "conv_in": "input_blocks.0.0",
            "conv_norm_out": "out.0",
            "conv_out": "out.2",
            r"down_blocks\.0\.downsamplers\.0\.conv": "input_blocks.2.0.op",
            r"down_blocks\.1\.attentions\.0": "input_blocks.3.1",
            r"mid_block\.attentions\.0": "middle_block.1",
            r"up_blocks\.0\.attentions\.(\d)": r"output_blocks.\1.1",
            r"up_blocks\.0\.upsamplers\.0\.conv": "output_blocks.1.2.conv",
            **{rf"{ours}\.{a}": f"{its}.{b}" for ours, its in resnets.items() for a, b in inner.items()},
        },
    )


ENCODED = {"encoder_hidden_states": random(1, 6, TEXT), "timestep": torch.tensor([0.5])}
ORIGINALS: dict[str, Original] = {
    "wan": Original("wan", wan, wan_names, {**ENCODED, "hidden_states": random(1, 4, 2, 8, 8)}),
    "sd3": Original(
        "sd3", sd3, sd3_names, {**ENCODED, "pooled_projections": random(1, TEXT), "hidden_states": random(1, 4, 8, 8)}
    ),
    "ltx": Original(
        "ltxv",
        ltx,
        ltx_names,
        {**ENCODED, "hidden_states": random(1, 8, 32), "encoder_attention_mask": torch.ones(1, 6)}
        | {"num_frames": 2, "height": 2, "width": 2},  # type: ignore[dict-item]
    ),
    "qwen": Original(
        "qwen_image",
        qwen,
        lambda shapes: {f"model.diffusion_model.{name}": shape for name, shape in shapes.items()},
        {**ENCODED, "hidden_states": random(1, 4, 16), "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.bool)}
        | {"img_shapes": [[(1, 2, 2)]]},  # type: ignore[dict-item]
    ),
    "z_image": Original(
        "lumina2",
        z_image,
        z_image_names,
        {"x": [random(4, 1, 8, 8)], "cap_feats": [random(6, TEXT)], "t": torch.tensor([0.5])},  # type: ignore[dict-item]
    ),
    "unet": Original("sd1", unet, unet_names, {**ENCODED, "sample": random(1, 4, 8, 8)}),
}


def shapes_of(model: Any) -> Shapes:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def described(model: Any, folder: Path) -> Path:
    """Write its config.json."""
    model.save_config(folder)
    return folder


def write(
    path: Path,
    architecture: str,
    shapes: Shapes,
    kinds: dict[str, str],
    *,
    stored: Mapping[str, tuple[int, ...]] | None = None,
    changes: dict[str, Any] | None = None,
    parts: int = 0,
) -> dict[str, Tensor]:
    """Write random tensors to a GGUF file, and return their values. ``kinds`` maps regular expressions for names to
    types of matrices; the first match decides, F32 if none does. ``stored``: shapes in the file where these differ from
    the tensors' own, which then go into a setting. ``changes``: further settings, (value, type). ``parts``: the number
    of tensors per file, if the model is split."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=parts)
    for key, setting in (changes or {}).items():
        writer.add_key_value(key, *setting)
    values = {}
    for at, (name, shape) in enumerate(shapes.items()):
        kind = next((kind for pattern, kind in kinds.items() if re.fullmatch(pattern, name)), "F32")
        lies = (stored or {}).get(name, shape)
        if lies != shape:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(shape))
        value = random(*lies, seed=at) * (0.3 if len(shape) == 1 else max(shape[-1], 16) ** -0.5)
        if kind == "F32":
            raw: Any = value.numpy()
        elif kind == "BF16":
            value = value.bfloat16().float()
            raw = value.bfloat16().view(torch.int16).numpy().view(np.uint8)
        else:
            raw, value = to_bytes(value, kind)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        values[name] = value.reshape(shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def mapped(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``values`` under diffusers' own names, converted by diffusers."""
    entry = single_file.SINGLE_FILE_LOADABLE_CLASSES[type(model).__name__]
    given = {name.removeprefix("model.diffusion_model."): value for name, value in values.items()}
    if type(model).__name__ == "UNet2DConditionModel":
        given = {f"model.diffusion_model.{name}": value for name, value in given.items()}
    made: dict[str, Tensor] = entry["checkpoint_mapping_fn"](config=dict(model.config), checkpoint=given)
    return made


def answer(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found = model(**inputs, return_dict=False)[0]
    made: Tensor = found[0] if isinstance(found, list) else found
    return made


def with_config(folder: Path, config: Path, **changes: Any) -> Path:
    """Write a modified copy of the configuration in ``config`` to ``folder``; None removes a key."""
    said = {**config_in(config), **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return folder
