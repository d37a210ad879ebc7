"""A small model quantized and written by bitport, and loaded by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.checkpoint import quantize_files
from bitport.interop import convert
from bitport.interop.sources import Own
from bitport.tensor import QTensor

models = pytest.importorskip("tests.integrations.models")


def loaded(path: Path, form: str, scheme: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return (the model that transformers loads from the files, the float model with the same numbers). ``path`` is an
    empty folder. down_proj is not quantized, and there are several files."""
    source = models.make_directory(path / "float", dtype=dtype)
    quantize_files(source, path / "q", {"*.down_proj": "skip", "*_proj": scheme}, progress=False)
    for to, target in ((form, "theirs"), ("float", "dense")):
        convert(path / "q", path / target, to=to, shard_size=100_000, progress=False)
    auto = models.transformers.AutoModelForCausalLM
    return tuple(auto.from_pretrained(path / target).eval() for target in ("theirs", "dense"))


def weights(path: Path) -> dict[str, QTensor]:
    """The quantized weights of :func:`loaded`, by module name."""
    found = Own(path / "q").items()
    return {name.removesuffix(".weight"): q for name, q in found if isinstance(q, QTensor)}
