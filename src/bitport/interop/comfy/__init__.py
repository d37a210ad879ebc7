"""Quantized diffusion models of ComfyUI: a single safetensors file without a configuration."""

from bitport.interop.comfy.source import SUFFIX, Comfy
from bitport.interop.comfy.stored import is_theirs

__all__ = ["SUFFIX", "Comfy", "is_theirs"]
