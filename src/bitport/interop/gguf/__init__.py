"""GGUF files of llama.cpp: the container (header), its numbers (blocks), and what makes a model of transformers of them
(names, config, tokenizer, source)."""

from bitport.interop.gguf.source import Gguf

__all__ = ["Gguf"]
