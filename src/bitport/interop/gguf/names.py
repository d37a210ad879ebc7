"""The mapping between tensor names in GGUF files and in transformers, by architecture."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitport.errors import ArgumentError, CheckpointError, shortened
from bitport.interop.gguf import indexed, latent
from bitport.interop.gguf.architecture import Architecture
from bitport.interop.gguf.changes import DECAY, MIXED, NONE, ONES, PLAIN_NORMS, WIDE, Change, mixed, orders
from bitport.interop.gguf.header import GgufTensor
from bitport.interop.gguf.keys import DENSE, EXPERTS, stated

CONFIGURING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the configuration."""
BARE = {"self_attn.sinks": "weight", "linear_attn.A_log": "", "linear_attn.dt_bias": "bias"} | {
    "mlp.gate.e_score_correction_bias": "bias",
    "mlp.e_score_correction_bias": "bias",
    "feed_forward.expert_bias": "bias",
    "layer_scalar": "weight",
    "router.scale": "",
    "router.per_expert_scale": "",
}
"""Parameters that are not the weight of a module -> what ends their names in a file."""
SINGLE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv", "indexer.proj")
"""Matrices that llama.cpp stores in float32, like vectors."""
SCALE, OF_INPUTS = "scale", "input_scale"
"""Tensors next to an NVFP4 weight, with one number or one per expert: factors of the weight, and of float4 inputs."""
KINDS = ("weight", "bias", SCALE, OF_INPUTS)
"""What ends the names of tensors; the decay of linear attention has none of them."""
TOGETHER = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"), "attn_kv_b": latent.PARTS, "ssm_in": MIXED}
"""A tensor of what two others have."""
ONE_EXPERT = re.compile(r"(?:mlp|feed_forward)\.experts\.(0|[1-9]\d{0,5})\.(\w+)\.weight")
"""A parameter of a model without stacked experts."""
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
"""Projection of one expert -> part of ffn_<..>_exps."""
ONE_BLOCK = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.*)", re.DOTALL)
IN_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.*)", re.DOTALL)


class Piece(NamedTuple):
    """One tensor of the model. ``stored``: the tensors whose rows it concatenates."""

    name: str
    stored: tuple[GgufTensor, ...]
    change: Change = NONE
    in_turn: bool = False
    """Whether the rows of ``stored`` are interleaved."""
    transposed: bool = False
    """Whether it is [.., K, N], from rows [.., N, K]."""
    scales: tuple[GgufTensor, ...] = ()
    """The separate scale of each of ``stored``, if there are any."""


class TensorPlace(NamedTuple):
    """The location of one tensor of the model in a file. ``names``: the tensors that have its rows; ``part``: the index
    of an expert if these are not stacked in the model; ``single``: stored in float32. For the others see Piece."""

    names: tuple[str, ...]
    dimensions: int
    change: Change = NONE
    in_turn: bool = False
    transposed: bool = False
    part: int | None = None
    single: bool = False


