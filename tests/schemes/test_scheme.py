"""A scheme as data: JSON round trip, and nothing else is accepted as a scheme."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitport.errors import SchemeError
from bitport.numerics import ACTIVATIONS, NUMBER_TYPES, Format
from bitport.numerics.format import SCALE_DTYPES
from bitport.schemes import PRESETS, Scheme, preset

NAMES = [*PRESETS, "int4-g32-fzero", "int3-channel", "int8-tensor-asym", "fp8-b64x32", "nvfp4-wo"]


@pytest.mark.parametrize("name", NAMES)
def test_json_both_ways(name: str) -> None:
    scheme = preset(name)
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert Scheme.from_dict(json.loads(scheme.to_json())) == scheme
    assert json.loads(scheme.to_json()) == scheme.to_dict()


def test_json_holds_every_field() -> None:
    """A field that is not written would be missing from checkpoints."""
    data = preset("int4").to_dict()
    assert set(data) == {field.name for field in dataclasses.fields(Scheme)} | {"version"}
    assert set(data["weight"]) == {field.name for field in dataclasses.fields(Format)}


def test_what_may_be_left_out_is_the_default() -> None:
    assert Scheme.from_dict({"version": 1, "weight": {"dtype": "int8", "block": [1, 0]}}) == Scheme(
        weight=Format(dtype="int8")
    )


def test_schemes_can_be_keys() -> None:
    assert len({preset("int4"), preset("int4"), preset("int8")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("int4").act = "int8"  # type: ignore[misc]


def changed(**changes: Any) -> dict[str, Any]:
    return {**preset("int4").to_dict(), **changes}


def weight(**changes: Any) -> dict[str, Any]:
    return changed(weight={**preset("int4").to_dict()["weight"], **changes})


NEWER = "the scheme has version 2, of a later bitport; this one reads versions up to 1: upgrade bitport"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(changed(version=2), NEWER, id="newer-version"),
        pytest.param(changed(version=2, more=1), NEWER, id="newer-version-with-another-key"),
        pytest.param(changed(version=0), "version 0: 'version' must be a whole number from 1", id="version-0"),
        pytest.param(changed(version=1.0), "version 1.0", id="version-as-a-fraction"),
        pytest.param(changed(version="1"), "version '1'", id="version-as-text"),
        pytest.param(changed(version=None), "version None", id="no-version"),
        pytest.param(changed(version=True), "version True", id="version-as-a-truth"),
        pytest.param(changed(more=1), r"unknown keys \['more'\]; known: ", id="unknown-key"),
        pytest.param(weight(more=1), r"scheme weight: unknown keys \['more'\]", id="unknown-weight-key"),
        pytest.param({"version": 1}, r"missing keys \['weight'\]", id="no-weight"),
        pytest.param({"version": 1, "weight": {"dtype": "int4"}}, r"missing keys \['block'\]", id="no-block"),
        pytest.param(changed(weight=[]), "is an object .*, not list", id="weight-as-a-list"),
        pytest.param([], "is an object .*, not list", id="list"),
        pytest.param(None, "not NoneType", id="nothing"),
        pytest.param("int4", "not str", id="text"),
        pytest.param(weight(dtype="int9"), "int9", id="no-such-type"),
        pytest.param(weight(dtype=4), "dtype must be a str, not 4", id="type-as-a-number"),
        pytest.param(weight(dtype=["int4"]), "dtype must be a str", id="type-as-a-list"),
        pytest.param(weight(dtype="float8_e8m0", zero="none"), "type for scales", id="type-for-scales"),
        pytest.param(weight(block=[1]), "two integers", id="block-of-one"),
        pytest.param(weight(block=[1, 2.0]), "two integers", id="block-of-a-float"),
        pytest.param(weight(block=[True, 32]), "two integers", id="block-of-a-truth"),
        pytest.param(weight(block="ab"), "two integers", id="block-as-text"),
        pytest.param(weight(block=[1, -1]), "must be .rows, columns.|whole numbers", id="block-negative"),
        pytest.param(weight(zero="maybe"), "zero='maybe'", id="no-such-zero"),
        pytest.param(weight(zero=None), "zero must be a str, not None", id="zero-as-nothing"),
        pytest.param(weight(scale="float8"), "scale='float8'", id="no-such-scale"),
        pytest.param(weight(scale=["float32"]), "scale", id="scale-as-a-list"),
        pytest.param(weight(scale_rule="up"), "scale_rule='up'", id="no-such-rule"),
        pytest.param(weight(global_scale="yes"), "global_scale", id="global-scale-as-text"),
        pytest.param(weight(global_scale=True), "e4m3", id="global-scale-of-an-integer"),
        pytest.param(changed(act="int9"), "unknown activation 'int9'; known: int8", id="no-such-input"),
        pytest.param(changed(act=None), "act", id="input-as-nothing"),
        pytest.param(changed(act=["int8"]), "act", id="input-as-a-list"),
        pytest.param(
            changed(static=True), "static is for activations with a scale for all", id="static-without-an-input"
        ),
        pytest.param(
            changed(act="int8", static=True),
            r"\(int8-tensor, fp8-tensor, fp8-e5m2-tensor, nvfp4\), not 'int8'",
            id="static-per-token",
        ),
        pytest.param(changed(static=0), "static must be a bool", id="static-as-a-number"),
    ],
)
def test_what_is_no_scheme(data: Any, message: str) -> None:
    with pytest.raises(SchemeError, match=message):
        Scheme.from_dict(data)
    with pytest.raises(SchemeError, match=message):
        Scheme.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "nope", "NaN", "\x00", '{"version": 1e999}', "[" * 100_000, "9" * 5000])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(SchemeError):
        Scheme.from_json(text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 300)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*NUMBER_TYPES, *ACTIVATIONS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1) | VALUES,
        "act": st.sampled_from(["", *ACTIVATIONS]) | VALUES,
        "static": st.booleans() | VALUES,
        "weight": VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(list(NUMBER_TYPES)) | VALUES,
                "block": st.tuples(st.integers(-1, 64), st.integers(-1, 64)).map(list) | VALUES,
                "zero": st.sampled_from(["none", "int", "float"]) | VALUES,
                "scale": st.sampled_from(list(SCALE_DTYPES)) | VALUES,
                "scale_rule": st.sampled_from(["floor", "ceil", "even", "rceil"]) | VALUES,
                "global_scale": st.booleans() | VALUES,
            },
        ),
    },
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(FIELDS)
def test_anything_is_a_scheme_or_a_scheme_error(data: dict[str, Any]) -> None:
    try:
        scheme = Scheme.from_dict(data)
    except SchemeError:
        return
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert scheme.name == "custom" or preset(scheme.name) == scheme


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(max_size=40))
def test_any_text_is_a_scheme_error(text: str) -> None:
    with pytest.raises(SchemeError):
        Scheme.from_json(text)
