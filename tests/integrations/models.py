"""Small Hugging Face directories: a random Llama whose weights matter, with a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'bitport[hf]'")

END = "<|end|>"
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


def config(**changes: Any) -> Any:
    """Weights of standard deviation 0.15, so that rounding them moves the logits."""
    fields: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": torch.bfloat16,
    }
    return transformers.LlamaConfig(**{**fields, **changes})


def make_directory(directory: Path, *, shard_size: str = "5GB", **changes: Any) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**changes))
    model.generation_config.repetition_penalty = 1.25
    model.save_pretrained(directory, max_shard_size=shard_size)
    make_tokenizer(directory)
    return directory


def make_tokenizer(directory: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0, **{letter: at + 1 for at, letter in enumerate(alphabet)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40).reshape(2, 20) * 7 % 320
    with torch.no_grad():
        return model(input_ids=ids).logits
