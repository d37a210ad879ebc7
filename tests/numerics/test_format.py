import dataclasses

import pytest
import torch

from bitport.numerics import Format, quantize


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int9"}, "int9"),
        ({"dtype": "float8_e8m0"}, "type for scales"),
        ({"dtype": "int4", "block": (1,)}, "rows, columns"),
        ({"dtype": "int4", "block": [1, 32]}, "rows, columns"),
        ({"dtype": "int4", "block": (1, -1)}, ">= 0"),
        ({"dtype": "int4", "block": (1, 32.0)}, "whole numbers"),
        ({"dtype": "int4", "block": (1, 2**64 + 16)}, r"< 2\^31"),
        ({"dtype": "int4", "zero": "signed"}, "none, int, float"),
        ({"dtype": "nf4", "zero": "int"}, "only integer types"),
        ({"dtype": "int4", "scale": "fp16"}, "float16"),
        ({"dtype": "int4", "zero": "int", "scale": "e8m0"}, "float scale"),
        ({"dtype": "int4", "scale_rule": "ceil"}, "is for scale='e8m0'"),
        ({"dtype": "int4", "scale": "e8m0", "scale_rule": "up"}, "floor, ceil, even, rceil"),
        ({"dtype": "nf4", "scale": "e8m0", "scale_rule": "even"}, "mantissa"),
        ({"dtype": "int1", "scale": "e8m0"}, "block of zeros"),
        ({"dtype": "float4_e2m1", "global_scale": True}, "scale='e4m3'"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_impossible_formats_say_why(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format(**fields)  # type: ignore[arg-type]


def test_a_format_is_a_value() -> None:
    first, second = Format(dtype="int4", block=(1, 32)), Format(dtype="int4", block=(1, 32))
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.dtype = "int8"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Format("int4")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("block", "shape", "block_shape", "scale_shape"),
    [
        ((0, 0), (5, 70), (5, 70), (1, 1)),
        ((1, 0), (5, 70), (1, 70), (5, 1)),
        ((0, 1), (5, 70), (5, 1), (1, 70)),
        ((1, 32), (5, 70), (1, 32), (5, 3)),
        ((2, 64), (5, 70), (2, 64), (3, 2)),
        ((128, 128), (5, 70), (128, 128), (1, 1)),
        ((1, 32), (0, 70), (1, 32), (0, 3)),
        ((1, 0), (5, 0), (1, 1), (5, 1)),
    ],
    ids=str,
)
def test_shapes(
    block: tuple[int, int], shape: tuple[int, int], block_shape: tuple[int, int], scale_shape: tuple[int, int]
) -> None:
    fmt = Format(dtype="int8", block=block)
    assert fmt.block_shape(*shape) == block_shape
    assert fmt.scale_shape(*shape) == scale_shape


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        (Format(dtype="int4", block=(1, 128), scale="input"), 4.125),
        (Format(dtype="int4", block=(1, 128), scale="input", zero="int"), 4.1875),
        (Format(dtype="int4", block=(1, 32), scale="float16", zero="float"), 5),
        (Format(dtype="float4_e2m1", block=(1, 32), scale="e8m0"), 4.25),
        (Format(dtype="float4_e2m1", block=(1, 16), scale="e4m3", global_scale=True), 4.5 + 32 / 256**2),
        (Format(dtype="int3", block=(0, 0)), 3 + 32 / 256**2),
        (Format(dtype="float8_e4m3", block=(128, 128)), 8 + 32 / 128**2),
    ],
    ids=lambda value: value.dtype if isinstance(value, Format) else "",
)
def test_size_is_that_of_the_tensors(fmt: Format, bits: float) -> None:
    assert fmt.bits_per_weight(256, 256) == bits
    for n, k in ((256, 256), (7, 45)):
        parts = [part for part in quantize(torch.zeros(n, k, dtype=torch.bfloat16), fmt) if part is not None]
        assert fmt.nbytes(n, k) == sum(part.numel() * part.element_size() for part in parts)