def pieces(its: Architecture, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> list[Piece]:
    """The tensors of the model, in file order; CheckpointError for a tensor that the architecture does not have."""
    found: dict[str, Piece] = {}
    for name, stored in tensors.items():
        if name in CONFIGURING:
            continue
        module, _, kind = name.rpartition(".")
        if kind not in KINDS or parted(name)[1] in its.names:
            module, kind = name, ""
        if kind in (SCALE, OF_INPUTS):
            _check_scaled(name, tensors.get(f"{module}.weight"))
            continue
        block, leaf = parted(module)
        parameter, leaves = _stack(its, leaf)
        path = parameter or (its.outside if block is None else its.names).get(leaf)
        biased = leaf in its.biased or (bool(its.declared) and (its.in_turn or not parameter))
        known = kind == BARE[path] if path in BARE else kind == "weight" or (kind == "bias" and biased)
        known = known and not (its.tied and leaf == "output")
        if path is None or not known or not _in_layer(its, leaf, config, block):
            raise CheckpointError(
                f"{name}: a {config['model_type']} of {config['num_hidden_layers']} layers has no such"
            )
        whole = path if block is None else f"model.layers.{block}.{path}"
        change = _change(its, leaf, kind, config)
        if parameter:
            whole += "_bias" if kind == "bias" else ""
            parts = [f"blk.{block}.{each}.{kind}" for each in leaves]
            rows = _rows_of_stack(name, parts, tensors, found.get(whole))
            turned = its.in_turn and kind == "weight"
            found[whole] = Piece(whole, rows, change, its.in_turn, turned, _scales(its, parts, tensors))
        else:
            whole = whole if path in BARE else f"{whole}.{kind}"
            found[whole] = Piece(whole, (stored,), change, scales=_scales(its, [name], tensors))
    if lost := _lost(its, config, {*tensors, *_parts_of(tensors)}):
        raise CheckpointError(f"the file lacks {shortened(lost, 3)}, which llama.cpp requires too; fetch it again")
    return list(found.values())


def _lost(its: Architecture, config: Mapping[str, Any], there: Collection[str]) -> list[str]:
    """The tensors that every file of such a model has, and that are not ``there``; each part of a stack by its name."""
    leaves = {leaf: BARE.get(path, "weight") for leaf, path in its.names.items()}
    leaves |= dict.fromkeys((leaf for each in its.stacked.values() for leaf in each), "weight")
    both = [*leaves.items(), *((leaf, "bias") for leaf in its.biased if leaf not in its.outside)]
    some = any(f"blk.0.{leaf}.weight" in there for leaf in its.optional)
    wanted = [
        _named(f"blk.{block}.{leaf}", kind)
        for block in range(config["num_hidden_layers"])
        for leaf, kind in both
        if _in_layer(its, leaf, config, block) and (leaf not in its.optional or some)
    ]
    wanted += [f"{leaf}.weight" for leaf in its.outside if leaf != "output" and _in_layer(its, leaf, config, None)]
    wanted += [f"{leaf}.bias" for leaf in its.biased if leaf in its.outside]
    return [name for name in wanted if name not in there]


def _parts_of(tensors: Collection[str]) -> Iterator[str]:
    """The names that the parts of stacks among ``tensors`` would have by themselves."""
    for whole, parts in TOGETHER.items():
        for name in tensors:
            if whole in name:
                yield from (name.replace(whole, part) for part in parts)


def parted(name: str) -> tuple[int | None, str]:
    """(block, rest) of a name in a file; (None, name) outside of blocks."""
    found = IN_BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def _stack(its: Architecture, leaf: str) -> tuple[str, tuple[str, ...]]:
    """(the parameter with the rows of ``leaf``, if it is a stack; all tensors that have rows of it)."""
    whole = TOGETHER.get(leaf)
    for parameter, leaves in its.stacked.items():
        if leaves == whole and not its.in_turn:
            return parameter, (leaf,)
        if leaf in leaves:
            return parameter, leaves
    return "", (leaf,)


def _rows_of_stack(
    name: str, parts: list[str], tensors: Mapping[str, GgufTensor], before: Piece | None
) -> tuple[GgufTensor, ...]:
    """The tensors ``parts`` of a stack, of which ``name`` is one; CheckpointError if one is missing, or if the rows of
    the stack, which is ``before``, come from others."""
    if lost := [part for part in parts if part not in tensors]:
        raise CheckpointError(f"{name} is there without {lost[0]}; fetch the file again")
    rows = tuple(tensors[part] for part in parts)
    if before is not None and before.stored != rows:
        others = ", ".join(each.name for each in before.stored)
        raise CheckpointError(f"{name} and {others} are the same weights twice; fetch the file again")
    return rows


def scale_of(weight: str) -> str:
    """The name of the scale of a weight."""
    return weight.removesuffix("weight") + SCALE


def _check_scaled(name: str, weight: GgufTensor | None) -> None:
    if weight is None or weight.type != "NVFP4":
        told = "which is not there" if weight is None else f"a weight of {weight.type}"
        owner = f"{name.rpartition('.')[0]}.weight"
        raise CheckpointError(f"{name} belongs to {owner}, {told}: NVFP4 alone has such scales")


def _scales(its: Architecture, weights: list[str], tensors: Mapping[str, GgufTensor]) -> tuple[GgufTensor, ...]:
    scales = [scale for scale in map(scale_of, weights) if parted(scale)[1] not in its.names]
    found = [tensors[scale] for scale in scales if scale in tensors]
    if found and len(found) < len(weights):
        raise CheckpointError(f"{found[0].name} is there, and not that of each of {', '.join(weights)}")
    return tuple(found)


def _change(its: Architecture, leaf: str, kind: str, config: Mapping[str, Any]) -> Change:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(leaf, 0)
    norm = its.norms_less_one and leaf.endswith("norm") and leaf not in PLAIN_NORMS and kind == "weight"
    by_key = MIXED in its.stacked.values()
    rows, columns = (None, None) if by_key else orders(leaf, config)
    both = mixed(config) if by_key and leaf in MIXED else None
    sizes = (config["qk_nope_head_dim"], config["v_head_dim"]) if leaf in latent.PARTS else None
    paired = heads if its.interleaved else 0
    return Change(paired, norm, ONES.get(leaf), rows, columns, leaf == DECAY, leaf in WIDE, both, sizes)


def _in_layer(its: Architecture, leaf: str, config: Mapping[str, Any], block: int | None) -> bool:
    """Whether there is a layer ``block``, of a type that has ``leaf``. None: outside of layers."""
    wanted = {kind for kind, leaves in its.of_layers.items() if leaf in leaves}
    there = block is None or block < config["num_hidden_layers"]
    return there and (not wanted or not wanted.isdisjoint(traits(config, block)))


def traits(config: Mapping[str, Any], block: int | None) -> Iterator[str]:
    """What tells a layer from others: its type, whether it has experts ("sparse") or not ("dense") or both, how it
    computes queries, and an indexer, keys, values and inputs of its own; the last also of what is outside of layers
    (None)."""
    if config.get("hidden_size_per_layer_input"):
        yield "inputs"
    if config.get("enable_moe_block"):
        yield "experts"
    if "kv_lora_rank" in config:
        yield "latent queries" if config["q_lora_rank"] else "queries"
    if block is not None:
        kinds = config.get("layer_types", ())[block : block + 1]
        yield from kinds
        if config.get("indexer_types", ())[block : block + 1] == [indexed.FULL]:
            yield "indexer"
        yield "dense" if block < stated(config, DENSE) else "sparse"
        if block not in keyless(config):
            yield "keys"
            if not (config.get("attention_k_eq_v") and "full_attention" in kinds):
                yield "values"


def keyless(config: Mapping[str, Any]) -> range:
    """The layers without keys and values of their own."""
    layers: int = config["num_hidden_layers"]
    return range(layers - config.get("num_kv_shared_layers", 0), layers)


def experts_of(config: Mapping[str, Any]) -> int:
    return stated(config, EXPERTS)


def places(its: Architecture, names: Collection[str], config: Mapping[str, Any]) -> dict[str, TensorPlace]:
    """The inverse of pieces(), by names of the model's tensors; ArgumentError for one that has no place in a file, and
    if one that llama.cpp requires is missing."""
    found = {name: place for name in names if (place := _place(its, name, config))}
    there = {name for place in found.values() for name in place.names}
    if strange := [name for name in names if name not in found]:
        raise ArgumentError(f"GGUF files of {its.model_type} have no place for {shortened(strange, 3)}")
    if lost := _lost(its, config, there):
        raise ArgumentError(f"the model lacks what would be {shortened(lost, 3)} in the file")
    return found


def _place(its: Architecture, name: str, config: Mapping[str, Any]) -> TensorPlace | None:
    inside = ONE_BLOCK.fullmatch(name)
    block, parameter = (int(inside[1]), inside[2]) if inside else (None, name)
    for older, now in its.older.items():
        parameter = parameter.replace(older, now)
    if block is not None:
        stack = parameter.removesuffix("_bias") if its.in_turn else parameter
        if stack in its.stacked and _in_layer(its, its.stacked[stack][0], config, block):
            return _place_of_stack(its, its.stacked[stack], block, config, bias=stack != parameter)
        expert = ONE_EXPERT.fullmatch(parameter) if its.stacked else None
        if expert and expert[2] in PROJECTIONS and int(expert[1]) < experts_of(config):
            leaf = f"ffn_{PROJECTIONS[expert[2]]}_exps"
            there = _in_layer(its, leaf, config, block)
            return TensorPlace((f"blk.{block}.{leaf}.weight",), 3, part=int(expert[1])) if there else None
    return _place_of_one(its, parameter, block, config)


def _place_of_stack(
    its: Architecture, leaves: tuple[str, ...], block: int, config: Mapping[str, Any], bias: bool
) -> TensorPlace:
    kind = "bias" if bias else "weight"
    change = _change(its, leaves[0], "weight", config)
    return TensorPlace(
        tuple(f"blk.{block}.{leaf}.{kind}" for leaf in leaves),
        2 if bias or change.mixed else 3,
        change,
        in_turn=its.in_turn,
        transposed=its.in_turn and not bias,
        single=bias,
    )


def _place_of_one(
    its: Architecture, parameter: str, block: int | None, config: Mapping[str, Any]
) -> TensorPlace | None:
    """The place of a parameter that is one tensor of a file."""
    module, _, kind = (parameter, "", BARE[parameter]) if parameter in BARE else parameter.rpartition(".")
    known = its.outside if block is None else its.names
    leaf = next((leaf for leaf, path in known.items() if path == module), "")
    bare, biased = module in BARE, its.declared or leaf in its.biased
    fits = module == parameter if bare else kind == "weight" or (kind == "bias" and biased)
    if not leaf or not fits or (its.tied and leaf == "output") or not _in_layer(its, leaf, config, block):
        return None
    change = _change(its, leaf, kind, config)
    vector = kind == "bias" or bare or change.one == 0 or "norm" in leaf
    name = _named(leaf if block is None else f"blk.{block}.{leaf}", kind)
    return TensorPlace((name,), 1 if vector else 2, change, single=vector or leaf in SINGLE)


def _named(stem: str, kind: str) -> str:
    return f"{stem}.{kind}" if kind else stem


def together(stacks: list[Tensor], in_turn: bool) -> Tensor:
    """Concatenate the rows [.., N, bytes] of stacks, or interleave those of [E, N, ..]."""
    return torch.stack(stacks, 2).flatten(1, 2) if in_turn else torch.cat(stacks, -2)


def apart(rows: Tensor, count: int, in_turn: bool) -> list[Tensor]:
    """The inverse of :func:`together`."""
    return [rows[:, at::count] for at in range(count)] if in_turn else list(rows.chunk(count, 1))
