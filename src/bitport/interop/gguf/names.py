"""Tensors of a GGUF file under the names that transformers has for them, by architecture, and back.

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
from collections.abc import Callable, Collection, Mapping
from reprlib import repr as short
from typing import Any, NamedTuple

from torch import Tensor

from bitport.checkpoint.manifest import shortened
from bitport.errors import ArgumentError, CheckpointError
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
ONE_EXPERT = re.compile(r"mlp\.experts\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj\.weight")
"""A parameter where experts are not stacked: part of ffn_<..>_exps."""
ONE_BLOCK = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.*)", re.DOTALL)


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
    more: tuple[str, ...] = ()
    """Those of KEYS that not all architectures have."""

    def config(self, settings: Settings) -> dict[str, Any]:
        return configs.config_of(self.classname, self.model_type, self.special, settings)


class Piece(NamedTuple):
    """One tensor of the model. ``stored``: several lie below each other."""

    name: str
    stored: tuple[Stored, ...]
    heads: int = 0
    """Whose rows are to be brought in order; 0: they are."""
    less_one: bool = False


class Place(NamedTuple):
    """Where one tensor of the model lies in a file. ``names``: of the tensors that have its rows; ``part`` of as many
    as there are experts, where these are not stacked. The rest: see Piece."""

    names: tuple[str, ...]
    dimensions: int
    heads: int = 0
    less_one: bool = False
    part: int | None = None


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
        more=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj", **BEFORE_MLP, **FUSED},
        configs.phi3,
        more=("sliding_window",),
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", {**ATTENTION, **BEFORE_MLP, **MLP}, norms_less_one=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        {**ATTENTION, **FOUR_NORMS, **MLP},
        configs.gemma2,
        norms_less_one=True,
        more=("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**ATTENTION, **HEAD_NORMS, **FOUR_NORMS, **MLP},
        configs.gemma3,
        norms_less_one=True,
        more=("sliding_window", "final_logit_softcapping"),
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
        found[f"{whole}.{kind}"] = Piece(f"{whole}.{kind}", (stored,), *_changed(its, leaf, kind, config))
    return list(found.values())


def _changed(its: Architecture, leaf: str, kind: str, config: Mapping[str, Any]) -> tuple[int, bool]:
    """See Piece: heads, less_one."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(leaf, 0)
    return heads if its.interleaved else 0, its.norms_less_one and leaf.endswith("norm") and kind == "weight"


def places(its: Architecture, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Place]:
    """The inverse of pieces, by the names of the model's tensors; ArgumentError for one that has no place in a file,
    and where one that llama.cpp asks for is not there."""
    found = {name: place for name in names if (place := _place(its, name, config))}
    leaves = [*its.names, *(leaf for leaves in its.stacked.values() for leaf in leaves)]
    wanted = [f"blk.{block}.{leaf}.weight" for block in range(config["num_hidden_layers"]) for leaf in leaves]
    there = {name for place in found.values() for name in place.names}
    if strange := [name for name in names if name not in found]:
        raise ArgumentError(f"GGUF files of {its.model_type} have no place for {shortened(strange, 3)}")
    if lost := [name for name in (*wanted, "token_embd.weight", "output_norm.weight") if name not in there]:
        raise ArgumentError(f"the model lacks what would be {shortened(lost, 3)} in the file")
    return found


def _place(its: Architecture, name: str, config: Mapping[str, Any]) -> Place | None:
    inside = ONE_BLOCK.fullmatch(name)
    if inside and int(inside[1]) >= config["num_hidden_layers"]:
        return None
    prefix, parameter = (f"blk.{inside[1]}.", inside[2]) if inside else ("", name)
    if inside and parameter in its.stacked:
        return Place(tuple(f"{prefix}{leaf}.weight" for leaf in its.stacked[parameter]), 3)
    expert = ONE_EXPERT.fullmatch(parameter) if inside and its.stacked else None
    if expert and int(expert[1]) < config["num_experts"]:
        return Place((f"{prefix}ffn_{expert[2]}_exps.weight",), 3, part=int(expert[1]))
    module, _, kind = parameter.rpartition(".")
    leaf = next((leaf for leaf, path in (its.names if inside else OUTSIDE).items() if path == module), None)
    if leaf is None or kind not in ("weight", "bias"):
        return None
    dimensions = 1 if kind == "bias" or leaf.endswith("norm") else 2
    return Place((f"{prefix}{leaf}.{kind}",), dimensions, *_changed(its, leaf, kind, config))


def in_order(rows: Tensor, heads: int) -> Tensor:
    """``rows`` [N, ..] of attn_q or attn_k as transformers has them."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`in_order`."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
