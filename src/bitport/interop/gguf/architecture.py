"""What tells the files of one architecture from those of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from bitport.interop.gguf.keys import Settings
from bitport.interop.gguf.special import nothing_more

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
UNSCALED = (*MLP, *SHARED, *STACKS)
"""What is not attention."""
BIASES = {"attention_bias": "self_attn.q_proj.bias", "mlp_bias": "mlp.up_proj.bias"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    classname: str
    model_type: str
    names: Mapping[str, str]
    """Names of modules in a block."""
    special: Callable[[Settings, dict[str, Any]], None] = nothing_more
    """Changes the config.json, which has ``more`` already, where the architecture differs from others."""
    outside: Mapping[str, str] = dataclasses.field(default_factory=lambda: OUTSIDE)
    """Names of modules outside of blocks."""
    interleaved: bool = False
    norms_less_one: bool = False
    stacked: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    latent: bool = False
    """Whether the keys and values of attention are computed from one short vector."""
    in_turn: bool = False
    """Whether experts are interleaved and have biases, as in gpt-oss."""
    epsilon: str = "rms_norm_eps"
    gelu: bool = False
    tied: bool = False
    """Whether the head is always the embedding."""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The entries of KEYS that not all architectures have -> their value in a file without the setting: ``...`` if each
    file must have it, None if ``special`` finds it."""
    declared: Mapping[str, str] = dataclasses.field(default_factory=lambda: BIASES)
    """Key of config.json -> the parameter of the first layer which is there if it is true; if empty, no module has a
    bias."""
    biased: tuple[str, ...] = ()
    """Tensors whose bias llama.cpp requires."""
    file: str = ""
    """The name in a file, if another architecture has that name here."""
    of_layers: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """What names.traits() tells layers apart by -> the tensors that layers without it do not have."""
    optional: tuple[str, ...] = ()
    """Tensors that all layers have, or none."""
    unscaled: tuple[str, ...] = UNSCALED
    """Tensors for which llama.cpp knows no scale, or does not multiply by it, so that they cannot be NVFP4."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that have this value in every file, or are absent."""
    several: tuple[str, ...] = ()
    """Keys of config.json for which a file has, or may have, one number for each layer."""
    dense: bool = True
    """Whether it has MLPs without experts, and so must have an intermediate_size."""
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parts of older tensor names in files of transformers -> the current ones."""

    def declares(self, parameters: Collection[str]) -> dict[str, bool]:
        """The keys of ``declared`` for config.json. ``parameters``: those of the first layer."""
        return {key: parameter in parameters for key, parameter in self.declared.items()}
