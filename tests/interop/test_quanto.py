"""optimum-quanto files against numbers packed by plain loops from the definition, and multiplied in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import convert, quanto
from bitport.interop.quanto import OUTPUTS
from bitport.interop.shifts import ROUNDED
from bitport.interop.skeleton import shapes_of
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import described, held, only, read, write

Q_PROJ = "model.layers.0.self_attn.q_proj"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
"""q_proj is 128x256."""


def said(weights: str, activations: str = "none", module: str = "m") -> dict[str, Any]:
    return {"quant_method": "quanto", module: {"weights": weights, "activations": activations}}


def whole(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Tensor], Tensor]:
    """Return (the tensors of a module, its weight in float64)."""
    chance = torch.Generator().manual_seed(len(shape))
    if kind == "qint8":
        data = torch.randint(-128, 128, shape, generator=chance, dtype=torch.int8)
    else:
        data = torch.randn(shape, generator=chance).to(quanto.WHOLE[kind][0])
    scale = (torch.rand(shape[0], *(1,) * (len(shape) - 1), generator=chance) / 64).to(dtype)
    scale = scale.reshape(()) if shape[0] == 1 else scale
    tensors = {"m.weight._data": data, "m.weight._scale": scale}
    return tensors | scales("m"), data.double() * scale.double()


def scales(module: str, value: float = 1.0) -> dict[str, Tensor]:
    return {f"{module}.input_scale": torch.tensor(value), f"{module}.output_scale": torch.tensor(value)}


def packed(
    bits: int, n: int, k: int, group: int, *, whole: bool = False, bias: bool = True, module: str = "m"
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a module, its weight in float64); ungrouped if ``group`` is k."""
    rng = np.random.default_rng(bits + n + k)
    count, per = n * k // group, 8 // bits
    codes = rng.integers(0, 1 << bits, (count, group))
    scale = rng.uniform(0.01, 0.1, (count, 1)).astype(np.float16)
    shift = rng.integers(0, 1 << bits, (count, 1)) if whole else rng.uniform(-1, 1, (count, 1)).astype(np.float16)
    rows = -(-count // per)
    data = np.zeros((rows, group), dtype=np.uint8)
    value = np.zeros((count, group))
    for row in range(count):
        its = float(scale[row, 0])
        for column in range(group):
            code = int(codes[row, column])
            data[row % rows, column] |= code << bits * (row // rows)
            value[row, column] = (code - int(shift[row, 0])) * its if whole else code * its - float(shift[row, 0])
    tensors = {
        f"{module}.weight._data._data": torch.from_numpy(data),
        f"{module}.weight._scale": torch.from_numpy(scale),
        f"{module}.weight._shift": torch.from_numpy(shift.astype(np.uint8) if whole else shift),
    }
    tensors |= {f"{module}.bias": torch.zeros(n)} if bias else {}
    return tensors | scales(module), value.reshape(n, k)


def one(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> QTensor:
    q = only(quanto.Reader(config, dtype), tensors)
    return q


@pytest.mark.parametrize("kind", quanto.WHOLE)
@pytest.mark.parametrize("shape", [(8, 64), (1, 64), (6, 3, 3, 3)])
def test_values_of_eight_bits(kind: str, shape: tuple[int, ...]) -> None:
    tensors, value = whole(kind, shape)
    q = one(said(kind), tensors, torch.bfloat16)
    assert (tuple(q.shape), q.scheme.name) == (shape, quanto.WHOLE[kind][1])
    got = q.dequantize(torch.float32).double()
    assert bool(((got - value).abs() <= 2.0**-24 * value.abs()).all())


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(
    ("n", "k", "group"),
    [(8, 256, 128), (5, 192, 96), (7, 160, 32), (6, 320, 64), (7, 128, 128), (7, 64, 64), (3, 100, 100), (3, 136, 136)],
)
def test_values_of_fewer_bits(n: int, k: int, group: int, bits: int) -> None:
    tensors, value = packed(bits, n, k, group)
    reader = quanto.Reader(said(f"qint{bits}"), torch.float16)
    q = only(reader, tensors)
    assert q.scheme.name == f"int{bits}-{'channel' if group == k else f'g{group}'}-fzero".replace("-g128", "")
    got = q.dequantize(torch.float32).double().numpy()
    shift = np.repeat(np.abs(tensors["m.weight._shift"].double().numpy()).reshape(n, -1), group, 1)
    assert (np.abs(got - value) <= 2.0**-24 * (1 + 2**-20) * (shift + 2 * np.abs(value))).all()
    assert reader.notes == [ROUNDED]


@pytest.mark.parametrize("bits", [4, 2])
def test_whole_zero_points_are_exact(bits: int) -> None:
    tensors, value = packed(bits, 8, 256, 128, whole=True)
    q = one(said(f"qint{bits}"), tensors)
    assert (q.scheme.name, q.scale.dtype) == (f"int{bits}", torch.float16)
    np.testing.assert_array_equal(q.dequantize().double().numpy(), value.astype(np.float32))


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "float8"])
@pytest.mark.parametrize("key", ["weights", "weights_dtype"])
def test_one_kind_for_all(key: str, name: str) -> None:
    """As transformers and diffusers specify it."""
    kind = quanto.LONG[name]
    tensors = whole(kind, (8, 64))[0] if kind in quanto.WHOLE else packed(int(name[3:]), 8, 64, 64)[0]
    config = {"quant_method": "quanto", key: name, "activations": None, "modules_to_not_convert": ["head"]}
    assert one(config, tensors).scheme.weight.dtype == name.replace("float8", "float8_e4m3")


@pytest.mark.parametrize(
    ("weights", "activations", "act"),
    [
        ("qint8", "qint8", "int8-tensor"),
        ("qfloat8_e4m3fn", "qfloat8_e4m3fn", "fp8-tensor"),
        ("qint4", "qint8", "int8-tensor"),
        ("qint8", "qfloat8_e4m3fn", "fp8-tensor"),
    ],
)
def test_inputs_are_rounded_with_their_scale(weights: str, activations: str, act: str) -> None:
    tensors = whole(weights, (8, 64))[0] if weights in quanto.WHOLE else packed(4, 8, 64, 64)[0]
    tensors |= scales("m", 0.05) | scales("norm", 0.5) | {"norm.weight": torch.ones(64)}
    config = said(weights, activations) | {"norm": {"weights": "none", "activations": activations}}
    reader = quanto.Reader(config, torch.float32)
    q = only(reader, tensors)
    assert (q.scheme.act, q.scheme.static) == (act, True)
    assert (q.scheme.name == "int8-static") == (weights == activations == "qint8")
    assert q.act_scale is not None
    assert q.act_scale.item() == torch.tensor(0.05).item()
    assert OUTPUTS in reader.notes
    assert sorted(reader.dropped(held(tensors))) == ["norm.input_scale", "norm.output_scale"]
    x = torch.randn(3, 64)
    steps = x / q.act_scale
    codes = steps.round().clamp(-128, 127) if activations == "qint8" else steps.to(torch.float8_e4m3fn)
    rounded = codes.double() * q.act_scale.double()
    exact = rounded @ q.dequantize().double().T
    got = torch.nn.functional.linear(x, q).double()
    assert float((got - exact).norm() / exact.norm()) < 64 * 2**-24


def test_inputs_of_a_convolution_are_not_rounded() -> None:
    """The library rounds only its outputs."""
    q = one(said("qint8", "qint8"), whole("qint8", (6, 3, 3, 3))[0])
    assert q.scheme.name == "int8"


def test_a_shape_from_the_model() -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    tensors, value = packed(4, 128, 256, 128, bias=False, module=Q_PROJ)
    reader = quanto.Reader(said("qint4", module=Q_PROJ), torch.float32)
    reader.model = LLAMA
    q = only(reader, tensors)
    assert tuple(q.shape) == (128, 256)
    assert np.abs(q.dequantize().double().numpy() - value).max() < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "none of all"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"hidden_size": "x"},
        {"hidden_size": -1},
        {"hidden_size": 10**30},
        {"hidden_size": 512},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": 0},
        {"text_config": {"num_hidden_layers": 10**12}},
        {"architectures": ["os"], "auto_map": {"AutoModelForCausalLM": "model.Model"}, "model_type": "own"},
    ],
    ids=str,
)
def test_a_model_that_gives_no_shape_is_an_error(change: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    reader = quanto.Reader(said("qint4", module=Q_PROJ), torch.float32)
    reader.model = LLAMA | change
    with pytest.raises(CheckpointError):
        read(reader, packed(4, 128, 256, 128, bias=False, module=Q_PROJ)[0])


def test_a_model_of_many_weights_is_an_error() -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    with pytest.raises(CheckpointError, match="many more weights"):
        shapes_of({**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_hidden_layers": 1000}, 1000)


@pytest.mark.parametrize(
    "change",
    [
        {"m": {"weights": "qint3", "activations": "none"}},
        {"m": {"weights": "qint8", "activations": "qint4"}},
        {"m": {"weights": "qint8", "activations": "qfloat8_e5m2"}},
        {"m": {"weights": "qint8"}},
        {"m": {"weights": "qint8", "activations": None}},
        {"m": {"weights": ["qint8"], "activations": "none"}},
        {"m": {"weights": "qint8", "activations": "none", "group_size": 64}},
        {"m": {"weights": "qint4", "activations": "none"}},
        {"m": {"weights": "qfloat8_e4m3fn", "activations": "none"}},
        {"m": {"weights": "none", "activations": "none"}},
        {"other": {"weights": "qint8", "activations": "none"}},
        {"m": "qint8"},
        {"m": None, "weights": "int3"},
        {"weights": 8},
        {"group_size": 64},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        one({**said("qint8"), **change}, whole("qint8", (8, 64))[0])


@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("qint8", "_data", torch.zeros(8, 64, dtype=torch.uint8)),
        ("qint8", "_data", torch.zeros(8, 64, dtype=torch.float8_e4m3fn)),
        ("qint8", "_data", torch.zeros(64, dtype=torch.int8)),
        ("qint8", "_data", torch.zeros((), dtype=torch.int8)),
        ("qint8", "_data", torch.zeros(0, 64, dtype=torch.int8)),
        ("qint8", "_scale", torch.zeros(8)),
        ("qint8", "_scale", torch.zeros(7, 1)),
        ("qint8", "_scale", torch.zeros(())),
        ("qint8", "_scale", torch.zeros(8, 1, dtype=torch.float64)),
        ("qint8", "_scale", None),
        ("qint8", "_data", None),
        ("qint8", "_shift", torch.zeros(8, 1)),
        ("qint8", "_data._data", torch.zeros(8, 64, dtype=torch.uint8)),
        ("qint4", "_data._data", torch.zeros(8, 128, dtype=torch.int8)),
        ("qint4", "_data._data", torch.zeros(9, 128, dtype=torch.uint8)),
        ("qint4", "_data._data", torch.zeros(8, 64, dtype=torch.uint8)),
        ("qint4", "_data._data", torch.zeros(8, dtype=torch.uint8)),
        ("qint4", "_data._data", torch.zeros(8, 0, dtype=torch.uint8)),
        ("qint4", "_data._data", None),
        ("qint4", "_scale", torch.zeros(0, 1, dtype=torch.float16)),
        ("qint4", "_scale", torch.zeros((), dtype=torch.float16)),
        ("qint4", "_scale", torch.zeros(16, 2, dtype=torch.float16)),
        ("qint4", "_scale", None),
        ("qint4", "_shift", torch.zeros(16, 1)),
        ("qint4", "_shift", torch.zeros(15, 1, dtype=torch.float16)),
        ("qint4", "_shift", torch.full((16, 1), 16, dtype=torch.uint8)),
        ("qint4", "_shift", torch.full((16, 1), -1, dtype=torch.int8)),
        ("qint4", "_shift", None),
    ],
)
def test_damaged_tensors_are_errors(kind: str, name: str, tensor: Tensor | None) -> None:
    tensors = whole(kind, (8, 64))[0] if kind == "qint8" else packed(4, 8, 256, 128)[0]
    tensors.pop(f"m.weight.{name}", None)
    if tensor is not None:
        tensors[f"m.weight.{name}"] = tensor
    with pytest.raises(BitportError, match=r"\bm\b"):
        one(said(kind), tensors)


@pytest.mark.parametrize("shape", [(0,), (3,), (7,), (32,), ()])
def test_a_bias_that_does_not_fit_is_an_error(shape: tuple[int, ...]) -> None:
    tensors, _ = packed(4, 8, 256, 128)
    tensors["m.bias"] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=r"m\.weight\._data\._data: 16 groups of 128"):
        one(said("qint4"), tensors)


@pytest.mark.parametrize("tensor", [None, torch.ones(2), torch.tensor(1, dtype=torch.int8)])
def test_inputs_without_their_scale_are_errors(tensor: Tensor | None) -> None:
    tensors, _ = whole("qint8", (8, 64))
    del tensors["m.input_scale"]
    tensors |= {} if tensor is None else {"m.input_scale": tensor}
    with pytest.raises(CheckpointError, match=r"m\..*input_scale"):
        one(said("qint8", "qint8"), tensors)


def test_a_weight_that_was_not_frozen_is_an_error() -> None:
    tensors = {"m.weight": torch.zeros(8, 64)} | scales("m")
    with pytest.raises(CheckpointError, match="freeze"):
        quanto.Reader(said("qint8"), torch.float32).weights(held(tensors))


@pytest.mark.parametrize("file", ["quanto_qmap.json", "quantization_map.json"])
def test_a_directory(file: str, tmp_path: Path) -> None:
    source = tmp_path / "quanto"
    source.mkdir()
    tensors, value = whole("qint8", (8, 64))
    save_file(tensors | {"norm.weight": torch.ones(64)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (source / file).write_text(json.dumps({"m": {"weights": "qint8", "activations": "none"}}))
    done = convert(source, tmp_path / "out", progress=False)
    assert (done.read, done.weights, done.others, done.notes) == ("quanto", {"m.weight": "int8"}, 1, ())
    assert not (tmp_path / "out" / file).exists()
    q = dict(Own(tmp_path / "out").items())["m.weight"]
    assert isinstance(q, QTensor)
    assert bool(((q.dequantize(torch.float32).double() - value).abs() <= 2.0**-24 * value.abs()).all())
    (source / file).write_text("[1]")
    with pytest.raises(CheckpointError, match=file):
        convert(source, tmp_path / "again", progress=False)


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, contents of the map)."""
    writer = quanto.Writer()
    tensors = write(writer, q)
    assert writer.config(["lm_head"]) is None
    ((path, text),) = writer.files().items()
    assert path == Path("quanto_qmap.json")
    return tensors, json.loads(text)


def as_they_were(again: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Inputs and outputs are not scaled: their scales are 1."""
    assert again.keys() == tensors.keys() - {"m.bias"}
    for name, tensor in again.items():
        its = tensors[name]
        assert tensor.dtype == (tensor.dtype if name.endswith("put_scale") else its.dtype), name
        assert tensor.is_contiguous()
        assert torch.equal(tensor.float(), its.float()), name


@pytest.mark.parametrize("kind", quanto.WHOLE)
def test_eight_bits_that_are_written_are_what_was_read(kind: str) -> None:
    tensors, _ = whole(kind, (8, 64))
    again, said_again = written(one(said(kind), tensors, torch.bfloat16))
    as_they_were(again, tensors)
    assert {"quant_method": "quanto", **said_again} == said(kind)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(8, 256, 128), (5, 192, 96), (7, 160, 32), (6, 320, 64), (7, 64, 64), (3, 136, 136)]
)
@pytest.mark.parametrize("integers", [False, True], ids=["shifts", "zero points"])
def test_fewer_bits_that_are_written_are_what_was_read(n: int, k: int, group: int, bits: int, integers: bool) -> None:
    tensors, _ = packed(bits, n, k, group, whole=integers)
    if integers:
        tensors["m.weight._shift"] = tensors["m.weight._shift"].to(torch.int8)
    kind = f"qint{bits}"
    again, said_again = written(one(said(kind), tensors, torch.float16))
    as_they_were(again, tensors)
    assert {"quant_method": "quanto", **said_again} == said(kind)


OURS = {"int8": 64, "int4": 256, "int4-sym": 256, "int4-g256": 512, "int4-channel": 100, "int2-g96-sym": 192}
OURS |= {"int4-fzero": 256, "int4-channel-sym": 256}
"""Scheme -> number of columns."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", OURS)
def test_our_own_weights_survive(scheme: str, dtype: torch.dtype) -> None:
    value = torch.randn(16, OURS[scheme], generator=torch.Generator().manual_seed(0)).to(dtype)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    if dtype == torch.bfloat16 and scheme in ("int4", "int4-g256"):
        with pytest.raises(ArgumentError, match="no whole zero points of int4 in groups of 128 in bfloat16"):
            written(q)
    elif dtype != torch.float32 and scheme == "int4-fzero":
        with pytest.raises(ArgumentError, match=f"times its scale is no {dtype}"):
            written(q)
    else:
        tensors, map_of = written(q)
        back = one({"quant_method": "quanto", **map_of}, {**tensors, "m.bias": torch.zeros(16)}, dtype)
        assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
        assert back.dtype == dtype


def test_what_it_cannot_hold_is_refused() -> None:
    writer = quanto.Writer()
    for bad, reason in (
        (described("int8-dyn"), "not int8-dyn"),
        (described("int8-g32"), "not int8-g32"),
        (described("int8-asym"), "not int8-asym"),
        (described("fp8-row"), "not fp8-row"),
        (described("int3"), "not int3"),
        (described("nf4"), "not nf4"),
        (described("int4-b32x32"), "not int4-b32x32"),
        (described("int4-g32", (64, 256)), "groups of 128 where a row has 256 columns, and 32"),
        (described("int4-g64"), "groups of 128 where a row has 128 columns, and 64"),
        (described("int4", (64, 320)), "groups of 64 where a row has 320 columns, and 128"),
    ):
        assert reason in str(writer.refuses(bad)), reason
    q = bitport.quantize_tensor(torch.randn(4, 64), "int4-channel").to_layout("plain")
    assert q.zero is not None
    q.zero[1] = 16
    with pytest.raises(ArgumentError, match="zero point 16; quanto has 4 bits"):
        writer.write("m.weight", q)


def test_no_map_of_an_earlier_model_stays(tmp_path: Path) -> None:
    """It would label another model as quantized by quanto."""
    models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")
    source = models.make_directory(tmp_path / "float")
    bitport.checkpoint.quantize_files(source, tmp_path / "q", "int8", progress=False)
    convert(tmp_path / "q", tmp_path / "out", to="quanto", progress=False)
    assert (tmp_path / "out" / "quanto_qmap.json").is_file()
    convert(tmp_path / "out", tmp_path / "back", progress=False)
    assert {name for name, each in Own(tmp_path / "back").items() if isinstance(each, QTensor)} == {
        name for name, each in Own(tmp_path / "q").items() if isinstance(each, QTensor)
    }
    convert(tmp_path / "q", tmp_path / "out", to="float", overwrite=True, progress=False)
    assert not (tmp_path / "out" / "quanto_qmap.json").exists()
    bitport.checkpoint.quantize_files(tmp_path / "out", tmp_path / "anew", "int8", progress=False)
