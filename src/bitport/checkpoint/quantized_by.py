"""Which other tool has quantized a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bitport.checkpoint.parse import json_object

QUANTIZATION = ("quantization_config", "compression_config")
"""Keys of config.json that describe how weights are quantized."""
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
    "quantization_map.json": "quanto",
}
"""Files that, in some checkpoints, are the only description of the quantization -> its method."""
QUANTIZED = {".W_q": "hqq"}
"""Suffixes of tensor names that may be the only sign of a library's quantization -> its method."""
MLX = "quantization"
"""The key of config.json for MLX, which names no method."""
MLX_OF_AUTOROUND = ("mlx", "auto_round:mlx")
"""The packing_format of AutoRound for files of MLX, where its own settings leave out those of single layers."""


def quantized_by(path: Path, config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any] | None:
    """How the weights in ``path`` are quantized, with the method as "quant_method", according to ``config``
    (config.json), the separate file of older libraries, or else the names of tensors; None if they are not."""
    parts = (config, *config.values())  # text_config, vision_config ..
    mlx = config.get(MLX)
    found = [part[key] for key in QUANTIZATION for part in parts if _has(part, key)]
    named = [said for said in found if _has(said, "quant_method")]
    if isinstance(mlx, dict) and all(said.get("packing_format") in MLX_OF_AUTOROUND for said in named):
        return {"quant_method": "mlx", **mlx}
    if found:
        said = found[0] if isinstance(found[0], dict) else {}
        return said if _has(said, "quant_method") else {**said, "quant_method": _method_of(said)}
    for name, method in QUANTIZATION_FILES.items():
        if (path / name).is_file():
            return {"quant_method": method, **json_object(path / name)}
    ends = {method for end, method in QUANTIZED.items() for name in names if name.endswith(end)}
    return {"quant_method": ends.pop()} if ends else None


def _method_of(said: dict[str, Any]) -> str | None:
    """The method of settings that do not name it, as in some older versions."""
    producer = said.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    return "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else None


def _has(part: Any, key: str) -> bool:
    return isinstance(part, dict) and part.get(key) is not None
