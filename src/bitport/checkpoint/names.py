"""Infer what a weight is from its name and shape alone, because a file does not describe modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

import torch

from bitport.checkpoint.dtypes import WEIGHT_DTYPES
from bitport.nn.targets import CELL, LAYER, lie_transposed
from bitport.schemes import Target
from bitport.schemes.experts import expert_blocks, is_router

EMBEDDINGS = r"(\w+_)?embed(ding)?s?(_(?!out\b|proj|hidden)\w+)?|wte|wpe|shared|relative_attention_bias"

KINDS: tuple[tuple[str, int, str], ...] = (
    (rf"(.*\.)?({EMBEDDINGS})\.weight", 2, "embedding"),
    (r"(.*\.)?(in|[qkv])_proj_weight", 2, "attention"),
    (rf"(.*\.)?({LAYER}|{CELL})", 2, "recurrent"),
    (r"(.*\.)?weight", 2, "linear"),
    (r"(?i).*(expert|moe).*|(.*\.)?(input|output)_linear\.weight", 3, "experts"),
    (r"(.*\.)?weight", 3, "conv"),
    (r"(.*\.)?weight", 4, "conv"),
    (r"(.*\.)?weight", 5, "conv"),
)
"""(regular expression for the whole name, number of dimensions, kind of target). The first match decides; a matrix
without a match is "other", as are routers."""

CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Values of model_type in config.json whose c_attn, c_proj, c_fc and q_attn are Conv1D modules of transformers: linear
layers that are stored as [K, N]."""


def target_of(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, model_type: str = "", blocks: Collection[str] | None = None
) -> Target | None:
    """The target for ``name``, or None if it is not a float matrix. ``blocks``: as for :func:`is_router`."""
    if len(shape) < 2 or dtype not in WEIGHT_DTYPES:
        return None
    module, _, param = name.rpartition(".")
    found = (kind for pattern, dims, kind in KINDS if len(shape) == dims and re.fullmatch(pattern, name))
    kind = "other" if len(shape) == 2 and is_router(module, shape, blocks) else next(found, "other")
    transposed = model_type in CONV1D and re.fullmatch(r".*\.(c_attn|c_proj|c_fc|q_attn)\.weight", name) is not None
    return Target(module, param, kind, shape, name, transposed)


def targets_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], model_type: str = "") -> list[Target]:
    """The targets among ``tensors``, {name: (shape, dtype)}. Whether stacks of experts are stored as [experts, K, N] is
    inferred from the shapes of the stacks in the same module."""
    blocks = expert_blocks(tensors)
    found = [target_of(name, shape, dtype, model_type, blocks) for name, (shape, dtype) in tensors.items()]
    experts: dict[str, list[tuple[int, ...]]] = {}
    for target in found:
        if target is not None and target.kind == "experts":
            experts.setdefault(target.module, []).append(target.shape)
    flipped = {module for module, shapes in experts.items() if lie_transposed(shapes)}
    return [
        dataclasses.replace(target, transposed=True)
        if target.kind == "experts" and target.module in flipped
        else target
        for target in found
        if target is not None
    ]
