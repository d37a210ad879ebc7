"""Weights quantized and saved by MLX are read with the values that MLX itself computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitport
from bitport.checkpoint import quantize_files
from bitport.checkpoint.safetensors_reader import SafetensorsReader
from bitport.interop import convert, mlx
from bitport.interop.sources import Own
from bitport.numerics import number_type
from bitport.tensor import QTensor

from .files import config_in, only, read, write

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
    values[3] = 0.25  # constant blocks
    tensors = core.quantize(core.array(values), **said)
    names = ("m.weight", "m.scales", "m.biases")[: len(tensors)]
    core.save_safetensors(str(tmp_path / "m.safetensors"), dict(zip(names, tensors, strict=True)), {"format": "mlx"})
    with SafetensorsReader(tmp_path / "m.safetensors") as file:
        found = {name: file.read(name) for name in names}
    q = only(mlx.Reader(said, torch.float32), found)
    exact = np.array(core.dequantize(*tensors, **said, dtype=core.float32)).astype(np.float64)
    got = q.dequantize(torch.float32).double().numpy()
    if "mode" in said:
        np.testing.assert_array_equal(got, exact)
        assert number_type(q.scheme.weight.dtype).kind == "float"
    else:  # ours is off by 2^-24 of (shift + 2 value), theirs by 2^-24 of (code * scale + value)
        shift = np.abs(np.repeat(found["m.biases"].double().numpy(), said["group_size"], 1))
        assert (np.abs(got - exact) <= 2.0**-24 * (1 + 2**-20) * (2 * shift + 4 * np.abs(exact))).all()


@pytest.mark.parametrize("said", [{"bits": 3, "group_size": 64}, {"bits": 4, "group_size": 32}, *MODES[-3:]], ids=str)
def test_stacked_experts(said: dict[str, Any], tmp_path: Path) -> None:
    core = pytest.importorskip("mlx.core", reason="needs mlx")
    files, exact, shifts = {}, [], []
    for at, projection in enumerate(("gate_proj", "up_proj")):
        values = np.random.default_rng(at).standard_normal((3, 32, 256)).astype(np.float32)
        tensors = core.quantize(core.array(values), **said)
        names = [f"l.mlp.switch_mlp.{projection}.{end}" for end in ("weight", "scales", "biases")]
        files |= dict(zip(names, tensors, strict=False))
        exact.append(np.array(core.dequantize(*tensors, **said, dtype=core.float32)))
        shifts.append(np.repeat(np.array(tensors[2]), said["group_size"], -1) if len(tensors) == 3 else np.zeros(1))
    core.save_safetensors(str(tmp_path / "m.safetensors"), files, {"format": "mlx"})
    with SafetensorsReader(tmp_path / "m.safetensors") as file:
        found = {name: file.read(name) for name in files}
    reader = mlx.Reader(said, torch.float32)
    reader.model = {"model_type": "qwen3_moe"}
    (q,) = (made := read(reader, found)).values()
    assert list(made) == ["l.mlp.experts.gate_up_proj"]
    same(q, np.concatenate(exact, 1), None if "mode" in said else np.concatenate(shifts, 1))


def same(ours: QTensor, theirs: Any, biases: np.ndarray | None = None) -> None:
    """In float32; with biases MLX adds two numbers, each rounded by a relative 2^-24, where bitport multiplies a
    difference."""
    got, judge = ours.dequantize(torch.float32).double().numpy(), np.array(theirs).astype(np.float64)
    bound = 0 if biases is None else 2.0**-24 * (1 + 2**-20) * (2 * np.abs(biases) + 4 * np.abs(judge))
    assert (np.abs(got - judge) <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["int4-g64-sym", "int4-g32", "int3", "int7-g64-sym", "int8", "mxfp4-wo", "mxfp8-wo"])
def test_what_is_written_is_unpacked_and_multiplied_by_mlx(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    core = pytest.importorskip("mlx.core", reason="needs mlx")
    q = bitport.quantize_tensor(torch.randn(32, 256).to(dtype), scheme).to_layout("plain")
    writer = mlx.Writer()
    tensors = write(writer, q)
    pytest.importorskip("safetensors.torch").save_file(tensors, tmp_path / "m.safetensors")
    found = core.load(str(tmp_path / "m.safetensors"))
    parts = [found[name].astype(core.float32) if name == "m.biases" else found[name] for name in tensors]
    if "m.biases" in found:
        parts[1] = parts[1].astype(core.float32)
    said = writer.config([])
    its = core.dequantize(*parts, **said, dtype=core.float32)
    biases = np.array(parts[2]).repeat(said["group_size"], 1) if len(parts) > 2 else None
    same(q, its, biases)
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    product = np.array(core.quantized_matmul(core.array(x), *parts, transpose=True, **said))
    exact = x.astype(np.float64) @ q.dequantize(torch.float32).double().numpy().T
    assert np.linalg.norm(product - exact) <= 1e-5 * np.linalg.norm(exact)


def test_a_layer_of_mlx_loads_what_is_written(tmp_path: Path) -> None:
    """As mlx-lm loads a directory: modules with scales are quantized, as config.json specifies for each."""
    core, nn = (pytest.importorskip(name, reason="needs mlx") for name in ("mlx.core", "mlx.nn"))
    models = pytest.importorskip("tests.integrations.models")
    source = models.make_directory(tmp_path / "float", dtype=torch.float32)
    rules = {"*.up_proj": "mxfp4-wo", "*.down_proj": "skip", "*_proj": "int4-g64", "*embed_tokens": "int8"}
    quantize_files(source, tmp_path / "q", rules, progress=False)
    convert(tmp_path / "q", tmp_path / "mlx", to="mlx", progress=False)
    said = config_in(tmp_path / "mlx")
    assert said["quantization"] == said["quantization_config"]
    settings, found = said["quantization"], core.load(str(tmp_path / "mlx" / "model.safetensors"))
    for name, q in Own(tmp_path / "q").items():
        module = name.removesuffix(".weight")
        assert (f"{module}.scales" in found) == isinstance(q, QTensor), name
        if isinstance(q, QTensor):
            own = settings.get(module, {key: settings[key] for key in ("group_size", "bits")})
            n, k = q.shape
            kind = nn.Embedding(n, k) if "embed" in name else nn.Linear(k, n, bias=False)
            layer = kind.to_quantized(**own)
            layer.load_weights([(part.removeprefix(f"{module}."), found[part]) for part in found if module in part])
            parts = [getattr(layer, part) for part in ("weight", "scales", "biases") if f"{module}.{part}" in found]
            biases = np.array(parts[2]).repeat(own["group_size"], 1) if len(parts) > 2 else None
            same(q, core.dequantize(*parts, **own, dtype=core.float32), biases)
