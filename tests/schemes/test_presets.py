"""Scheme names: the table of presets, the grammar of suffixes, and name_of as its inverse."""

from __future__ import annotations

import itertools

import pytest

from bitport.errors import SchemeError
from bitport.numerics import STATIC, Format
from bitport.numerics.format import FLOAT8_SCALES
from bitport.schemes import PRESETS, Scheme, preset, presets
from bitport.schemes.presets import name_of

BLOCKS = {
    "": None,
    "-tensor": (0, 0),
    "-channel": (1, 0),
    "-g32": (1, 32),
    "-g100": (1, 100),
    "-b8x16": (8, 16),
    "-b1x7": (1, 7),
}
ZEROS = {"": None, "-sym": "none", "-asym": "int", "-fzero": "float"}
INPUTS = ("", "-wo", "-static")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_own_name(name: str) -> None:
    assert preset(name) is PRESETS[name]
    assert PRESETS[name].name == str(PRESETS[name]) == name


def test_a_name_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report asks for that of every weight, and all presets are tried for it."""
    first, again = preset("int4-g96-sym"), preset("int4-g96-sym")
    assert first.name == "int4-g96-sym"
    monkeypatch.setattr(presets, "preset", None)
    assert again.name == "int4-g96-sym"


def test_every_scheme_of_the_mission_has_a_name() -> None:
    """(weight, input) of every row of the XPU plan and the XLA page."""
    have = {(s.weight.dtype, s.act, s.static) for s in PRESETS.values()}
    assert {
        ("float8_e4m3", "fp8-tensor", False),
        ("float8_e4m3", "fp8", False),
        ("float8_e4m3", "fp8-128", False),
        ("int4", "", False),
        ("int8", "", False),
        ("int8", "int8", False),
        ("int8", "int8-tensor", True),
        ("float8_e4m3", "mxfp8", False),
        ("float4_e2m1", "mxfp4", False),
        ("float4_e2m1", "nvfp4", False),
        ("int4", "int8", False),
        ("int4", "fp8", False),
    } <= have


@pytest.mark.parametrize("base", PRESETS)
def test_suffixes_mean_what_they_say_and_names_come_back(base: str) -> None:
    understood = 0
    for (block, shape), (zero, kind), end in itertools.product(BLOCKS.items(), ZEROS.items(), INPUTS):
        name = base + block + zero + end
        if name == "int8-static" != base:  # a preset of its own
            continue
        try:
            scheme = preset(name)
        except SchemeError:
            continue
        understood += 1
        if shape is not None:
            assert scheme.weight.block == shape
        if kind is not None:
            assert scheme.weight.zero == kind
        if end == "-wo":
            assert (scheme.act, scheme.static) == ("", False)
        if end == "-static":
            assert (scheme.act, scheme.static) == (PRESETS[base].act, True)
        assert preset(name_of(scheme)) == scheme
    weight = PRESETS[base].weight
    zeros = 4 if weight.number.kind == "int" and weight.scale not in FLOAT8_SCALES else 2  # no suffix and -sym fit all
    ends = 3 if PRESETS[base].act in STATIC else 2
    assert understood == len(BLOCKS) * zeros * ends


@pytest.mark.parametrize("order", list(itertools.permutations(("-g32", "-sym", "-wo"))), ids="".join)
def test_the_order_of_suffixes_does_not_matter(order: tuple[str, ...]) -> None:
    assert preset("int4-int8" + "".join(order)) == preset("int4-g32-sym")


def test_the_longest_preset_that_fits_is_meant() -> None:
    assert preset("int8-dyn-g32").act == "int8"
    assert preset("fp8-row-tensor").weight.block == (0, 0)
    assert preset("fp8-tensor").act == "fp8-tensor"
    assert preset("fp8-wo") is PRESETS["fp8-wo"]
    assert preset("fp8-row-wo") == PRESETS["fp8-wo"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("", "unknown scheme ''; presets: .*int4", id="empty"),
        pytest.param("int9", "unknown scheme 'int9'", id="no-such-type"),
        pytest.param("INT4", "unknown scheme 'INT4'", id="capitals"),
        pytest.param("int4g32", "unknown scheme 'int4g32'.*after a dash: g<N>,", id="no-dash"),
        pytest.param("int4-", "unknown suffix ''; allowed: g<N>", id="dash-at-the-end"),
        pytest.param("int4--sym", "unknown suffix ''", id="two-dashes"),
        pytest.param("int4-g0", "unknown suffix 'g0'", id="group-of-none"),
        pytest.param("int4-g-32", "unknown suffix 'g'", id="group-negative"),
        pytest.param("int4-g032", "unknown suffix 'g032'", id="group-with-a-zero"),
        pytest.param("int4-g4294967296", "whole numbers >= 0 and < 2.31", id="group-too-long"),
        pytest.param("int4-g" + "9" * 5000, "unknown suffix 'g999", id="group-of-5000-digits"),
        pytest.param("int4-b8", "unknown suffix 'b8'", id="block-of-one-number"),
        pytest.param("int4-b0x8", "unknown suffix 'b0x8'", id="block-of-no-rows"),
        pytest.param("int4-nope", r"unknown suffix 'nope'; allowed: .*channel.*sym.*wo", id="no-such-suffix"),
        pytest.param("int4-g32-foo", "unknown suffix 'foo'; allowed: g<N>", id="no-such-suffix-after-a-block"),
        pytest.param("int4-g32-", "unknown suffix ''", id="dash-at-the-end-after-a-block"),
        pytest.param("int8-g32-dyn", "unknown suffix 'dyn'.*int8-dyn is a preset", id="preset-as-a-suffix"),
        pytest.param("nf4-asym", "nf4-asym.*only integer types have a zero point", id="zero-of-a-table"),
        pytest.param("mxfp4-fzero", "only integer types have a zero point", id="zero-of-a-float"),
        pytest.param(" int4", "unknown scheme", id="space"),
    ],
)
def test_what_is_no_name(name: str, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        preset(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INT4", "'int4'"),
        ("int4 ", "'int4'"),
        ("int4_g32", "'int4-g32'"),
        ("int4-G32_sym", "'int4-g32-sym'"),
        ("fp4", "'nvfp4' or 'mxfp4' or 'nf4'"),
        ("int4g32", "'int4' or 'int3' or 'int2'"),
    ],
)
def test_a_name_that_is_almost_right_is_recognized(name: str, meant: str) -> None:
    with pytest.raises(SchemeError) as caught:
        preset(name)
    assert f" (did you mean {meant}?); " in str(caught.value)


@pytest.mark.parametrize("name", ["w4a17", "q4_k_x", "int4-g32-foo", "INT4-foo", "Int4_nf4x", "x" * 10**6])
def test_nothing_is_suggested_where_nothing_is_near(name: str) -> None:
    with pytest.raises(SchemeError) as caught:
        preset(name)
    assert "did you mean" not in str(caught.value)
    if "int4" not in name.lower()[:5]:
        assert "docs/choosing.md has the names of other libraries" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("w4a16", "W4A16 of llm-compressor is 'int4-sym' here, with the algorithm gptq or awq"),
        ("q4_0", "Q4_0 of llama.cpp is 'int4-g32-sym' here"),
        ("AWQ", "awq of AutoAWQ is 'int4' here, with the algorithm awq"),
        ("fp8-dynamic", "FP8_DYNAMIC of llm-compressor is 'fp8-row' here"),
    ],
)
def test_a_name_of_another_library_is_recognized(name: str, meant: str) -> None:
    with pytest.raises(SchemeError) as caught:
        preset(name)
    assert f" ({meant}); " in str(caught.value)


def test_a_configuration_of_another_library_is_recognized() -> None:
    config = type("Int8WeightOnlyConfig", (), {})()
    with pytest.raises(SchemeError, match="Int8WeightOnlyConfig of torchao is 'int8' here"):
        preset(config)


@pytest.mark.parametrize("name", ["int4-g32-g64", "int4-sym-asym", "int8-wo-wo", "int4-channel-g32"])
def test_a_suffix_is_not_said_twice(name: str) -> None:
    with pytest.raises(SchemeError, match="is given twice"):
        preset(name)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(Scheme(weight=Format(dtype="int4", block=(1, 32), scale="float16")), id="scale-of-no-preset"),
        pytest.param(Scheme(weight=Format(dtype="int1")), id="type-of-no-preset"),
        pytest.param(
            Scheme(weight=Format(dtype="int4", block=(1, 32), zero="int", scale="input"), act="mxfp4"),
            id="input-of-no-preset",
        ),
        pytest.param(Scheme(weight=Format(dtype="int4", block=(0, 8), scale="input")), id="block-of-no-suffix"),
    ],
)
def test_what_has_no_name_is_custom(scheme: Scheme) -> None:
    assert scheme.name == "custom"
    assert str(scheme).startswith(f"custom({scheme.weight.dtype}-")


def test_what_has_no_name_is_told_in_words() -> None:
    weight = Format(dtype="float8_e4m3")
    assert str(Scheme(weight=weight, act="int8-tensor", static=True)) == (
        "custom(float8_e4m3-channel, float32 scales, static int8-tensor inputs)"
    )
    weight = Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True)
    assert str(Scheme(weight=weight, act="fp8")) == "custom(float4_e2m1-g16, e4m3 scales, global scale, fp8 inputs)"
    assert str(Scheme(weight=Format(dtype="int1", zero="int", scale="input"))) == "custom(int1-channel-asym)"
