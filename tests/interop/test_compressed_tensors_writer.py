"""What is written is read back unchanged, and what the format cannot represent is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from bitport.errors import ArgumentError
from bitport.interop.codec import Described
from bitport.interop.compressed_tensors import Reader, Writer
from bitport.numerics import Format, Quantized
from bitport.schemes import Scheme, preset
from bitport.tensor import from_parts

from .compressed_tensors_files import (
    SCHEMES,
    assert_same,
    plain,
    single,
    written,
)
from .files import read


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_written_and_read_again(name: str, dtype: torch.dtype) -> None:
    q = plain(SCHEMES[name], dtype=dtype)
    said, tensors = written({"m.weight": q}, ["lm_head"])
    assert said["ignore"] == ["lm_head"]
    assert said["format"] != "mixed-precision"
    assert_same(single(said, tensors, dtype), q)


def test_nvfp4_written_and_read_again() -> None:
    """Some values of scale2 are not reciprocals: they are read back as a neighbouring number."""
    q = plain("nvfp4-wo")
    assert q.scale2 is not None
    exact = 0
    for at in range(100):
        made = q.replace(Quantized(q.qdata, q.scale, None, q.scale2 * (1 + at / 100)))
        said, tensors = written({"m.weight": made}, [])
        again = single(said, tensors)
        assert_same(again, made, but=("scale2",))
        assert again.scale2 is not None
        assert made.scale2 is not None
        np.testing.assert_allclose(again.scale2.numpy(), made.scale2.numpy(), rtol=2**-23)
        exact += int(torch.equal(again.scale2, made.scale2))
        third = single(*written({"m.weight": again}, []))
        assert_same(third, again)
    assert exact > 60


def test_nvfp4_inputs_written_and_read_again() -> None:
    q = plain("nvfp4-static")
    q.act_scale = torch.full((1, 1), 0.25)
    said, tensors = written({"m.weight": q}, [])
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert tensors["m.input_global_scale"].tolist() == [4.0]
    again = single(said, tensors)
    assert again.scheme.name == "nvfp4-static"
    assert again.act_scale is not None
    assert again.act_scale.tolist() == [0.25]


def test_several_schemes_are_several_groups() -> None:
    weights = {
        "a.weight": plain("int4"),
        "b.weight": plain("fp8-row"),
        "c.weight": plain("int4", 32),
        "d.weight": plain("int8"),
        "embed_tokens.weight": plain("int4"),
    }
    said, tensors = written(weights, ["lm_head"])
    assert said["format"] == "mixed-precision"
    assert [group["targets"] for group in said["config_groups"].values()] == [["a", "c", "embed_tokens"], ["b"], ["d"]]
    again = read(Reader(said, torch.bfloat16), tensors)
    assert again.keys() == weights.keys()
    for name, q in again.items():
        assert_same(q, weights[name])


def test_one_scheme_for_all_is_for_every_linear_layer() -> None:
    said, _ = written({"a.weight": plain("int4"), "b.weight": plain("int4")}, [])
    assert said["config_groups"]["group_0"]["targets"] == ["Linear"]
    said, _ = written({"a.weight": plain("int4"), "embed_tokens.weight": plain("int4")}, [])
    assert said["config_groups"]["group_0"]["targets"] == ["a", "embed_tokens"]


def described(scheme: Scheme | str = "int4", **changes: Any) -> Described:
    scheme = preset(scheme) if isinstance(scheme, str) else scheme
    made = Described("m.weight", scheme, (64, 256), "linear", False, frozenset({"qdata", "scale"}))
    return dataclasses.replace(made, **changes)


def parts(*more: str) -> dict[str, Any]:
    return {"parts": frozenset({"qdata", "scale", *more})}


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (described("nf4"), "none of its formats"),
        (described("fp8-e5m2-wo"), "none of its formats"),
        (described("int4-fzero"), "none of its formats"),
        (described(Scheme(weight=Format(dtype="float4_e2m1", block=(1, 32)))), "none of its formats"),
        (described(Scheme(weight=Format(dtype="float6_e3m2", block=(1, 32), scale="e8m0"))), "none of its formats"),
        (described(Scheme(weight=Format(dtype="int8", block=(16, 0)))), "none of its formats"),
        (described(Scheme(weight=Format(dtype="int8", block=(0, 16)))), "none of its formats"),
        (described(Scheme(weight=Format(dtype="int4", block=(1, 32), scale="e8m0"))), "none of its formats"),
        (described(Scheme(weight=Format(dtype="int1", block=(1, 32)))), "none of its formats"),
        (described("nvfp4"), "nvfp4-static"),
        (described("nvfp4-static"), "act_scale"),
        (described("int8-static"), "act_scale"),
        (described("int8-dyn", **parts("act_scale")), "act_scale"),
        (described(**parts("perm")), "act-order"),
        (described(**parts("pre_scale")), "pre_scale"),
        (described(shape=(64, 250)), "250 columns are no multiple of 128"),
        (described(shape=(4, 64, 256), kind="experts"), "experts"),
        (described(shape=(64, 4, 64), kind="conv"), "conv"),
        (described(transposed=True), "linear"),
        (described(name="in_proj_weight", kind="attention"), "attention"),
    ],
)
def test_refused(q: Described, reason: str) -> None:
    assert reason in (Writer().refuses(q) or "")


def test_a_zero_point_that_does_not_fit() -> None:
    q = plain("int4-g32")
    assert q.zero is not None
    q.zero[3, 2] = 16
    with pytest.raises(ArgumentError, match="zero point 16; 4 bits hold 15"):
        Writer().write("m.weight", q)


def test_a_global_scale_without_reciprocal() -> None:
    q = plain("nvfp4-wo")
    with pytest.raises(ArgumentError, match="no reciprocal"):
        Writer().write("m.weight", q.replace(Quantized(q.qdata, q.scale, None, torch.full((1, 1), 1e-45))))


def test_a_written_layer_is_what_was_written() -> None:
    """The exact bytes, computed by hand: two rows of four 4-bit codes."""
    fmt = Format(dtype="int4", block=(1, 4), zero="int", scale="input")
    data = torch.tensor([[0x10, 0x32], [0xFE, 0xDC]], dtype=torch.uint8)
    zero = torch.tensor([[5], [9]], dtype=torch.uint8)
    scale = torch.tensor([[0.5], [2.0]], dtype=torch.bfloat16)
    q = from_parts(Quantized(data, scale, zero), Scheme(weight=fmt), shape=(2, 4), dtype=torch.bfloat16)
    tensors = Writer().write("m.weight", q)
    assert tensors["m.weight_packed"].tolist() == [[0x3210], [0xDCFE]]
    assert tensors["m.weight_zero_point"].tolist() == [[0x95]]
    assert tensors["m.weight_shape"].tolist() == [2, 4]
    assert tensors["m.weight_scale"] is scale
