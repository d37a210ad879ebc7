"""What MLX itself quantizes and saves is read as what MLX itself makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.interop import mlx
from bitport.numerics import number_type

from .files import read

pytestmark = pytest.mark.peers

MODES: list[dict[str, Any]] = [
    *({"bits": bits, "group_size": group} for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    {"bits": 4, "group_size": 16, "mode": "nvfp4"},
]


@pytest.mark.parametrize("said", MODES, ids=str)
def test_a_saved_module(said: dict[str, Any], tmp_path: Path) -> None:
    core = pytest.importorskip("mlx.core", reason="needs mlx")
    values = np.random.default_rng(0).standard_normal((32, 256)).astype(np.float32)
    values[3] = 0.25  # blocks of one number
    tensors = core.quantize(core.array(values), **said)
    names = ("m.weight", "m.scales", "m.biases")[: len(tensors)]
    core.save_safetensors(str(tmp_path / "m.safetensors"), dict(zip(names, tensors, strict=True)), {"format": "mlx"})
    with SafetensorsReader(tmp_path / "m.safetensors") as file:
        found = {name: file.read(name) for name in names}
    (q,) = read(mlx.Reader(said, torch.float32), found).values()
    exact = np.array(core.dequantize(*tensors, **said, dtype=core.float32)).astype(np.float64)
    got = q.dequantize(torch.float32).double().numpy()
    if "mode" in said:
        np.testing.assert_array_equal(got, exact)
        assert number_type(q.scheme.weight.dtype).kind == "float"
    else:  # ours is off by 2^-24 of (shift + 2 value), theirs by 2^-24 of (code * scale + value)
        shift = np.abs(np.repeat(found["m.biases"].double().numpy(), said["group_size"], 1))
        assert (np.abs(got - exact) <= 2.0**-24 * (1 + 2**-20) * (2 * shift + 4 * np.abs(exact))).all()
