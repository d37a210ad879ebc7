"""Gives the channels of the model unequal scales, as those of large models are, without changing what it computes.

A small model trained for a short time has channels of nearly equal size, and rounding hardly harms it: 2 bits would
cost a few percent of perplexity. In large models some channels are many times as large as others, in weights as in
activations, and that is what low-bit formats have to cope with. A scale s may be moved from one factor to another:

    norm weight * s   ->  columns of q, k, v (or gate, up) / s     one per channel of the residual stream
    rows of v * s     ->  columns of o / s                         one per value channel, for all heads of its group
    rows of up * s    ->  columns of down / s                      one per intermediate channel

Every s is a power of two, 2^round(SPREAD * normal), so no bit of any result changes, in float32 or bf16, and undoing
is exact.

    python -m examples.tinylm.spread FOLDER     writes the model as it was before to FOLDER
"""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor

from .corpus import MODELS
from .model import Block, TinyLM, load, save

SPREAD = 0.7
SEED = 0


@torch.no_grad()
def spread(model: TinyLM, undo: bool = False) -> None:
    generator = torch.Generator().manual_seed(SEED)
    config = model.config
    shared = config.num_attention_heads // config.num_key_value_heads

    def scales(channels: int) -> Tensor:
        exponents = torch.randn(channels, generator=generator).mul(SPREAD).round()
        return torch.exp2(-exponents if undo else exponents)

    for layer in model.model.layers:
        assert isinstance(layer, Block)
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            s = scales(config.hidden_size)
            norm.weight.mul_(s)
            for reader in readers:
                reader.weight.div_(s)
        s = scales(config.num_key_value_heads * config.head_dim)
        attention.v_proj.weight.mul_(s[:, None])
        per_head = s.view(config.num_key_value_heads, -1).repeat_interleave(shared, dim=0)
        attention.o_proj.weight.div_(per_head.flatten())
        s = scales(config.intermediate_size)
        mlp.up_proj.weight.mul_(s[:, None])
        mlp.down_proj.weight.div_(s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    model = load(MODELS)
    spread(model, undo=True)
    shutil.copytree(MODELS, args.folder)
    save(model, args.folder)


if __name__ == "__main__":
    main()
