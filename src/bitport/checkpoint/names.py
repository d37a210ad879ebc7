"""What a tensor in a file is, told from its name and shape alone: the file says nothing of modules."""

from __future__ import annotations

import re

import torch

from bitport.schemes import Target

EMBEDDINGS = r"(\w+_)?embed(ding)?s?(_(?!out\b|proj|hidden)\w+)?|wte|wpe|shared|relative_attention_bias"

KINDS: tuple[tuple[str, str, int, str], ...] = (
    ("router or gate of experts", r"(.*\.)?(router|gate)\.weight", 2, ""),
    ("embedding", rf"(.*\.)?({EMBEDDINGS})\.weight", 2, "embedding"),
    ("packed projections of attention", r"(.*\.)?in_proj_weight", 2, "attention"),
    ("linear", r".*\.weight", 2, "linear"),
    ("stacked experts", r"(?i).*(expert|moe).*", 3, "experts"),
    ("convolution", r".*\.weight", 3, "conv"),
    ("convolution", r".*\.weight", 4, "conv"),
)
"""(what it is, regular expression on the whole name, number of dimensions, kind of target); the first that fits
decides. Kind "": no target, it stays as it is. A router is small and decides much; in a model it is seldom an
nn.Linear either."""

CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Values of config.json's model_type whose c_attn, c_proj, c_fc and q_attn are the Conv1D of transformers, which is no
nn.Linear: they stay as they are."""

TRANSPOSED_EXPERTS = ("gpt_oss", "openai_privacy_filter", "aria", "llama4", "llama4_text")
"""Those whose stacked experts lie as [experts, K, N]."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def target_of(name: str, shape: tuple[int, ...], dtype: torch.dtype, model_type: str = "") -> Target | None:
    """The target that ``name`` is, or None for one that is never quantized."""
    conv1d = model_type in CONV1D and re.fullmatch(r".*\.(c_attn|c_proj|c_fc|q_attn)\.weight", name)
    if dtype not in FLOATS or conv1d:
        return None
    module, _, param = name.rpartition(".")
    for _, pattern, dims, kind in KINDS:
        if len(shape) == dims and re.fullmatch(pattern, name):
            transposed = kind == "experts" and model_type in TRANSPOSED_EXPERTS
            return Target(module, param, kind, shape, name, transposed) if kind else None
    return None
