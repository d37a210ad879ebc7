"""GPTQ files against numbers packed by plain Python and multiplied in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import bitport
from bitport.errors import ArgumentError, BitportError, CheckpointError
from bitport.interop import gptq
from bitport.interop.sources import description

from .files import assert_as_read, assert_numbers, described, only, read, words, write

SHAPES = ((32, 64), (64, 96), (96, 320))


def layer(
    n: int, k: int, bits: int, group: int, *, less: int = 1, symmetric: bool = False, shuffled: bool = False
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Return (the tensors of a layer, its weight in float64)."""
    rng = np.random.default_rng(n + k + bits)
    codes = rng.integers(0, 1 << bits, (n, k))
    groups = -(-k // group)
    zeros = np.full((n, groups), 1 << (bits - 1)) if symmetric else rng.integers(less, 1 << bits, (n, groups))
    scales = rng.uniform(0.001, 0.1, (n, groups)).astype(np.float16)
    group_of = np.arange(k) // group
    if shuffled:
        group_of = rng.permutation(group_of)
    tensors = {
        "m.qweight": torch.from_numpy(words(codes, bits).T.copy()),
        "m.qzeros": torch.from_numpy(words(zeros.T - less, bits)),
        "m.scales": torch.from_numpy(scales.T.copy()),
        "m.g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return tensors, (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]


def planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes along the last axis: 32 at a time, in planes of 4, 2 and 1 bits, the lowest first."""
    widths = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]
    found = []
    for block in np.split(codes, codes.shape[-1] // 32, -1):
        low = 0
        for width in widths:
            found.append(words(block >> low & (1 << width) - 1, width))
            low += width
    return np.concatenate(found, -1)


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_planes(bits: int, shuffled: bool) -> None:
    rng = np.random.default_rng(bits)
    codes, zeros = rng.integers(0, 1 << bits, (64, 96)), rng.integers(0, 1 << bits, (64, 3))
    scales, group_of = rng.uniform(0.001, 0.1, (64, 3)).astype(np.float16), np.arange(96) // 32
    if shuffled:
        group_of = rng.permutation(group_of)
    tensors = {
        "m.qweight": torch.from_numpy(planes(codes, bits).T.copy()),
        "m.qzeros": torch.from_numpy(planes(zeros.T, bits)),
        "m.scales": torch.from_numpy(scales.T.copy()),
        "m.g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    q = only(gptq.Reader(config(bits, 32, checkpoint_format="gptq_p"), torch.float16), tensors)
    value = (codes - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]
    assert_numbers(q, value)


@pytest.mark.parametrize("role", ["qweight", "qzeros"])
def test_planes_of_no_whole_words(role: str) -> None:
    tensors = {
        "m.qweight": torch.zeros(10, 32, dtype=torch.int32),
        "m.qzeros": torch.zeros(2, 5, dtype=torch.int32),
        "m.scales": torch.ones(2, 32, dtype=torch.float16),
    }
    made = gptq.Reader(config(5, 32, checkpoint_format="gptq_p"), torch.float16)
    assert len(read(made, tensors)) == 1
    shorter = tensors[f"m.{role}"][:9] if role == "qweight" else tensors["m.qzeros"][:, :4]
    for damaged in (shorter.contiguous(), tensors[f"m.{role}"].to(torch.int64)):
        with pytest.raises(
            CheckpointError, match=rf"32 codes of 5 bits are 5 words of int32|m\.{role} must be torch\.int32"
        ):
            read(made, {**tensors, f"m.{role}": damaged})


def config(bits: int, group: int, **more: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, **more}


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("less", [1, 0], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_are_those_of_the_definition(n: int, k: int, bits: int, less: int, shuffled: bool) -> None:
    tensors, value = layer(n, k, bits, 32, less=less, shuffled=shuffled)
    said = config(bits, 32, checkpoint_format="gptq" if less else "gptq_v2")
    q = only(gptq.Reader(said, torch.float16), tensors)
    assert q.dtype == torch.float16
    assert (q.perm is not None) == shuffled
    # A code minus a zero point has at most 9 bits, and a float16 scale 11: float32 holds the product exactly.
    assert_numbers(q, value)


def test_a_symmetric_weight_needs_no_zero_points() -> None:
    tensors, value = layer(32, 128, 4, 128, symmetric=True)
    q = only(gptq.Reader(config(4, 128, sym=True), torch.float16), tensors)
    assert (str(q.scheme), q.zero) == ("int4-sym", None)
    assert_numbers(q, value)


def test_zero_points_are_kept_where_they_are_not_what_symmetric_means() -> None:
    tensors, value = layer(32, 128, 4, 128)
    q = only(gptq.Reader(config(4, 128, sym=True), torch.float16), tensors)
    assert str(q.scheme) == "int4"
    assert_numbers(q, value)


def test_one_group_for_a_row() -> None:
    tensors, value = layer(32, 96, 4, 96)
    q = only(gptq.Reader(config(4, -1), torch.float16), tensors)
    assert str(q.scheme) == "int4-channel"
    assert_numbers(q, value)


def test_a_zero_point_of_two_to_the_bits_is_a_number_like_others() -> None:
    """It occurs in files of the first kind: a stored 15, which stands for 16."""
    tensors, _ = layer(32, 64, 4, 32)
    tensors["m.qzeros"] = torch.full_like(tensors["m.qzeros"], -1)
    q = only(gptq.Reader(config(4, 32), torch.float16), tensors)
    assert q.zero is not None
    assert bool((q.zero == 16).all())
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = x @ q.dequantize(torch.float32).double().T
    for rows in (1, 5):
        got = torch.nn.functional.linear(x[:rows].float(), q.to_device_layout()).double()
        assert float((got - exact[:rows]).norm() / exact[:rows].norm()) < 64 * 2**-24


@pytest.mark.parametrize("bits", gptq.BITS)
def test_a_zero_point_of_zero_as_gptqmodel_stores_it(bits: int) -> None:
    """Decremented as whole words, with borrow; with 3 bits each code separately, without."""
    tensors, value = layer(64, 64, bits, 32, less=0)
    codes = tensors["m.qzeros"].numpy()
    if bits == 3:
        numbers = [int.from_bytes(row.tobytes(), "little") for row in codes]
        zeros = np.array([[number >> 3 * at & 7 for at in range(64)] for number in numbers])
        assert 0 in zeros
        codes = words((zeros - 1) % 8, 3)
    else:
        ones = sum(1 << at for at in range(0, 32, bits))
        codes = (codes.astype(np.int64) - ones).astype(np.uint32).view(np.int32)
    said = config(bits, 32, meta={"quantizer": ["optimum:2.1.0", "gptqmodel:7.7.0"]})
    q = only(gptq.Reader(said, torch.float16), {**tensors, "m.qzeros": torch.from_numpy(codes.copy())})
    assert_numbers(q, value)


def test_inputs_that_others_round_are_told() -> None:
    (note,) = gptq.Reader(config(4, 128, activation={"mode": "w4afp8"}), torch.float16).notes
    assert note.startswith("activation: inputs are rounded")


def test_settings_of_their_own_for_some_layers() -> None:
    four, of_four = layer(32, 64, 4, 32)
    eight, of_eight = layer(32, 64, 8, 64)
    tensors = {f"a.{name}": tensor for name, tensor in four.items()}
    tensors |= {f"b.{name}": tensor for name, tensor in eight.items()}
    said = config(4, 32, dynamic={"-:c": {}, "+:b\\..*": {"bits": 8, "group_size": 64}})
    found = read(gptq.Reader(said, torch.float16), tensors)
    assert_numbers(found["a.m.weight"], of_four)
    assert_numbers(found["b.m.weight"], of_eight)


def test_the_first_override_that_fits_decides() -> None:
    named = {rf"^model\.layers\.{at}\.up_proj$": {"bits": 8} for at in range(3000)}
    last = {r"+:^b\.c$": {"bits": 3}, "-:^b": {}, "b.*": {"bits": 2}, r"^b\.d$": {"bits": 8}, "^bxc$": {"bits": 8}}
    found = gptq.Overrides(config(4, 128, dynamic=named | last))
    modules = ("b.c", "b.d", "bxc", "a", *(f"model.layers.{at}.up_proj" for at in range(3000)))
    bits = [found.of(module).get("bits") for module in modules]
    assert bits == [3, 2, 2, None, *[8] * 3000]


@pytest.mark.parametrize("writer", [gptq.Writer, gptq.WriterV2])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("bits", gptq.BITS)
def test_what_is_written_is_what_was_read(bits: int, shuffled: bool, writer: type[gptq.Writer]) -> None:
    less = gptq.FORMS[writer.name].less
    tensors, _ = layer(64, 96, bits, 32, less=less, shuffled=shuffled)
    q = only(gptq.Reader(config(bits, 32, checkpoint_format=writer.name), torch.float16), tensors)
    made = writer()
    again = write(made, q)
    assert_as_read(again, tensors)
    said = made.config(["lm_head", "model.gate"])
    assert said == {
        "quant_method": "gptq",
        "checkpoint_format": writer.name,
        "bits": bits,
        "group_size": 32,
        "sym": False,
        "desc_act": shuffled,
        "lm_head": False,
        "dynamic": {"-:^model\\.gate$": {}},
    }
    assert torch.equal(read(gptq.Reader(said, torch.float16), again)["m.weight"].dequantize(), q.dequantize())


def test_our_own_weights_survive() -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for scheme in ("int4", "int4-g32-sym", "int8-g64-asym", "int3-g32", "int2-g32", "int8", "int4-channel"):
        q = bitport.quantize_tensor(value.half(), scheme).to_layout("plain")
        writer = gptq.WriterV2()
        tensors = write(writer, q)
        back = only(gptq.Reader(writer.config([]), torch.float16), tensors)
        assert torch.equal(back, q), scheme


def test_a_zero_point_of_zero_is_refused_by_the_first_kind_alone() -> None:
    q = bitport.quantize_tensor(torch.rand(32, 64).half(), "int4-g32").to_layout("plain")
    with pytest.raises(ArgumentError, match="gptq_v2 stores them as they are"):
        write(gptq.Writer(), q)
    write(gptq.WriterV2(), q)


def test_a_scale_that_is_no_float16_is_refused() -> None:
    q = bitport.quantize_tensor(torch.randn(32, 64) * 1e-7, "int4-g32-sym").to_layout("plain")
    with pytest.raises(ArgumentError, match=r"is no float16; --scales float16"):
        write(gptq.Writer(), q)


@pytest.mark.parametrize("scheme", ["nf4", "int4-fzero", "fp8-row", "int4-int8", "int5", "int4-b32x32"])
def test_schemes_that_it_cannot_hold_are_refused(scheme: str) -> None:
    q = bitport.quantize_tensor(torch.randn(64, 128), scheme).to_layout("plain")
    assert "GPTQ holds integers" in str(gptq.Writer().refuses(description("m.weight", q)))


def test_other_refusals() -> None:
    writer = gptq.Writer()
    assert writer.refuses(described("int4")) is None
    assert "64x100" in str(writer.refuses(described("int4", (64, 100))))
    assert "one scheme" in str(writer.refuses(described("int4-g32")))


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5},
        {"bits": "4"},
        {"bits": True},
        {"group_size": 0},
        {"group_size": None},
        {"group_size": 1 << 31},
        {"group_size": 1 << 32},  # as an int32: 0
        {"group_size": (1 << 32) + 32},  # as an int32: 32
        {"group_size": 1 << 70},
        {"desc_act": "yes"},
        {"sym": "yes"},
        {"checkpoint_format": "marlin"},
        {"checkpoint_format": "gptq", "format": "gptq_v2"},  # of these, libraries differ in which they read
        {"method": "qqq"},
        {"is_marlin_format": True},
        {"rotation": "hadamard"},
        {"dynamic": []},
        {"dynamic": {"+:(": {}}},
        {"dynamic": {"a{99999999999999999999}": {}}},
        pytest.param({"dynamic": {"(" * 5000 + ")" * 5000: {}}}, id="5000 parentheses"),
        {"dynamic": {"+:m": 3}},
        {"dynamic": {"+:m": {"bits": 7}}},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, object]) -> None:
    tensors, _ = layer(32, 64, 4, 32)
    with pytest.raises(CheckpointError):
        read(gptq.Reader({**config(4, 32), **change}, torch.float16), tensors)


def damaged() -> list[tuple[str, object]]:
    return [
        ("m.qweight", torch.zeros(8, 32, dtype=torch.int64)),
        ("m.qweight", torch.zeros(7, 32, dtype=torch.int32)),
        ("m.qweight", torch.zeros(8, dtype=torch.int32)),
        ("m.qweight", torch.zeros(0, 0, dtype=torch.int32)),
        ("m.qzeros", torch.zeros(2, 3, dtype=torch.int32)),
        ("m.qzeros", torch.zeros(3, 4, dtype=torch.int32)),
        ("m.qzeros", torch.zeros(4, dtype=torch.int32)),
        ("m.scales", torch.zeros(2, 31, dtype=torch.float16)),
        ("m.scales", torch.zeros(2, 32, dtype=torch.int32)),
        ("m.scales", torch.zeros(2, dtype=torch.float16)),
        ("m.scales", torch.zeros(1, 2, 32, dtype=torch.float16)),
        ("m.g_idx", torch.zeros(64, dtype=torch.int32)),
        ("m.g_idx", torch.zeros(63, dtype=torch.int32)),
        ("m.g_idx", torch.arange(64).float()),
        ("m.g_idx", torch.arange(64, dtype=torch.int32) // 32 + 1),
        ("m.scales", None),
        ("m.qzeros", None),
        ("m.qweight", None),
    ]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("name", "tensor"), damaged())
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None, symmetric: bool) -> None:
    tensors, _ = layer(32, 64, 4, 32, symmetric=symmetric)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError):
        read(gptq.Reader(config(4, 32, sym=symmetric), torch.float16), tensors)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_zero_points_that_symmetric_weights_do_not_need_are_as_many_as_scales(groups: int) -> None:
    tensors, _ = layer(32, 64, 4, 32, symmetric=True)
    tensors["m.qzeros"] = tensors["m.qzeros"][:1].repeat(groups, 1)
    with pytest.raises(CheckpointError, match=rf"m\.qzeros must be .* \[2, 4\], not .* \[{groups}, 4\]"):
        read(gptq.Reader(config(4, 32, sym=True), torch.float16), tensors)


def test_an_order_that_is_not_there_is_an_error() -> None:
    """Read in stored order, the columns would get the scales of others."""
    tensors, value = layer(32, 64, 4, 32, shuffled=True)
    order = tensors.pop("m.g_idx")
    with pytest.raises(CheckpointError, match="without g_idx, and quantization_config says desc_act"):
        read(gptq.Reader(config(4, 32, desc_act=True), torch.float16), tensors)
    q = only(gptq.Reader(config(4, 32, desc_act=True), torch.float16), {**tensors, "m.g_idx": order})
    assert_numbers(q, value)


def test_one_group_for_a_row_has_no_order_and_no_second_group() -> None:
    tensors, value = layer(32, 64, 4, 64)
    del tensors["m.g_idx"]
    q = only(gptq.Reader(config(4, -1, desc_act=True), torch.float16), tensors)
    assert_numbers(q, value)
    tensors["m.g_idx"] = torch.arange(64, dtype=torch.int32) // 32
    with pytest.raises(CheckpointError, match="does not give each group 64 columns"):
        read(gptq.Reader(config(4, -1, desc_act=True), torch.float16), tensors)


def test_an_embedding_is_refused() -> None:
    """GPTQModel stores it with groups along the tokens."""
    tensors, _ = layer(32, 64, 4, 32)
    with pytest.raises(CheckpointError, match="is an embedding"):
        read(
            gptq.Reader(config(4, 32), torch.float16),
            {name.replace("m.", "model.embed_tokens."): tensor for name, tensor in tensors.items()},
        )
