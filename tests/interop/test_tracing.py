"""Tracing what a function makes of tensors without their numbers: the result matches running it on the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.interop.diffusers_model import Component
from bitport.interop.tracing import traced

from .diffusion_files import diffusers, single_file

Tensors = dict[str, Tensor]


def numbered(shapes: dict[str, tuple[int, ...]]) -> tuple[Tensors, Tensor]:
    """Return tensors in which every number is unique, and all of these numbers."""
    every = torch.arange(sum(map(math.prod, shapes.values())))
    pieces = every.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}, every


SHAPES = {"qkv": (6, 4), "row": (12,), "conv": (1, 5, 1, 1), "last": (3, 2, 4)}


@pytest.mark.parametrize(
    "function",
    [
        lambda t: {"a": t["qkv"], "b": t["last"]},
        lambda t: dict(zip("qkv", t["qkv"].chunk(3), strict=True)),
        lambda t: dict(zip("qkv", torch.split(t["qkv"], (1, 2, 3), dim=0), strict=True)),
        lambda t: {"swapped": torch.cat(t["qkv"].chunk(2, dim=0)[::-1], dim=0)},
        lambda t: {"of two": torch.cat([t["qkv"][4:], torch.cat([t["qkv"], t["qkv"][1:2]])])[1:8]},
        lambda t: {"cut twice": torch.cat([t["row"][3:], t["row"][:3]])[6:11], "all": torch.cat([t["row"]], dim=-1)},
        lambda t: {"table": t["row"].reshape(6, -1), "bias": t["conv"][0, :, 0, 0], "rows": t["last"].flatten(0, 1)},
        lambda t: {"one": t["last"][1], "below": torch.concat([t["last"][2], t["last"][0]])},
    ],
)
def test_runs_are_the_numbers(function: Callable[[Tensors], Tensors]) -> None:
    tensors, _ = numbered(SHAPES)
    made = traced(function, SHAPES)
    right = function(dict(tensors))
    assert list(made) == list(right)
    for name, (shape, runs) in made.items():
        assert runs is not None
        found = torch.cat([tensors[run.name].flatten()[run.first : run.end] for run in runs])
        assert torch.equal(found.reshape(shape), right[name])


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t["qkv"] + 1,
        lambda t: t["qkv"].t(),
        lambda t: t["qkv"][:, 1:],
        lambda t: t["qkv"][::2],
        lambda t: t["last"].transpose(0, 1).reshape(6, 4),
        lambda t: torch.cat([t["qkv"], t["qkv"]], dim=1),
        lambda t: torch.cat([t["qkv"], t["qkv"].flip(0)]),
        lambda t: torch.zeros(6, 4),
        lambda t: t["qkv"].mul_(2),
        lambda t: t["qkv"].as_strided((6, 6), (6, 1)),
    ],
)
def test_what_is_no_run_is_told(function: Callable[[Tensors], Tensor]) -> None:
    ((shape, runs),) = traced(lambda tensors: {"made": function(tensors)}, SHAPES).values()
    assert (shape, runs) == (tuple(function(numbered(SHAPES)[0]).shape), None)


def flux(layers: int, single: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of Flux as published."""
    wide, found = 3072, {}

    def linear(name: str, out: int, columns: int) -> None:
        found.update({f"{name}.weight": (out, columns), f"{name}.bias": (out,)})

    linear("img_in", wide, 64)
    linear("txt_in", wide, 4096)
    for name, columns in (("time_in", 256), ("vector_in", 768), ("guidance_in", 256)):
        linear(f"{name}.in_layer", wide, columns)
        linear(f"{name}.out_layer", wide, wide)
    for block in (f"double_blocks.{at}.{stream}" for at in range(layers) for stream in ("img", "txt")):
        for name, rows in (("mod.lin", 6), ("attn.qkv", 3), ("attn.proj", 1), ("mlp.0", 4)):
            linear(f"{block}_{name}", rows * wide, wide)
        linear(f"{block}_mlp.2", wide, 4 * wide)
        found.update({f"{block}_attn.norm.{each}_norm.scale": (128,) for each in ("query", "key")})
    for block in (f"single_blocks.{at}" for at in range(single)):
        linear(f"{block}.modulation.lin", 3 * wide, wide)
        linear(f"{block}.linear1", 7 * wide, wide)
        linear(f"{block}.linear2", wide, 5 * wide)
        found.update({f"{block}.norm.{each}_norm.scale": (128,) for each in ("query", "key")})
    linear("final_layer.linear", 64, wide)
    linear("final_layer.adaLN_modulation.1", 2 * wide, wide)
    return found


def test_another_dtype_is_no_run() -> None:
    """Its offsets count different bytes."""
    ((_, runs),) = traced(lambda t: {"made": t["row"].view(torch.int8)[:12]}, SHAPES).values()
    assert runs is None


def test_all_of_flux(tmp_path: Any) -> None:
    """12 billion numbers. Reference: diffusers' function on tensors of one column, with a unique number in each row."""
    shapes = flux(19, 38)
    with torch.device("meta"):
        diffusers.FluxTransformer2DModel(guidance_embeds=True).save_config(tmp_path)
    made = Component(tmp_path, len(shapes)).made_of(shapes)
    rows, _ = numbered({name: shape[:1] for name, shape in shapes.items()})
    mapping = single_file.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]["checkpoint_mapping_fn"]
    right = mapping(checkpoint=dict(rows))
    assert made.keys() == right.keys()
    for name, (shape, runs) in made.items():
        row = math.prod(shape[1:])
        assert runs is not None
        found = [rows[run.name][run.first // row : run.end // row] for run in runs]
        assert all(run.first % row == run.end % row == 0 for run in runs)
        assert torch.equal(torch.cat(found), right[name])
