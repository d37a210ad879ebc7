"""Tensors of a GGUF file under the names that transformers has for them, by architecture.

The files hold what llama.cpp computes with, which differs from the model of transformers in two ways. Rows of attn_q
and attn_k, in ``llama``: there a head turns neighbouring rows by one angle, here a row of its first half and one of its
second. Of a head of 8 rows:

    file            0 4 1 5 2 6 3 7
    transformers    0 1 2 3 4 5 6 7

And norms of ``gemma``, which multiply by the weight in the file, by 1 + the weight here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop.gguf import config as configs
from bitport.interop.gguf.config import Settings
from bitport.interop.gguf.header import Stored

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONFIGURING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that say how the model is configured."""
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
ROUTED = {"ffn_gate_inp": "mlp.gate"}
EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
"""Parameter -> the tensors whose rows it has, one below the other."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    classname: str
    model_type: str
    names: Mapping[str, str]
    """Of modules in a block."""
    special: Callable[[Settings, dict[str, Any]], None] = configs.nothing_more
    """Adds to the config.json what only this one has."""
    interleaved: bool = False
    norms_less_one: bool = False
    stacked: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def config(self, settings: Settings) -> dict[str, Any]:
        return configs.config_of(self.classname, self.model_type, self.special, settings)


class Piece(NamedTuple):
    """One tensor of the model. ``stored``: several lie below each other."""

    name: str
    stored: tuple[Stored, ...]
    heads: int = 0
    """Whose rows are to be brought in order; 0: they are."""
    less_one: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", "llama", {**ATTENTION, **BEFORE_MLP, **MLP}, configs.llama, interleaved=True
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", {**ATTENTION, **BEFORE_MLP, **MLP}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", {**ATTENTION, **HEAD_NORMS, **BEFORE_MLP, **MLP}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**ATTENTION, **HEAD_NORMS, **BEFORE_MLP, **ROUTED},
        configs.qwen3moe,
        stacked=EXPERTS,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", **BEFORE_MLP, **FUSED},
        configs.phi3,
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", {**ATTENTION, **BEFORE_MLP, **MLP}, norms_less_one=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", {**ATTENTION, **FOUR_NORMS, **MLP}, configs.gemma2, norms_less_one=True
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**ATTENTION, **HEAD_NORMS, **FOUR_NORMS, **MLP},
        configs.gemma3,
        norms_less_one=True,
    ),
}


def architecture(name: Any) -> Architecture:
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture {short(name)} is not read; {', '.join(ARCHITECTURES)} are (llama is Mistral's too). "
            f"Quantize the original model with bitport quantize"
        )
    return ARCHITECTURES[name]


def pieces(its: Architecture, tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> list[Piece]:
    """In the order of the file; CheckpointError for a tensor that the architecture does not have."""
    found: dict[str, Piece] = {}
    for name, stored in tensors.items():
        if name in CONFIGURING:
            continue
        module, _, kind = name.rpartition(".")
        block, leaf = re.fullmatch(r"(?s)(?:blk\.(0|[1-9]\d{0,5})\.)?(.*)", module).groups()  # type: ignore[union-attr]
        parameter, leaves = next(((p, leaves) for p, leaves in its.stacked.items() if leaf in leaves), ("", (leaf,)))
        path = parameter or (its.names if block else OUTSIDE).get(leaf)
        inside = not block or int(block) < config["num_hidden_layers"]
        if path is None or kind not in ("weight", "bias") or not inside or (parameter and kind == "bias"):
            raise CheckpointError(
                f"{name}: a {config['model_type']} of {config['num_hidden_layers']} layers has no such"
            )
        whole = f"model.layers.{block}.{path}" if block else path
        if parameter:
            parts = [f"blk.{block}.{each}.weight" for each in leaves]
            if lost := [part for part in parts if part not in tensors]:
                raise CheckpointError(f"{name} is there without {lost[0]}; fetch the file again")
            found[whole] = Piece(whole, tuple(tensors[part] for part in parts))
            continue
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(leaf, 0)
        less_one = its.norms_less_one and name.endswith("norm.weight")
        found[f"{whole}.{kind}"] = Piece(f"{whole}.{kind}", (stored,), heads if its.interleaved else 0, less_one)
    return list(found.values())


def in_order(rows: Tensor, heads: int) -> Tensor:
    """``rows`` [N, ..] of attn_q or attn_k as transformers has them."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
