"""One low-bit model, right and fast on every accelerator."""

from bitport import ops  # noqa: F401  (declares the ops)
from bitport.algorithms.mixed import mixed
from bitport.api import dequantize_, explain, plan, quantize_
from bitport.checkpoint import load, save
from bitport.nn.fuse import fuse_activations_
from bitport.ops import decompositions, use_kernel
from bitport.schemes import PRESETS, Plan, Recipe, Rule, Scheme, preset
from bitport.tensor import QTensor, quantize_tensor

__all__ = [
    "PRESETS",
    "Plan",
    "QTensor",
    "Recipe",
    "Rule",
    "Scheme",
    "decompositions",
    "dequantize_",
    "explain",
    "fuse_activations_",
    "load",
    "mixed",
    "plan",
    "preset",
    "quantize_",
    "quantize_tensor",
    "save",
    "use_kernel",
]

__version__ = "0.1.0.dev0"
