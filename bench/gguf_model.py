"""Write a GGUF file with the shapes of a Llama and random blocks, for timing llama.cpp; its outputs are meaningless."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = {"Q4_0": gguf.GGMLQuantizationType.Q4_0, "Q8_0": gguf.GGMLQuantizationType.Q8_0}
BLOCK = {"Q4_0": 16, "Q8_0": 32}
"""Bytes of codes for 32 weights, preceded by two bytes of scale."""


def write(path: Path, settings: dict[str, Any], kind: str) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(settings["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)
    for name, n, k in matrices(settings):
        blocks = random.integers(0, 256, (n, k // 32, 2 + BLOCK[kind]), dtype=np.uint8)
        blocks[..., :2] = np.array([0.004 if kind == "Q4_0" else 0.0003], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(n, -1), raw_dtype=TYPES[kind])
    for name in norms(settings):
        writer.add_tensor(name, np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrices(settings: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(name, out, in)"""
    hidden, inner, vocab = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    narrow = hidden // settings["num_attention_heads"] * settings["num_key_value_heads"]
    yield "token_embd.weight", vocab, hidden
    yield "output.weight", vocab, hidden
    for layer in range(settings["num_hidden_layers"]):
        for name, n, k in (
            ("attn_q", hidden, hidden),
            ("attn_k", narrow, hidden),
            ("attn_v", narrow, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            yield f"blk.{layer}.{name}.weight", n, k


def norms(settings: dict[str, Any]) -> Iterator[str]:
    yield "output_norm.weight"
    for layer in range(settings["num_hidden_layers"]):
        yield f"blk.{layer}.attn_norm.weight"
        yield f"blk.{layer}.ffn_norm.weight"
