"""GGUF files against transformers' own reading of them, which dequantizes every block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.interop import convert

from .gguf_files import model_of, transformers, write
from .gguf_models import small
from .test_gguf import assert_same_answers

pytestmark = pytest.mark.peers
pytest.importorskip("accelerate", reason="transformers reads GGUF with it: pip install accelerate")
huggingface = pytest.importorskip("bitport.integrations.huggingface")

KINDS = {
    r"token_embd.*": "Q6_K",
    r"output\..*": "Q2_K",
    r".*attn_q\..*": "Q4_K",
    r".*attn_k\..*": "Q8_0",
    r".*attn_v\..*": "Q5_K",
    r".*attn_qkv\..*": "Q4_0",
    r".*ffn_down\..*": "Q4_1",
    r".*ffn_up\..*": "Q5_1",
    r".*ffn_gate\..*": "Q3_K",
    r".*exps\..*": "Q5_0",
}
GEMMA: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "changes", "whole"),
    [
        ("LlamaConfig", {}, True),
        ("LlamaConfig", {"tie_word_embeddings": True}, True),
        ("Qwen2Config", {}, True),
        ("Qwen3Config", {"head_dim": 128}, True),
        ("Qwen3MoeConfig", {"head_dim": 64, **EXPERTS}, False),
        ("Qwen2MoeConfig", {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 256}, False),
        ("Starcoder2Config", {"norm_epsilon": 1e-5}, False),
        ("Phi3Config", {}, False),
        ("Gemma2Config", GEMMA, False),
        ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 7}, False),
    ],
)
def test_the_same_model(kind: str, changes: dict[str, Any], whole: bool, tmp_path: Path) -> None:
    """``whole``: transformers reads the config too. For other models its config would lack values that llama.cpp
    assumes, such as query_pre_attn_scalar."""
    write(tmp_path / "m.gguf", model_of(small(kind, **changes)), KINDS)
    convert(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    ours = huggingface.load_model(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, **({} if whole else {"config": ours.config})
    )
    assert_same_answers(theirs, tmp_path / "out")
