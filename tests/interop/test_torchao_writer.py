"""Writing of torchao files: what plain Python loops packed is written back unchanged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import bitport
from bitport.checkpoint.safetensors_writer import SafetensorsWriter, metadata_entry
from bitport.errors import ArgumentError, CheckpointError
from bitport.interop import torchao
from bitport.interop.directory import Directory
from bitport.interop.sources import description
from bitport.interop.torchao.inputs import SYMMETRIC
from bitport.interop.torchao.writer import GPU, TEXT
from bitport.tensor import QTensor

from .files import described, only, write
from .torchao_files import RNG, File, dtype, file, float8_inputs, in_tiles, int8_inputs, integers, plain, values

NAME = "m.weight"
PARTS = frozenset({"qdata", "scale"})


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any], list[str]]:
    """Return (tensors, header metadata, quantization_config, notes)."""
    writer = torchao.Writer()
    tensors = write(writer, q, NAME)
    return tensors, writer.metadata(["norm.weight", "logit_scale"]), writer.config(["lm_head"]), writer.notes


def float8(block: tuple[int, int], granularity: Any = None) -> File:
    codes = torch.from_numpy(RNG.integers(0, 127, (256, 128)).astype(np.uint8)).view(torch.float8_e4m3fn)
    scale = RNG.uniform(0.001, 0.1, (256 // block[0], 128 // block[1])).astype(np.float32)
    kernel = {"_type": "KernelPreference", "_data": "AUTO"}
    mm = {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False}
    mm_config = None if granularity is None else {"_type": "Float8MMConfig", "_data": mm}
    inputs = {"granularity": granularity, "mm_config": mm_config, "kernel_preference": kernel}
    kwargs = None if granularity is None else float8_inputs(**inputs)
    said = {"mm_config": mm_config, "act_quant_kwargs": kwargs, "kernel_preference": kernel}
    parts = {"qdata": codes, "scale": scale}
    return file("Float8Tensor", parts, block_size=list(block), dtype=dtype("bfloat16"), **said)


def per(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


def int8(block: tuple[int, int], inputs: Any = None) -> File:
    return integers("Int8Tensor", 8, block, False, act_quant_kwargs=inputs, reduce_range=False)[0]


def intx(bits: int, zero: bool, inputs: str | None = None) -> File:
    said = {"target_dtype": dtype(f"int{bits}"), "activation_quantization": inputs}
    return integers("IntxUnpackedToInt8Tensor", bits, (1, 32), zero, **said)[0]


def mx(elements: str, rule: str) -> File:
    codes = RNG.integers(0, 127, (160, 192 if elements == "float8_e4m3fn" else 96)).astype(np.uint8)
    qdata = torch.from_numpy(codes)
    qdata = qdata.view(torch.float8_e4m3fn) if elements == "float8_e4m3fn" else qdata
    scale = torch.from_numpy(in_tiles(RNG.integers(100, 140, (160, 6)).astype(np.uint8))).view(torch.float8_e8m0fnu)
    kernel = {"_type": "KernelPreference", "_data": "AUTO"}
    both = {"elem_dtype": dtype(elements), "block_size": 32, "kernel_preference": kernel, "is_swizzled_scales": True}
    mode = {"_type": "ScaleCalculationMode", "_data": rule}
    inputs = {"_type": "QuantizeTensorToMXKwargs", "_data": {**both, "scaling_mode": mode}}
    said = {**both, "orig_dtype": dtype("bfloat16"), "act_quant_kwargs": inputs}
    return file("MXTensor", {"qdata": qdata, "scale": scale}, **said)


def nvfp4(inputs: bool) -> File:
    both = {"block_size": 16, "is_swizzled_scales": True, "use_triton_kernel": False}
    kwargs = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": {**both, "use_dynamic_per_tensor_scale": True}}
    scale = torch.from_numpy(in_tiles(RNG.integers(1, 127, (144, 6)).astype(np.uint8))).view(torch.float8_e4m3fn)
    qdata = RNG.integers(0, 256, (144, 48)).astype(np.uint8)
    parts = {"qdata": qdata, "scale": scale, "per_tensor_scale": torch.tensor(0.0123)}
    said = {**both, "orig_dtype": dtype("bfloat16"), "act_quant_kwargs": kwargs if inputs else None}
    return file("NVFP4Tensor", parts, **said)


MADE: dict[str, tuple[File, str]] = {
    "rows": (int8((1, 64)), "Int8WeightOnlyConfig"),
    "groups": (int8((1, 16)), "Int8WeightOnlyConfig"),
    "one": (int8((8, 64)), "Int8WeightOnlyConfig"),
    "rows, inputs": (int8((1, 64), int8_inputs()), "Int8DynamicActivationInt8WeightConfig"),
    "rows, shifted": (int8((1, 64), int8_inputs(mapping="ASYMMETRIC")), "Int8DynamicActivationInt8WeightConfig"),
    "rows, one input": (int8((1, 64), int8_inputs("PerTensor")), "Int8DynamicActivationInt8WeightConfig"),
    "int4": (plain(8, 64, 32, zeros=False, activation_dtype=dtype("bfloat16"))[0], "Int4WeightOnlyConfig"),
    "int4, inputs": (
        plain(8, 256, 128, zeros=False, activation_dtype=dtype("float8_e4m3fn"))[0],
        "Float8DynamicActivationInt4WeightConfig",
    ),
    "3 bits": (intx(3, False), "IntxWeightOnlyConfig"),
    "1 bit": (intx(1, True), "IntxWeightOnlyConfig"),
    "4 bits, shifted": (intx(4, True), "IntxWeightOnlyConfig"),
    "8 bits, shifted": (intx(8, True, "int8_asym_per_token"), "Int8DynamicActivationIntxWeightConfig"),
    "mxfp8": (mx("float8_e4m3fn", "RCEIL"), "MXDynamicActivationMXWeightConfig"),
    "mxfp4": (mx("float4_e2m1fn_x2", "EVEN"), "MXDynamicActivationMXWeightConfig"),
    "nvfp4": (nvfp4(True), "NVFP4DynamicActivationNVFP4WeightConfig"),
    "nvfp4 alone": (nvfp4(False), "NVFP4WeightOnlyConfig"),
    "float8": (float8((1, 128)), "Float8WeightOnlyConfig"),
    "float8, one": (float8((256, 128), per("PerTensor")), "Float8DynamicActivationFloat8WeightConfig"),
    "float8, rows": (float8((1, 128), per("PerRow", dim=-1)), "Float8DynamicActivationFloat8WeightConfig"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_written_is_what_was_read(name: str) -> None:
    (tensors, said), kind = MADE[name]
    again, header, config, _ = written(values((tensors, said))[0])
    assert again.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert again[key].dtype == tensor.dtype
        assert again[key].is_contiguous()
        assert torch.equal(again[key].float(), tensor.float()), key
    ours = json.loads(header["m.weight"])
    assert sorted(ours.pop("_tensor_data_names")) == sorted(said["_tensor_data_names"])
    assert ours == {key: value for key, value in said.items() if key != "_tensor_data_names"}
    assert json.loads(header["tensor_names"]) == ["m.weight", "norm.weight"]
    assert json.loads(header["norm.weight"]) == {"_type": "Tensor"}
    assert (config["quant_method"], config["quant_type"]["default"]["_type"]) == ("torchao", kind)
    assert config["modules_to_not_convert"] == ["lm_head"]


SCHEMES = {
    "int8": "Int8Tensor",
    "int8-g32": "Int8Tensor",
    "int8-dyn": "Int8Tensor",
    "int4-g32-sym": "Int4Tensor",
    "int4-fp8": "Int4Tensor",
    "int4-g32": "IntxUnpackedToInt8Tensor",
    "int4-channel-sym": "IntxUnpackedToInt8Tensor",
    "int8-asym": "IntxUnpackedToInt8Tensor",
    "int5-g64-sym": "IntxUnpackedToInt8Tensor",
    "fp8": "Float8Tensor",
    "fp8-row": "Float8Tensor",
    "fp8-wo": "Float8Tensor",
    "fp8-e5m2-wo": "Float8Tensor",
    "mxfp8": "MXTensor",
    "mxfp4": "MXTensor",
    "nvfp4": "NVFP4Tensor",
    "nvfp4-wo": "NVFP4Tensor",
}


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_our_own_weights_survive(scheme: str, of: torch.dtype) -> None:
    value = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(of)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    tensors, header, config, notes = written(q)
    assert json.loads(header[NAME])["_type"] == SCHEMES[scheme]
    found = torchao.Reader(config, of)
    found.metadata = header
    back = only(found, tensors)
    assert (str(back.scheme), back.dtype) == (scheme, of)
    assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert notes == {"int8-dyn": [SYMMETRIC]}.get(scheme, [GPU] if SCHEMES[scheme] == "Int4Tensor" else [])


@pytest.mark.parametrize("scheme", ["int8", "int4-g32-sym"])
def test_scales_of_inputs(scheme: str) -> None:
    q = bitport.quantize_tensor(torch.randn(8, 64), scheme).to_layout("plain")
    q.pre_scale = torch.rand(64)
    tensors, header, config, _ = written(q)
    found = torchao.Reader(config, torch.float32)
    found.metadata = header
    back = only(found, tensors)
    assert back.pre_scale is not None
    assert torch.equal(back.pre_scale, q.pre_scale)


UNKNOWN = ("nf4", "fp8-block", "int4-fzero", "int8-static", "fp8-static", "int4-b32x32", "int4-int8", "int4-fp8-g64")
UNKNOWN += ("int8-dyn-g32", "fp8-row-tensor", "fp8-wo-b128x128", "mxfp8-wo", "mxfp4-wo", "mxfp6", "nvfp4-static")


@pytest.mark.parametrize("scheme", UNKNOWN)
def test_schemes_that_it_cannot_hold_are_refused(scheme: str) -> None:
    reason = torchao.Writer().refuses(described(scheme, (128, 256)))
    assert "written are integers in rows or groups, float8 in rows" in str(reason)


def test_inputs_of_another_kind_are_refused() -> None:
    for name, act in (
        ("fp8-row", "int8"),
        ("int8-dyn", "fp8"),
        ("int4-fp8", "fp8-tensor"),
        ("fp8-e5m2-wo", "fp8"),
        ("mxfp4", "mxfp8"),
    ):
        made = dataclasses.replace(bitport.preset(name), act=act)
        q = dataclasses.replace(described(name, (128, 256)), scheme=made)
        assert torchao.Writer().refuses(q), (name, act)


def test_other_refusals() -> None:
    writer = torchao.Writer()
    assert writer.refuses(described("int4")) is None
    assert "64x192 does not divide into those of int4" in str(writer.refuses(described("int4", (64, 192))))
    assert "one scheme" in str(writer.refuses(described("int8")))


def test_a_zero_point_that_needs_nine_bits_is_refused() -> None:
    (q, _) = values(intx(4, True))
    assert q.zero is not None
    q.zero[0, 0] = 140
    with pytest.raises(ArgumentError, match="zero point 140 less 8 does not fit"):
        written(q)


def test_each_file_says_it_of_all_tensors(tmp_path: Path) -> None:
    """Loaders treat the header of each file as that of the whole model."""
    writer = torchao.Writer()
    weights = {
        f'layers.{at}.\u00e9"{at}.weight': bitport.quantize_tensor(torch.randn(256, 128), "fp8-row") for at in range(40)
    }
    for name, q in weights.items():
        assert writer.refuses(description("m.weight", q)) is None, name
    room = writer.room([*weights, "norm.weight"])
    with Directory(tmp_path, 40_000, room) as out:
        out.add("norm.weight", torch.ones(3))
        for name, q in weights.items():
            for key, part in writer.write(name, q.to_layout("plain")).items():
                out.add(key, part)
        said = writer.metadata(["norm.weight"])
        out.publish({}, said)
    assert len(metadata_entry(said)) < room < 2 * len(said) * TEXT
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 20
    for path in files:
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt", **said}
    assert not (tmp_path / "unfinished").exists()


def test_block_scales_are_called_what_they_are(tmp_path: Path) -> None:
    """The file stores them with their own dtype, unlike a checkpoint of bitport, which stores bytes and keeps the dtype
    in its manifest."""
    tensors, header, _, _ = written(values(MADE["mxfp8"][0])[0])
    with Directory(tmp_path, 1 << 20) as out:
        for name, tensor in tensors.items():
            out.add(name, tensor)
        out.publish({}, header)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        for name, tensor in tensors.items():
            found = opened.get_tensor(name)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_header_that_outgrows_its_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would overwrite the first tensors."""
    monkeypatch.setattr("bitport.checkpoint.safetensors_writer.MOVABLE", 0)
    for size, fits in ((1000, True), (70_000, False)):
        writer = SafetensorsWriter(tmp_path / str(size))
        writer.write("a", torch.ones(100))
        writer.pause()
        if fits:
            writer.finish({"a": "x" * size})
            with safe_open(tmp_path / str(size), "pt") as opened:
                assert torch.equal(opened.get_tensor("a"), torch.ones(100))
        else:
            with pytest.raises(CheckpointError, match="its header takes"):
                writer.finish({"a": "x" * size})
