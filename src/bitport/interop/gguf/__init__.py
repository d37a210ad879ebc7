"""GGUF files of llama.cpp: the container (header, parts, output), its numbers (blocks, joins), and what makes a model
of transformers of them (names, config, tokenizer, source) or of diffusers (diffusion), or them of one of transformers
(settings, vocabulary, writer)."""

from bitport.interop.gguf.diffusion import Diffusion
from bitport.interop.gguf.parts import SUFFIX, model_at
from bitport.interop.gguf.source import Gguf
from bitport.interop.gguf.writer import Writer

__all__ = ["SUFFIX", "Diffusion", "Gguf", "Writer", "model_at"]
