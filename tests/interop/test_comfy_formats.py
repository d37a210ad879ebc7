"""A format for each layer, as in newer ComfyUI files: the numbers come from a separate float64 encoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitport.cli.main import main
from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.comfy import Comfy
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .diffusion_files import ORIGINALS, answer, described, mapped, random, shapes_of
from .files import assert_described, swizzled

import bitport.integrations.diffusers  # noqa: F401  # isort: skip

PREFIX = "model.diffusion_model."
Encoded = tuple[dict[str, Tensor], np.ndarray]
"""Tensors by the suffixes of their names, and the values they represent in float64."""


def float8(n: int, k: int, seed: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Encoded:
    scale = 0.001 * (seed + 1)
    data = (random(n, k, seed=seed) * 0.1 / scale).to(dtype)
    weight_scale = torch.tensor(scale)
    return {"weight": data, "weight_scale": weight_scale}, data.double().numpy() * weight_scale.double().numpy()


def e5m2(n: int, k: int, seed: int) -> Encoded:
    return float8(n, k, seed, torch.float8_e5m2)


def int8(n: int, k: int, seed: int, rows: bool = False) -> Encoded:
    rng = np.random.default_rng(seed)
    data = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scale = rng.uniform(0.0005, 0.001, (n, 1) if rows else ()).astype(np.float32)
    tensors = {"weight": torch.from_numpy(data), "weight_scale": torch.from_numpy(np.asarray(scale))}
    return tensors, data * np.asarray(scale, np.float64)


def int8_rows(n: int, k: int, seed: int) -> Encoded:
    return int8(n, k, seed, rows=True)


def mxfp8(n: int, k: int, seed: int) -> Encoded:
    data = random(n, k, seed=seed).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponents = np.random.default_rng(seed).integers(114, 119, (n, k // 32)).astype(np.uint8)
    scales = np.ldexp(1.0, exponents.astype(np.int64) - 127).repeat(32, 1)
    return {"weight": data, "weight_scale": torch.from_numpy(swizzled(exponents))}, data.double().numpy() * scales


def nvfp4(n: int, k: int, seed: int, as_bytes: bool = False) -> Encoded:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.integers(0x38, 0x7F, (n, k // 16)).astype(np.uint8)
    second = np.float32(0.0001 * (seed % 5 + 1))
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales.view(ml_dtypes.float8_e4m3fn).astype(
        np.float64
    ).repeat(16, 1)
    laid = torch.from_numpy(swizzled(scales))
    tensors = {
        "weight": torch.from_numpy(codes[:, ::2] << 4 | codes[:, 1::2]),
        "weight_scale": laid if as_bytes else laid.view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(second),
    }
    return tensors, values * np.float64(second)


def nvfp4_in_bytes(n: int, k: int, seed: int) -> Encoded:
    return nvfp4(n, k, seed, as_bytes=True)


FORMATS: dict[Callable[[int, int, int], Encoded], str] = {
    float8: "float8_e4m3fn",
    nvfp4: "nvfp4",
    int8: "int8_tensorwise",
    mxfp8: "mxfp8",
    int8_rows: "int8_tensorwise",
    e5m2: "float8_e5m2",
    nvfp4_in_bytes: "nvfp4",
}


def saying(**said: Any) -> Tensor:
    return torch.tensor([*json.dumps(said).encode()], dtype=torch.uint8)


def made(
    name: str, folder: Path, prefix: str = "", *, in_header: bool = False, **changes: Any
) -> tuple[Path, Path, Any, dict[str, Tensor]]:
    """Return a file, the directory of its configuration, the model, and the values of its tensors as diffusers maps
    them. Matrices use the formats in turn. ``changes`` to the file."""
    original = ORIGINALS[name]
    model = original.model()
    file: dict[str, Any] = {}
    values, layers = {}, {}
    kinds = list(FORMATS)
    for at, (key, shape) in enumerate(original.names(shapes_of(model)).items()):
        if not (key.endswith(".weight") and len(shape) == 2):
            file[prefix + key] = (random(*shape, seed=at) * 0.1).bfloat16()
            values[key] = file[prefix + key].float()
            continue
        kind = kinds[len(layers) % len(kinds)] if shape[0] % 32 == shape[1] % 32 == 0 else int8_rows
        tensors, value = kind(*shape, at)
        layer = prefix + key.removesuffix(".weight")
        file |= {f"{layer}.{role}": tensor.clone() for role, tensor in tensors.items()}
        layers[layer] = {"format": FORMATS[kind], "full_precision_matrix_mult": at % 2 == 0}
        values[key] = torch.from_numpy(value)
    if not in_header:
        file |= {f"{layer}.comfy_quant": saying(**said) for layer, said in layers.items()}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})} if in_header else {}
    file = {key: value for key, value in {**file, **changes}.items() if value is not None}
    save_file(file, folder / "m.safetensors", metadata=metadata)
    return folder / "m.safetensors", described(model, folder / "config"), model, mapped(model, values)


@pytest.mark.parametrize(
    ("name", "prefix", "in_header"),
    [("sd3", "", False), ("z_image", PREFIX, True), ("unet", PREFIX, False), ("wan", "", True)],
)
def test_numbers_and_answers(name: str, prefix: str, in_header: bool, tmp_path: Path) -> None:
    path, config, model, wanted = made(name, tmp_path, prefix, in_header=in_header)
    assert main(["convert", str(path), "--config", str(config), "-o", str(tmp_path / "out")]) == 0
    tensors = dict(Own(tmp_path / "out").items())
    assert tensors.keys() == wanted.keys()
    quantized = {key: value for key, value in tensors.items() if isinstance(value, QTensor)}
    assert quantized.keys() == {key for key, value in wanted.items() if value.dim() == 2 and key.endswith(".weight")}
    assert len({value.scheme for value in quantized.values()}) >= 5
    for key, value in tensors.items():
        found = value.dequantize(torch.float32) if isinstance(value, QTensor) else value
        # float32: the product of two scales is rounded, and so is its product with the code
        assert bool(((found.double() - wanted[key]).abs() <= 2**-23 * wanted[key].abs()).all()), key
    model.load_state_dict({key: value.float() for key, value in wanted.items()})
    right = answer(model.eval(), ORIGINALS[name].inputs)
    found = answer(type(model).from_pretrained(tmp_path / "out", dtype=torch.float32), ORIGINALS[name].inputs)
    assert float((found - right).abs().max()) <= 1e-5 * float(right.abs().max())


def test_what_is_described_is_what_comes(tmp_path: Path) -> None:
    """Also with input factors."""
    factors = random(64, seed=5).abs() + 0.5
    changes = {"context_embedder.pre_quant_scale": factors, "context_embedder.input_scale": torch.ones(())}
    path, config, _, wanted = made("sd3", tmp_path, **changes)
    source = Comfy(path, config)
    assert_described(source)
    assert any("left out: input_scale" in note for note in source.notes)
    weight = dict(source.items())["context_embedder.weight"]
    assert isinstance(weight, QTensor)
    value = wanted["context_embedder.weight"] * factors.double()
    torch.testing.assert_close(weight.dequantize(torch.float32).double(), value, rtol=2**-22, atol=0)
    assert convert(path, tmp_path / "float", to="float", config=config, progress=False).written == "float"


def test_a_matrix_that_is_none_in_the_model(tmp_path: Path) -> None:
    tensors, _ = nvfp4(256, 16, 3)
    file = {f"x_embedder.proj.{role}": tensor for role, tensor in tensors.items()}
    path, config, _, _ = made("sd3", tmp_path, **file, **{"x_embedder.proj.comfy_quant": saying(format="nvfp4")})
    with pytest.raises(CheckpointError, match=r"1 of another shape: pos_embed.proj.weight \(file \[256, 16\]"):
        convert(path, tmp_path / "out", config=config, progress=False)


LAYER = "context_embedder"  # [256, 64]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"comfy_quant": saying(format="convrot_w4a4")}, r"context_embedder has the format 'convrot_w4a4'; float8"),
        ({"comfy_quant": saying(other=1)}, "has the format None"),
        ({"comfy_quant": saying(format="float8_e4m3fn", convrot=True)}, "convrot is not understood; known are format"),
        ({"comfy_quant": saying(format="float8_e4m3fn", group_size=3)}, "float8_e4m3fn with group_size 3"),
        ({"comfy_quant": torch.tensor([*b"{"], dtype=torch.uint8)}, "comfy_quant is not JSON"),
        ({"comfy_quant": torch.tensor([*b"[" * 60000], dtype=torch.uint8)}, "comfy_quant is not JSON"),
        ({"comfy_quant": torch.tensor([*b"[1]"], dtype=torch.uint8)}, "comfy_quant is JSON, but no object"),
        ({"comfy_quant": torch.zeros(1 << 17, dtype=torch.uint8)}, "comfy_quant must be uint8, up to 65536 bytes"),
        ({"comfy_quant": torch.zeros(3)}, "comfy_quant must be uint8"),
        ({"comfy_quant": None}, "weight_scale: neither context_embedder.comfy_quant nor _quantization_metadata"),
        ({"weight": None}, r"context_embedder has the format .*, and context_embedder.weight is missing"),
        ({"weight_scale": None}, "and context_embedder.weight_scale is missing"),
        ({"weight_scale": torch.ones(2)}, r"context_embedder.weight_scale must be .* \[1\], not"),
        ({"comfy_quant": saying(format="nvfp4")}, "and context_embedder.weight_scale_2 is missing"),
        ({"comfy_quant": saying(format="mxfp8"), "weight": torch.zeros(2, 2)}, r"must be torch.float8_e4m3fn \[N, K\]"),
        (
            {"comfy_quant": saying(format="mxfp8"), "weight_scale": torch.zeros(255, 4, dtype=torch.uint8)},
            r"weight_scale must be .* torch.uint8 \[1024\], not torch.uint8 \[1020\]",
        ),
        (
            {"comfy_quant": saying(format="mxfp8"), "weight_scale": torch.zeros(256, 4)},
            "weight_scale must be torch.float8_e8m0fnu or torch.uint8 .*, not torch.float32",
        ),
        (
            {"weight_scale_2": torch.ones(())},
            "weight_scale_2: the format of context_embedder.weight, torch.float8_e4m3fn",
        ),
        (
            {"scale_weight": torch.full((), 2.0)},
            "scale_weight: the format of context_embedder.weight, torch.float8_e4m3fn",
        ),
        ({"comfy_quant": None, "weight_scale": torch.ones(256)}, "weight_scale: neither .* who name none"),
        ({"pre_quant_scale": torch.ones(63)}, r"pre_quant_scale must be .* \[64\]"),
        ({"weight": torch.zeros(256, 0, dtype=torch.float8_e4m3fn)}, r"not torch.float8_e4m3fn \[256, 0\]"),
    ],
)
def test_files_that_are_none(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    tensors, _ = float8(256, 64, 1)
    file = {**tensors, "weight_scale_2": None, "comfy_quant": saying(format="float8_e4m3fn"), **changes}
    path, config, _, _ = made("sd3", tmp_path, **{f"{LAYER}.{role}": tensor for role, tensor in file.items()})
    with pytest.raises(CheckpointError, match=reason):
        convert(path, tmp_path / "out", config=config, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "said",
    [
        "{",
        "[]",
        '{"format_version": "2.0", "layers": {}}',
        '{"layers": 3}',
        '{"layers": {"a": 1}}',
        '{"layers": {"a": {}}}',
    ],
)
def test_metadata_that_is_none(said: str, tmp_path: Path) -> None:
    path, config, _, _ = made("sd3", tmp_path)
    save_file({"a.weight": torch.ones(2)}, path, metadata={"_quantization_metadata": said})
    with pytest.raises(
        CheckpointError, match=r"_quantization_metadata (is|must be|has the format_version '2.0')|a has the format None"
    ):
        convert(path, tmp_path / "out", config=config, progress=False)


def test_other_models_in_the_file_may_be_in_any_format(tmp_path: Path) -> None:
    other = {"text.weight": torch.zeros(2, 2, dtype=torch.int8), "text.comfy_quant": saying(format="unheard")}
    path, config, _, _ = made("z_image", tmp_path, PREFIX, **other)
    done = convert(path, tmp_path / "out", config=config, progress=False)
    assert any("left out: text.weight" in note for note in done.notes)
