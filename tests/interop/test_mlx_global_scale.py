"""MLX's nvfp4 with the largest magnitude of each matrix as its global scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import mlx

from .files import assert_numbers, only, read
from .test_mlx import E2M1, STACKED, of_words

E, N, K = 3, 8, 64
SAID = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
GLOBALS = np.array([3.5, 0.25, 11.3], dtype=np.float32)


def matrices(module: str, scales: np.ndarray, *shape: int, seed: int = 0) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of ``module``, their values in float32: the block scale is rounded, and so is its product
    with a number)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (*shape, K))
    blocks = rng.integers(40, 120, (*shape, K // 16)).astype(np.uint8)
    factor = (scales / np.float32(2688)).reshape(*scales.shape, *(1 for _ in range(codes.ndim - scales.ndim)))
    block = blocks.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
    tensors = {"weight": of_words(codes, 4), "scales": torch.from_numpy(blocks), "global_scale": torch.tensor(scales)}
    value = np.array(E2M1, dtype=np.float32)[codes] * np.repeat(block, 16, -1)
    return {f"{module}.{end}": tensor for end, tensor in tensors.items()}, value


def reader(**own: object) -> mlx.Reader:
    made = mlx.Reader({**SAID, **own}, torch.bfloat16)
    made.model = {"model_type": "qwen3_moe"}
    return made


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_matrix(shape: tuple[int, ...]) -> None:
    tensors, value = matrices("m", GLOBALS[2].reshape(()), N)
    tensors["m.global_scale"] = tensors["m.global_scale"].reshape(shape)
    q = only(reader(m={**SAID, "global_scale": True}), tensors)
    assert str(q.scheme) == "nvfp4-wo"
    assert_numbers(q, value)


@pytest.mark.parametrize("other", [GLOBALS, GLOBALS[::-1].copy()], ids=["alike", "apart"])
def test_stacked_experts(other: np.ndarray) -> None:
    gate, gate_value = matrices(f"{STACKED}gate_proj", GLOBALS, E, N)
    up, up_value = matrices(f"{STACKED}up_proj", other, E, N, seed=1)
    down, down_value = matrices(f"{STACKED}down_proj", GLOBALS, E, N, seed=2)
    its = reader()
    found = read(its, gate | up | down)
    apart = other is not GLOBALS
    joined, single = found["l.mlp.experts.gate_up_proj"], found["l.mlp.experts.down_proj"]
    assert ((joined.scale2 is None), joined.scale.dtype == torch.float32, its.notes) == (apart, apart, [mlx.APART])
    assert (str(single.scheme), tuple(single.shape)) == ("nvfp4-wo", (E, N, K))
    assert_numbers(joined, np.concatenate([gate_value, up_value], 1))
    assert_numbers(single, down_value)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("up_proj", None, r"up_proj\.global_scale"),
        ("gate_proj", None, r"gate_proj\.global_scale"),
        ("up_proj", torch.ones(E + 1), r"up_proj\.global_scale must be"),
        ("gate_proj", torch.ones(E, 1), r"gate_proj\.global_scale must be"),
        ("gate_proj", torch.ones(E, dtype=torch.int32), r"gate_proj\.global_scale must be"),
    ],
)
def test_damaged_ones_are_errors(name: str, tensor: Tensor | None, reason: str) -> None:
    tensors = matrices(f"{STACKED}gate_proj", GLOBALS, E, N)[0] | matrices(f"{STACKED}up_proj", GLOBALS, E, N)[0]
    del tensors[f"{STACKED}{name}.global_scale"]
    if tensor is not None:
        tensors[f"{STACKED}{name}.global_scale"] = tensor
    with pytest.raises(CheckpointError, match=reason):
        read(reader(), tensors)


def test_settings_that_do_not_fit_are_errors() -> None:
    tensors, _ = matrices("m", GLOBALS[0].reshape(()), N)
    del tensors["m.global_scale"]
    with pytest.raises(CheckpointError, match=r"is there without m\.global_scale"):
        read(reader(m={**SAID, "global_scale": True}), tensors)
    with pytest.raises(CheckpointError, match="global_scale with 'mxfp4'; nvfp4 alone has one"):
        reader(m={"bits": 4, "group_size": 32, "mode": "mxfp4", "global_scale": True})


@pytest.mark.peers
def test_what_mlx_makes_of_them() -> None:
    core = pytest.importorskip("mlx.core", reason="needs mlx")
    values = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    largest = core.array(np.abs(values).max())
    weight, scales = core.quantize(core.array(values), **SAID, global_scale=largest)[:2]
    arrays = {"m.weight": weight, "m.scales": scales, "m.global_scale": largest}
    q = only(reader(), {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    theirs = core.dequantize(weight, scales, None, **SAID, global_scale=largest, dtype=core.float32)
    assert_numbers(q, np.array(theirs))
