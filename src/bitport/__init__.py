"""One low-bit model, right and fast on every accelerator."""

import importlib
import types
from typing import TYPE_CHECKING

from bitport import ops  # noqa: F401  (declares the ops)
from bitport.algorithms.mixed import mixed
from bitport.api import dequantize_, explain, plan, quantize_
from bitport.checkpoint import load, save
from bitport.nn.fuse import fuse_activations_
from bitport.ops import decompositions, use_kernel
from bitport.schemes import PRESETS, Plan, Recipe, Rule, Scheme, preset
from bitport.tensor import QTensor, quantize_tensor

if TYPE_CHECKING:
    from bitport import cache, export, interop, stream, train  # noqa: F401

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

_ON_DEMAND = ("cache", "export", "interop", "stream", "train")

if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> types.ModuleType:
        """``bitport.train`` and others, imported where they are first used."""
        if name in _ON_DEMAND:
            return importlib.import_module(f"bitport.{name}")
        raise AttributeError(f"module 'bitport' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
