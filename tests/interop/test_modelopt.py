"""ModelOpt files against numbers computed by numpy from their definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import modelopt

from .files import E2M1, assert_numbers, held, only, read

N, K = 160, 256
FORMATS = {"FP8": (1, 1), "FP8_PER_CHANNEL_PER_TOKEN": (N, 1), "FP8_PB_WO": (2, 2), "MXFP8": (N, K // 32)}
STORED = {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (N,), "FP8_PB_WO": (2, 1, 2, 1), "MXFP8": (N, K // 32)}
NAMES = {"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-row", "FP8_PB_WO": "fp8-block-wo", "MXFP8": "mxfp8"}


def eight(algorithm: str) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer, its weight): both factors of a value are float32, and their product is rounded
    once."""
    rng = np.random.default_rng(0)
    codes, grid = rng.integers(0, 127, (N, K)).astype(np.uint8), FORMATS[algorithm]
    scale = rng.uniform(0.001, 0.1, grid).astype(np.float32)
    stored: Any = torch.from_numpy(scale.reshape(STORED[algorithm]))
    if algorithm == "MXFP8":
        exponents = rng.integers(100, 140, grid).astype(np.uint8)
        stored, scale = torch.from_numpy(exponents), 2.0 ** (exponents.astype(np.float32) - 127)
    rows, columns = (1 if size == many else 128 if size == 2 else many for size, many in zip(grid, (N, K), strict=True))
    columns = 32 if algorithm == "MXFP8" else columns
    wide = np.repeat(np.repeat(scale, rows, 0)[:N], columns, 1)
    tensors = {"m.weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "m.weight_scale": stored}
    return tensors, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide


def four() -> tuple[dict[str, Tensor], np.ndarray]:
    rng = np.random.default_rng(1)
    codes, scales = rng.integers(0, 16, (N, K)), rng.integers(1, 127, (N, K // 16)).astype(np.uint8)
    tensors = {
        "m.weight": torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        "m.weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        "m.weight_scale_2": torch.tensor(0.0123),
        "m.input_scale": torch.tensor(0.5),
    }
    factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.0123)
    return tensors, E2M1[codes].astype(np.float32) * np.repeat(factor, 16, 1)


def reader(algorithm: str, **more: Any) -> modelopt.Reader:
    return modelopt.Reader({"quant_method": "modelopt", "quant_algo": algorithm, **more}, torch.bfloat16)


@pytest.mark.parametrize("algorithm", FORMATS)
def test_floats_of_8_bits(algorithm: str) -> None:
    tensors, value = eight(algorithm)
    q = only(reader(algorithm.lower(), ignore=["lm_head"]), {**tensors, "norm.weight": torch.ones(3)})
    assert (str(q.scheme), q.dtype) == (NAMES[algorithm], torch.bfloat16)
    assert_numbers(q, value)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_fixed_scale_of_inputs(shape: tuple[int, ...]) -> None:
    tensors, _ = eight("FP8")
    tensors = {**tensors, "m.input_scale": torch.full(shape, 0.25), "m.k_scale": torch.tensor(1.0)}
    made = reader("FP8", kv_cache_scheme={"num_bits": 8, "type": "float"})
    q = only(made, tensors)
    assert (q.scheme.act, q.scheme.static, float(q.act_scale)) == ("fp8-tensor", True, 0.25)  # type: ignore[arg-type]
    assert list(made.dropped(held(tensors))) == ["m.k_scale"]
    assert made.notes == []
    shifts = {"l.k_proj.k_bias": torch.zeros(1, 2, 1, 4), "l.v_proj.bias": torch.zeros(8)}
    assert list(made.dropped(held(shifts))) == ["l.k_proj.k_bias"]


@pytest.mark.parametrize(
    ("algorithm", "name"), [("NVFP4", "nvfp4-static"), ("NVFP4_AWQ", "nvfp4-static"), ("W4A16_NVFP4", "nvfp4-wo")]
)
def test_nvfp4(algorithm: str, name: str) -> None:
    tensors, value = four()
    made = reader(algorithm, group_size=16)
    q = only(made, tensors)
    assert str(q.scheme) == name
    assert made.notes == ([] if name == "nvfp4-static" else [modelopt.UNUSED])
    assert (q.act_scale is None) == (name == "nvfp4-wo")
    assert q.act_scale is None or torch.equal(q.act_scale, tensors["m.input_scale"])
    assert_numbers(q, value)
    tensors["m.pre_quant_scale"] = torch.rand(K).bfloat16()
    q = only(made, tensors)
    assert q.pre_scale is not None
    assert torch.equal(q.pre_scale, tensors["m.pre_quant_scale"])


def test_the_older_form_of_the_settings() -> None:
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    said = {"producer": {"name": "modelopt"}, "quantization": inner}
    q = only(modelopt.Reader(said, torch.bfloat16), four()[0])
    assert str(q.scheme) == "nvfp4-static"


def test_layers_of_their_own() -> None:
    layers = {"a.m": {"quant_algo": "FP8"}, "b.m": {"quant_algo": "NVFP4", "group_size": 16}}
    tensors = {f"a.{name}": tensor for name, tensor in eight("FP8")[0].items()}
    tensors |= {f"b.{name}": tensor for name, tensor in four()[0].items()}
    found = read(reader("MIXED_PRECISION", quantized_layers=layers), tensors)
    assert {name: str(q.scheme) for name, q in found.items()} == {"a.m.weight": "fp8", "b.m.weight": "nvfp4-static"}
    with pytest.raises(CheckpointError, match=r"b\.m has a weight_scale"):
        read(reader("MIXED_PRECISION", quantized_layers={"a.m": {"quant_algo": "FP8"}}), tensors)


def test_settings_for_all_layers_in_a_module() -> None:
    layers = {"l.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "l.experts.1.m": {"quant_algo": "NVFP4"}}
    tensors = {f"l.experts.{at}.{name}": tensor for at in (0, 1) for name, tensor in four()[0].items()}
    made = reader("MIXED_PRECISION", quantized_layers=layers)
    schemes = {name: str(q.scheme) for name, q in read(made, tensors).items()}
    assert schemes == {"l.experts.0.m.weight": "nvfp4-wo", "l.experts.1.m.weight": "nvfp4-static"}
    assert made.notes == [modelopt.UNUSED]
    with pytest.raises(CheckpointError, match=r"l\.experts2\.m has a weight_scale"):
        read(made, {name.replace("experts.0", "experts2"): tensor for name, tensor in tensors.items()})


EXPERTS, UP = 3, "l.experts.gate_up_proj"


def stacked(algorithm: str) -> tuple[dict[str, Tensor], np.ndarray]:
    """Experts in the file's layout [E, K, N], and their weights in the same layout."""
    tensors, value = four() if algorithm == "NVFP4" else eight(algorithm)
    matrices = {"weight": UP} | ({"weight_scale": f"{UP}_weight_scale"} if algorithm == "NVFP4" else {})
    found = {f"{UP}_{name.removeprefix('m.')}": tensor for name, tensor in tensors.items()}
    for role, name in matrices.items():
        one = tensors[f"m.{role}"].view(torch.uint8).t()
        each = torch.stack([one.roll(at, 1) for at in range(EXPERTS)])
        found[name] = each.contiguous().view(tensors[f"m.{role}"].dtype)
    del found[f"{UP}_weight"]
    return found, np.stack([np.roll(value.T, at, 1) for at in range(EXPERTS)])


def reader_of(model: dict[str, Any], algorithm: str) -> modelopt.Reader:
    made = reader(algorithm)
    made.model = model
    return made


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize("model", [{"model_type": "gpt_oss"}, {"text_config": {"model_type": "llama4_text"}}], ids=str)
def test_stacked_experts(algorithm: str, model: dict[str, Any]) -> None:
    tensors, value = stacked(algorithm)
    tensors[f"{UP}_input_scale"] = torch.tensor(0.5)
    (q,) = (found := read(reader_of(model, algorithm), tensors)).values()
    assert list(found) == [UP]
    assert (str(q.scheme), tuple(q.shape), q.transposed) == (f"{algorithm.lower()}-static", (EXPERTS, K, N), True)
    assert q.act_scale is not None
    assert float(q.act_scale) == 0.5
    assert_numbers(q, value)


def test_stacked_experts_of_which_it_is_not_known_how_they_lie() -> None:
    tensors, _ = stacked("FP8")
    for model, algorithm in (
        ({}, "FP8"),
        ({"model_type": "qwen3_moe", "text_config": []}, "FP8"),
        ({"model_type": ["llama4"]}, "FP8"),
        ({"model_type": "llama4"}, "FP8_PER_CHANNEL_PER_TOKEN"),
        ({"model_type": "llama4"}, "MXFP8"),
    ):
        with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj: of experts that are stacked"):
            read(reader_of(model, algorithm), tensors)
    other = {name.replace("gate_up_proj", "w13"): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"experts\.w13: of experts that are stacked"):
        read(reader_of({"model_type": "llama4"}, "FP8"), other)


@pytest.mark.parametrize(
    ("algorithm", "end", "tensor"),
    [
        ("FP8", "", torch.zeros(EXPERTS, K, N)),
        ("FP8", "", torch.zeros(K, N).to(torch.float8_e4m3fn)),
        ("FP8", "", None),
        ("FP8", "_weight_scale", torch.zeros(EXPERTS)),
        ("FP8", "_weight_scale", torch.zeros(EXPERTS, N, 1)),
        ("FP8", "_pre_quant_scale", torch.ones(K)),
        ("NVFP4", "", torch.zeros(EXPERTS, N, K // 2, dtype=torch.uint8)),
        ("NVFP4", "_weight_scale", torch.zeros(EXPERTS, N, K // 16).to(torch.float8_e4m3fn)),
        ("NVFP4", "_weight_scale_2", torch.zeros(EXPERTS)),
        ("NVFP4", "_weight_scale_2", None),
    ],
)
def test_damaged_stacked_experts_are_errors(algorithm: str, end: str, tensor: Tensor | None) -> None:
    tensors = {**stacked(algorithm)[0], f"{UP}{end}": tensor}
    with pytest.raises(BitportError, match=r"l\.experts"):
        read(
            reader_of({"model_type": "llama4"}, algorithm),
            {name: each for name, each in tensors.items() if each is not None},
        )


@pytest.mark.parametrize(
    "change",
    [
        {"quant_algo": "W4A8_AWQ"},
        {"quant_algo": None},
        {"quant_algo": 8},
        {"quant_algo": "NVFP4_SVD"},
        {"quantization": ["NVFP4"]},
        {"group_size": 32},
        {"group_size": "16"},
        {"has_zero_point": True},
        {"lora_rank": 8},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": []},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": "NVFP4"}},
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"m": {"quant_algo": "INT4"}}},
        {"quant_algo": "MIXED_PRECISION"},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read(modelopt.Reader({"quant_algo": "NVFP4", **change}, torch.bfloat16), four()[0])


@pytest.mark.parametrize(
    ("role", "tensor"),
    [
        ("weight", torch.zeros(N, K // 2, dtype=torch.int8)),
        ("weight", torch.zeros(2, N, K // 2, dtype=torch.uint8)),
        ("weight", torch.zeros(0, K // 2, dtype=torch.uint8)),
        ("weight", torch.zeros(N, K).to(torch.float8_e4m3fn)),
        ("weight", None),
        ("weight_scale", torch.zeros(N, K // 16)),
        ("weight_scale", torch.zeros(N, K // 32).to(torch.float8_e4m3fn)),
        ("weight_scale", None),
        ("weight_scale_2", torch.zeros(2)),
        ("weight_scale_2", torch.zeros((), dtype=torch.int32)),
        ("weight_scale_2", None),
        ("pre_quant_scale", torch.zeros(K + 1)),
        ("pre_quant_scale", torch.zeros(K, dtype=torch.int8)),
        ("svdquant_lora_a", torch.zeros(2, K)),
        ("gate_up_proj_weight_scale", torch.zeros(2)),
    ],
)
def test_damaged_tensors_are_errors(role: str, tensor: Tensor | None) -> None:
    tensors = {name: part for name, part in four()[0].items() if name != f"m.{role}"}
    if tensor is not None:
        tensors[f"m.{role}"] = tensor
    with pytest.raises(BitportError, match=r"m\."):
        read(reader("NVFP4"), tensors)


def test_a_weight_without_scales_is_an_error() -> None:
    for tensors in (four()[0], eight("FP8")[0]):
        with pytest.raises(CheckpointError, match=r"m\.weight, torch\.\w+, belongs to no weight"):
            read(reader("NVFP4"), {"m.weight": tensors["m.weight"]})


@pytest.mark.parametrize("algorithm", FORMATS)
def test_scales_of_another_algorithm_are_errors(algorithm: str) -> None:
    for other in FORMATS:
        if other != algorithm:
            with pytest.raises(BitportError, match=r"m\."):
                read(reader(algorithm), eight(other)[0])
