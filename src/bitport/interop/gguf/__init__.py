"""GGUF files of llama.cpp: the container (header, parts, output), the numbers (blocks, joins), reading as a model of
transformers (keys, names, config, tokenizer, source) or of diffusers (diffusion), and writing of a model of
transformers (settings, vocabulary, writer)."""

from bitport.interop.gguf.diffusion import Diffusion
from bitport.interop.gguf.source import Gguf
from bitport.interop.gguf.split_files import SUFFIX, model_at
from bitport.interop.gguf.writer import Writer

__all__ = ["SUFFIX", "Diffusion", "Gguf", "Writer", "model_at"]
