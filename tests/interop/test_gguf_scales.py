"""Scales stored as separate tensors in GGUF files: NVFP4 has one for each matrix."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.gguf import Gguf

from .files import assert_described
from .gguf_files import model_of, write
from .gguf_models import EXPERTS, GPT_OSS, small
from .test_gguf import assert_same_answers

NVFP4 = {r"token_embd.*": "Q6_K", r".*(attn_[qkv]|ffn_\w+|output)\.weight": "NVFP4"}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: small("LlamaConfig"), id="llama"),
        pytest.param(lambda: small("Qwen3MoeConfig", head_dim=64, **EXPERTS), id="qwen3moe"),
        pytest.param(lambda: small("GptOssConfig", **GPT_OSS), id="gpt-oss"),
    ],
)
def test_scales_of_tensors(config: Any, tmp_path: Path) -> None:
    """NVFP4 has one for each matrix, as a separate tensor."""
    model = write(tmp_path / "m.gguf", model_of(config()), NVFP4)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert "nvfp4-wo" in done.weights.values()
    assert any("inputs are taken as they are" in note and ".input_scale" in note for note in done.notes)
    assert_same_answers(model, tmp_path / "out")
    assert_described(Gguf(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        ({"blk.0.ffn_up.scale": torch.ones(2)}, r"blk\.0\.ffn_up\.scale is F32 \[2\], and must be F32 \[1\]"),
        ({"blk.0.ffn_up.scale": torch.full((1,), math.inf)}, "must be finite"),
        ({"blk.0.attn_q.scale": torch.ones(1)}, r"blk\.0\.attn_q\.weight, a weight of F32: NVFP4 alone"),
        ({"blk.7.ffn_up.scale": torch.ones(1)}, r"blk\.7\.ffn_up\.weight, which is not there"),
    ],
)
def test_scales_that_do_not_fit(vectors: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    model = model_of(small("LlamaConfig"))
    write(tmp_path / "m.gguf", model, {r".*ffn_up\.weight": "NVFP4"}, vectors=vectors, scaled=False)
    with pytest.raises(CheckpointError, match=said):
        convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)


def test_without_scales_of_tensors(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", model_of(small("LlamaConfig")), NVFP4, scaled=False)
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert "nvfp4-wo" in done.weights.values()
    assert done.notes == ()
    assert_same_answers(model, tmp_path / "out")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: small("Qwen3MoeConfig", head_dim=64, **EXPERTS), id="qwen3moe"),
        pytest.param(lambda: small("GptOssConfig", **GPT_OSS), id="gpt-oss"),
    ],
)
def test_two_scales_of_one_tensor(config: Any, tmp_path: Path) -> None:
    """The rows of gate and up are in one tensor of the model, stacked or interleaved."""
    model = model_of(config())
    kinds = {r".*ffn_(gate|up)_exps\.weight": "NVFP4"}
    vectors = {f"blk.{block}.ffn_{leaf}_exps.scale": torch.ones(4) for block in (0, 1) for leaf in ("gate", "up")}
    scale = torch.tensor([1, 1, 0.3, 1])
    write(tmp_path / "m.gguf", model, kinds, vectors=vectors | {"blk.1.ffn_up_exps.scale": scale}, scaled=False)
    both = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").data
    half = both.shape[1] // 2
    ups = both[:, :, 1::2] if "gpt" in model.config.model_type else both[:, half:]
    ups *= scale.reshape(-1, 1, 1)
    assert_described(Gguf(tmp_path / "m.gguf"))
    done = convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    first, second = (done.weights[f"model.layers.{block}.mlp.experts.gate_up_proj"] for block in (0, 1))
    assert (first, second) == ("nvfp4-wo", "custom(float4_e2m1-g16, float32 scales)")
    assert any("6 bits" in note and "layers.1" in note and "layers.0" not in note for note in done.notes)
    assert_same_answers(model, tmp_path / "out")
    del vectors["blk.1.ffn_up_exps.scale"]
    write(tmp_path / "n.gguf", model, kinds, vectors=vectors, scaled=False)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_gate_exps\.scale is there, and not that of each of"):
        Gguf(tmp_path / "n.gguf")
