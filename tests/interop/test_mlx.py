"""MLX files against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import convert, mlx
from bitport.interop.shifts import ROUNDED, ROUNDED_BACK
from bitport.interop.sources import source_of
from bitport.numerics import Quantized
from bitport.tensor import QTensor

from .files import E2M1, assert_as_read, assert_numbers, assert_same, described, held, only, read, words, write


def of_words(codes: np.ndarray, bits: int) -> Tensor:
    return torch.from_numpy(words(codes, bits).view(np.uint32))


def affine(n: int, k: int, bits: int, group: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a module, its weight in float64)."""
    rng = np.random.default_rng(n + k + bits)
    codes = rng.integers(0, 1 << bits, (n, k))
    scales = rng.uniform(-0.1, 0.1, (n, k // group)).astype(np.float16)
    biases = rng.uniform(-1, 1, (n, k // group)).astype(np.float16)
    tensors = {
        "m.weight": of_words(codes, bits),
        "m.scales": torch.from_numpy(scales),
        "m.biases": torch.from_numpy(biases),
    }
    return tensors, codes * spread(scales, group) + spread(biases, group)


def spread(values: np.ndarray, group: int) -> np.ndarray:
    return np.repeat(values.astype(np.float64), group, 1)


def rounded_by(values: np.ndarray, biases: np.ndarray, group: int) -> np.ndarray:
    """The zero point, the difference from it and the product are rounded to float32, each with a relative error of
    2^-24."""
    return 2.0**-24 * (1 + 2**-20) * (spread(np.abs(biases), group) + 2 * np.abs(values))


def said(bits: int, group: int, **more: object) -> dict[str, object]:
    return {"bits": bits, "group_size": group, **more}


@pytest.mark.parametrize("bits", mlx.BITS)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 64), (24, 128, 32), (5, 256, 128)])
def test_values_are_those_of_the_definition(n: int, k: int, group: int, bits: int) -> None:
    tensors, value = affine(n, k, bits, group)
    reader = mlx.Reader(said(bits, group), torch.float16)
    q = only(reader, tensors)
    assert (q.dtype, q.scale.dtype, q.scheme.weight.zero) == (torch.float16, torch.float32, "float")
    got = q.dequantize(torch.float32).double().numpy()
    assert (np.abs(got - value) <= rounded_by(value, tensors["m.biases"].numpy(), group)).all()
    assert reader.notes == [ROUNDED]


def test_the_scheme_has_a_name() -> None:
    q = only(mlx.Reader(said(4, 64), torch.float16), affine(8, 64, 4, 64)[0])
    assert str(q.scheme) == "int4-g64-fzero"


def test_products_are_those_of_the_values() -> None:
    tensors, value = affine(64, 256, 4, 64)
    q = only(mlx.Reader(said(4, 64), torch.float32), tensors)
    x = torch.randn(5, 256, dtype=torch.float64)
    exact = x @ torch.from_numpy(value).T
    for rows in (1, 5):
        got = torch.nn.functional.linear(x[:rows].float(), q.to_device_layout()).double()
        assert float((got - exact[:rows]).norm() / exact[:rows].norm()) < 256 * 2**-24


def test_a_constant_block_is_exact() -> None:
    """Its scale is 0, or so small that the zero point would be infinite; codes must not matter there."""
    tensors, value = affine(8, 128, 4, 32)
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    tensors["m.scales"][0, 0] = 0
    tensors["m.scales"][1, 1] = 1e-45
    tensors["m.scales"][2, 2] = tensors["m.biases"][2, 2] = 0
    q = only(mlx.Reader(said(4, 32), torch.float32), tensors)
    got = q.dequantize(torch.float32)
    assert bool((got[0, :32] == tensors["m.biases"][0, 0]).all())
    assert bool((got[1, 32:64] == tensors["m.biases"][1, 1]).all())
    assert bool((got[2, 64:96] == 0).all())
    others = got[3:].double().numpy()
    assert (np.abs(others - value[3:]) <= rounded_by(value[3:], tensors["m.biases"][3:].numpy(), 32)).all()


def test_what_is_not_finite_stays_so() -> None:
    tensors, _ = affine(8, 128, 4, 32)
    tensors["m.scales"][0, 0] = torch.nan
    tensors["m.biases"][1, 1] = torch.nan
    tensors["m.biases"][2, 2] = torch.inf
    q = only(mlx.Reader(said(4, 32), torch.float16), tensors)
    got = q.dequantize(torch.float32)
    assert bool(got[0, :32].isnan().all())
    assert bool(got[1, 32:64].isnan().all())
    assert bool((got[2, 64:96] == torch.inf).all())
    assert int((~got.isfinite()).sum()) == 96


@pytest.mark.parametrize(
    ("zeros", "name"),
    [([8], "int4-g32-sym"), ([0, 3, 15], "int4-g32"), ([-1, 3], "int4-g32-fzero"), ([3, 16], "int4-g32-fzero")],
)
def test_whole_zero_points_are_exact(zeros: list[int], name: str) -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (8, 64)), rng.integers(1, 99, (8, 2)) / 1024
    zero = rng.permutation(np.resize(zeros, 16)).reshape(8, 2)
    tensors = {
        "m.weight": of_words(codes, 4),
        "m.scales": torch.from_numpy(scales).bfloat16(),
        "m.biases": torch.from_numpy(-zero * scales).float(),
    }
    q = only(mlx.Reader(said(4, 32), torch.bfloat16), tensors)
    assert (str(q.scheme), q.scale.dtype) == (name, torch.float32 if "fzero" in name else torch.bfloat16)
    exact = (codes - spread(zero, 32)) * spread(scales, 32)
    assert_numbers(q, exact)


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_modes_of_floats(mode: str, group: int, bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (8, 96))
    codes[codes % 128 == 127] = 0  # no NaN
    scales = rng.integers(60, 120, (8, 96 // group)).astype(np.uint8)
    tensors = {"m.weight": of_words(codes, bits), "m.scales": torch.from_numpy(scales)}
    q = only(mlx.Reader(said(bits, group, mode=mode), torch.bfloat16), tensors)
    values = E2M1[codes] if bits == 4 else e4m3(codes)
    factor = e4m3(scales) if mode == "nvfp4" else 2.0 ** (scales.astype(int) - 127)
    assert str(q.scheme) == f"{mode}-wo"
    assert_numbers(q, values * spread(factor, group))
    del tensors["m.scales"]
    with pytest.raises(CheckpointError, match="belongs to no module"):
        mlx.Reader(said(bits, group, mode=mode), torch.bfloat16).weights(held(tensors))


def e4m3(codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_modules_with_settings_of_their_own() -> None:
    tensors = {f"a.{name}": tensor for name, tensor in affine(8, 64, 4, 64)[0].items()}
    tensors |= {f"b.{name}": tensor for name, tensor in affine(8, 64, 6, 32)[0].items()}
    tensors["c.weight"] = torch.zeros(2, 2)
    config = said(4, 64, **{"b.m": {"bits": 6, "group_size": 32}, "c": False, "a.m": True})
    found = read(mlx.Reader(config, torch.float16), tensors)
    assert {name: str(q.scheme) for name, q in found.items()} == {
        "a.m.weight": "int4-g64-fzero",
        "b.m.weight": "int6-g32-fzero",
    }


def test_metal_calls_them_qbiases() -> None:
    tensors, value = affine(8, 64, 4, 64)
    tensors["m.qbiases"] = tensors.pop("m.biases")
    config = said(4, 64, quant_method="metal", modules_to_not_convert=["lm_head"])
    q = only(mlx.Reader(config, torch.float16), tensors)
    got = q.dequantize(torch.float32).double().numpy()
    assert (np.abs(got - value) <= rounded_by(value, tensors["m.qbiases"].numpy(), 64)).all()


E = 3
STACKED = "l.mlp.switch_mlp."


def experts(*projections: str, rows: int = 8) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (stacks of projections with different experts, their weights concatenated along the rows)."""
    tensors: dict[str, Tensor] = {}
    values = []
    for at, projection in enumerate(projections):
        made = [affine(rows + 8 * at, 128, 4, 64) for _ in range(E)]
        for name in made[0][0]:
            each = [tensors[name].roll(expert, 0) for expert, (tensors, _) in enumerate(made)]
            tensors[name.replace("m.", f"{STACKED}{projection}.")] = torch.stack(each)
        values.append(np.stack([np.roll(value, expert, 0) for expert, (_, value) in enumerate(made)]))
    return tensors, np.concatenate(values, 1)


def reader_of(kind: object, **more: object) -> mlx.Reader:
    reader = mlx.Reader(said(4, 64, **more), torch.float16)
    reader.model = {"model_type": kind}
    return reader


@pytest.mark.parametrize("order", [("gate_proj", "up_proj"), ("up_proj", "gate_proj")])
def test_stacked_experts(order: tuple[str, str]) -> None:
    up, up_value = experts("gate_proj", "up_proj")
    down, down_value = experts("down_proj", rows=24)
    tensors = {name: up[name] for each in order for name in up if f".{each}." in name} | down
    reader = reader_of("qwen3_moe")
    found = read(reader, tensors)
    assert reader.notes == [ROUNDED]
    values = {"l.mlp.experts.gate_up_proj": up_value, "l.mlp.experts.down_proj": down_value}
    assert found.keys() == values.keys()
    for name, q in found.items():
        assert (tuple(q.shape), q.transposed, str(q.scheme)) == (values[name].shape, False, "int4-g64-fzero")
        got, wanted = q.dequantize(torch.float32).double().numpy(), values[name]
        # See rounded_by: a bias is at most 1 here.
        assert (np.abs(got - wanted) <= 2.0**-24 * (1 + 2**-20) * (1 + 2 * np.abs(wanted))).all()


@pytest.mark.parametrize("mode", mlx.FIXED)
def test_stacked_experts_in_floats(mode: str) -> None:
    group, bits, scheme = mlx.FIXED[mode]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (E, 16, 128)) & (0x77 if bits == 8 else 15)
    scales = rng.integers(100, 120, (E, 16, 128 // group)).astype(np.uint8)
    tensors = {
        f"{STACKED}down_proj.weight": of_words(codes, bits),
        f"{STACKED}down_proj.scales": torch.from_numpy(scales),
    }
    reader = mlx.Reader({"bits": bits, "group_size": group, "mode": mode}, torch.bfloat16)
    reader.model = {"model_type": "mixtral"}
    q = only(reader, tensors)
    kind = ml_dtypes.float8_e4m3fn if mode == "nvfp4" else ml_dtypes.float8_e8m0fnu
    number = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) if bits == 8 else E2M1[codes]
    assert (str(q.scheme), tuple(q.shape)) == (scheme, (E, 16, 128))
    factor = np.repeat(scales.view(kind).astype(np.float64), group, -1)
    assert_numbers(q, number * factor)


def test_stacked_experts_that_are_not_read() -> None:
    tensors, _ = experts("gate_proj", "up_proj")
    for kind in ("qwen3_next", None, ["mixtral"]):
        with pytest.raises(CheckpointError, match=r"gate_proj: MLX stacks the experts .* mixtral"):
            read(reader_of(kind), tensors)
    for name in ("w1", "gate_up_proj"):
        other = {key.replace("gate_proj", name): tensor for key, tensor in tensors.items()}
        with pytest.raises(CheckpointError, match=f"{name}: MLX stacks the experts"):
            read(reader_of("mixtral"), other)
    elsewhere = {key.replace("switch_mlp", "experts"): tensor for key, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match="MLX stacks the experts"):
        read(reader_of("mixtral"), elsewhere)
    own = {f"{STACKED}up_proj": {"bits": 8, "group_size": 64}}
    with pytest.raises(CheckpointError, match="are one parameter, and have different settings"):
        read(reader_of("mixtral", **own), tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("up_proj.weight", None),
        ("up_proj.scales", None),
        ("gate_proj.weight", None),
        ("gate_proj.biases", None),
        ("up_proj.weight", torch.zeros(E, 16, 15, dtype=torch.uint32)),
        ("up_proj.weight", torch.zeros(E, 17, 16, dtype=torch.uint32)),
        ("up_proj.weight", torch.zeros(E + 1, 16, 16, dtype=torch.uint32)),
        ("up_proj.weight", torch.zeros(E, 16, 16, dtype=torch.int32)),
        ("up_proj.weight", torch.zeros(16, 16, dtype=torch.uint32)),
        ("gate_proj.weight", torch.zeros(E, 9, 16, dtype=torch.uint32)),
        ("gate_proj.weight", torch.zeros(0, 8, 16, dtype=torch.uint32)),
        ("up_proj.scales", torch.zeros(E, 16, 2)),
        ("up_proj.scales", torch.zeros(E, 15, 2).half()),
        ("gate_proj.scales", torch.zeros(E, 8, 3).half()),
        ("up_proj.biases", torch.zeros(E, 16, 1).half()),
    ],
)
def test_damaged_stacked_experts_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors = {**experts("gate_proj", "up_proj")[0], f"{STACKED}{name}": tensor}
    with pytest.raises(BitportError, match=r"l\.mlp"):
        read(reader_of("mixtral"), {key: each for key, each in tensors.items() if each is not None})


@pytest.mark.parametrize("shape", [(8, 4, 1), (8, 14, 14, 3)])
def test_convolutions_lie_otherwise_in_mlx(shape: tuple[int, ...]) -> None:
    tensors, _ = affine(8, 64, 4, 64)
    tensors["conv1d.weight"] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight: MLX keeps"):
        read(mlx.Reader(said(4, 64), torch.float16), tensors)
    reader = mlx.Reader(said(4, 64), torch.float16)
    reader.metadata = {"format": "mlx"}
    with pytest.raises(CheckpointError, match=r"conv1d\.weight: MLX keeps"):
        read(reader, tensors)
    reader.metadata = {"format": "pt"}
    assert list(read(reader, tensors)) == ["m.weight"]
    tensors["m.qbiases"] = tensors.pop("m.biases")
    assert list(read(mlx.Reader(said(4, 64, quant_method="metal"), torch.float16), tensors)) == ["m.weight"]


def test_a_model_with_convolutions_is_read_back(tmp_path: Path) -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(64, 64, 4, groups=64), "up": nn.Linear(64, 32)})
    bitport.quantize_(model, {"up": "int4-g32-sym"})
    bitport.save(model, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "mlx", to="mlx", progress=False)
    convert(tmp_path / "mlx", tmp_path / "back", progress=False)
    ours, back = (dict(source_of(tmp_path / name).items()) for name in ("ours", "back"))
    assert_same(back, ours)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 7},
        {"bits": 0},
        {"bits": "4"},
        {"bits": True, "mode": "mxfp4"},
        {"group_size": 0},
        {"group_size": -1},
        {"group_size": 48},
        {"group_size": 10**30},
        {"mode": "nvfp8"},
        {"mode": "mxfp4"},
        {"mode": ["affine"]},
        {"quantize_input": True},
        {"rotated": 1},
        {"m": {"bits": 4, "group_size": 32, "rotated": 1}},
        {"m": {"bits": 9}},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, object]) -> None:
    tensors, _ = affine(8, 64, 4, 64)
    with pytest.raises(CheckpointError):
        read(mlx.Reader({**said(4, 64), **change}, torch.float16), tensors)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("m.weight", torch.zeros(8, 8, dtype=torch.int32)),
        ("m.weight", torch.zeros(8, 7, dtype=torch.uint32)),
        ("m.weight", torch.zeros(8, dtype=torch.uint32)),
        ("m.weight", torch.zeros(2, 8, 8, dtype=torch.uint32)),
        ("m.weight", torch.zeros(0, 8, dtype=torch.uint32)),
        ("m.scales", torch.zeros(8, 2)),
        ("m.scales", torch.zeros(8)),
        ("m.scales", torch.zeros(8, 1, dtype=torch.uint8)),
        ("m.biases", torch.zeros(7, 1)),
        ("m.biases", torch.zeros(8, 1, dtype=torch.float64)),
        ("m.biases", None),
        ("m.scales", None),
        ("m.weight", None),
    ],
)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors, _ = affine(8, 64, 4, 64)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\."):
        read(mlx.Reader(said(4, 64), torch.float16), tensors)


def written(q: QTensor) -> tuple[dict[str, Tensor], dict[str, object], list[str]]:
    writer = mlx.Writer()
    return write(writer, q), writer.config(["lm_head"]), writer.notes


@pytest.mark.parametrize("bits", mlx.BITS)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 64, 64), (24, 128, 32), (5, 256, 128)])
def test_what_is_written_is_what_was_read(n: int, k: int, group: int, bits: int) -> None:
    """Including biases, from rounded zero points."""
    tensors, _ = affine(n, k, bits, group)
    q = only(mlx.Reader(said(bits, group), torch.float16), tensors)
    again, config, notes = written(q)
    assert_as_read(again, tensors)
    assert (config, notes) == (said(bits, group), [])


def test_constant_blocks_are_written_with_their_number() -> None:
    tensors, _ = affine(8, 128, 4, 32)
    tensors["m.scales"][:, 1] = 0
    tensors["m.biases"][:4, 1] = torch.tensor([0, -0.0, 2.0**-24, -65504])
    q = only(mlx.Reader(said(4, 32), torch.float16), tensors)
    again, config, _ = written(q)
    back = only(mlx.Reader(config, torch.float16), again)
    assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert torch.equal(again["m.biases"].view(torch.int16), tensors["m.biases"].view(torch.int16))


@pytest.mark.parametrize("mode", mlx.FIXED)
def test_floats_that_are_written_are_what_was_read(mode: str) -> None:
    group, bits, name = mlx.FIXED[mode]
    rng = np.random.default_rng(0)
    tensors = {
        "m.weight": of_words(rng.integers(0, 1 << min(bits, 6), (8, 128)), bits),
        "m.scales": torch.from_numpy(rng.integers(1, 127, (8, 128 // group)).astype(np.uint8)),
    }
    q = only(mlx.Reader(said(bits, group, mode=mode), torch.bfloat16), tensors)
    again, config, _ = written(q)
    assert_as_read(again, tensors)
    assert (str(q.scheme), config) == (name, said(bits, group, mode=mode))


OURS = {
    **{f"int{bits}-g64-sym": (bits, 64) for bits in (2, 3, 4, 5, 6)},
    "int7-g32-sym": (8, 32),
    "int4": (4, 128),
    "int4-g96": (4, 32),
    "int4-g256": (4, 128),
    "int8": (8, 128),
    "int8-asym": (8, 128),
    "int4-fzero": (4, 128),
}
"""Scheme -> bits and group size in MLX."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", OURS)
def test_our_own_weights_survive(scheme: str, dtype: torch.dtype) -> None:
    """Integer zero points give biases that only float32 can hold."""
    value = torch.randn(16, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    tensors, config, notes = written(q)
    back = only(mlx.Reader(config, dtype), tensors)
    assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32))
    assert (config, notes) == (said(*OURS[scheme]), [])
    symmetric = q.zero is None
    assert tensors["m.biases"].dtype == tensors["m.scales"].dtype == (dtype if symmetric else torch.float32)


def test_shifts_that_are_rounded_are_told() -> None:
    value = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    q = bitport.quantize_tensor(value, "int4-g64").to_layout("plain")
    tensors, _, notes = written(q)
    assert notes == [ROUNDED_BACK]
    assert q.zero is not None
    exact = -q.zero.double() * q.scale.double()
    assert bool(((tensors["m.biases"].double() - exact).abs() <= 2**-24 * exact.abs()).all())


def test_modules_of_several_kinds() -> None:
    writer = mlx.Writer()
    schemes = {"a": "int4-g64-sym", "b": "mxfp4-wo", "c": "int4-g64-sym", "embed_tokens": "int8"}
    tensors = {}
    for module, scheme in schemes.items():
        q = bitport.quantize_tensor(torch.randn(8, 128), scheme).to_layout("plain")
        tensors |= write(writer, q, f"{module}.weight")
    config = writer.config([])
    own = {"b": {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "embed_tokens": {"group_size": 128, "bits": 8}}
    assert config == {"group_size": 64, "bits": 4, **own}
    found = read(mlx.Reader(config, torch.float32), tensors)
    assert {name: str(q.scheme) for name, q in found.items()} == {
        "a.weight": "int4-g64-sym",
        "b.weight": "mxfp4-wo",
        "c.weight": "int4-g64-sym",
        "embed_tokens.weight": "int8-g128",
    }


def test_what_it_cannot_hold_is_refused() -> None:
    writer = mlx.Writer()
    for bad, reason in (
        (described("int4", (64, 128), "experts"), "of the kind 'experts'"),
        (described("int4-int8"), "rounds them"),
        (described("nf4"), "integers in groups of rows"),
        (described("fp8-wo"), "integers in groups of rows"),
        (described("int4-g16"), "multiples of 32 columns"),
        (described("int4-b32x32"), "integers in groups of rows"),
        (described("int4-channel", (64, 100)), "of 100 columns"),
        (described("int4", (64, 192)), "192 columns do not divide into those of int4"),
        (described("mxfp4-wo", (64, 100)), "100 columns do not divide into those of mxfp4-wo"),
        (described("int4", more=("perm",)), "no perm"),
        (described("int4", more=("pre_scale",)), "no pre_scale"),
    ):
        assert reason in str(writer.refuses(bad)), reason
    q = bitport.quantize_tensor(torch.randn(8, 64), "nvfp4-wo").to_layout("plain")
    assert q.scale2 is not None
    with pytest.raises(ArgumentError, match="nvfp4 of MLX has none"):
        writer.write("m.weight", q.replace(Quantized(q.qdata, q.scale, None, q.scale2 * 0 + 0.5)))
