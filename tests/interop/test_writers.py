"""What all writers have in common."""

from __future__ import annotations

import pytest

from bitport.interop import awq, bitsandbytes, float8, gptq, hqq, quanto, torchao
from bitport.interop.codec import Writer

from .files import described

LINEAR: dict[type[Writer], str] = {
    awq.Writer: "int4",
    bitsandbytes.Writer: "nf4",
    float8.Writer: "fp8-block",
    gptq.Writer: "int4",
    hqq.Writer: "int4",
    quanto.Writer: "int8",
    torchao.Writer: "int4",
}
"""Writer that takes linear layers alone -> a scheme that it takes."""
ONE_SCHEME: dict[type[Writer], tuple[str, str]] = {
    awq.Writer: ("int4-g32", "int4-g64"),
    bitsandbytes.Writer: ("nf4", "int8"),
    gptq.Writer: ("int4-g32", "int8-g32"),
    hqq.Writer: ("int4-g32-fzero", "int8-g32"),
    torchao.Writer: ("int4-g32", "int8"),
}
"""Writer -> two schemes that it takes, one at a time."""


@pytest.mark.parametrize("writer", LINEAR, ids=lambda writer: writer.name)
def test_linear_layers_alone_are_taken(writer: type[Writer]) -> None:
    scheme = LINEAR[writer]
    assert writer().refuses(described(scheme)) is None
    for changes, reason in (
        ({"kind": "embedding"}, "'embedding'"),
        ({"kind": "experts", "shape": (4, 64, 128)}, "'experts'"),
        ({"transposed": True}, "'linear'"),
    ):
        assert reason in str(writer().refuses(described(scheme, **changes)))


@pytest.mark.parametrize("writer", LINEAR, ids=lambda writer: writer.name)
def test_a_weight_without_a_module_is_refused(writer: type[Writer]) -> None:
    """Its other tensors would be named after the weight: weight.qweight, which is that of a module called weight."""
    assert "alone" in str(writer().refuses(described(LINEAR[writer], name="weight")))


@pytest.mark.parametrize("writer", LINEAR, ids=lambda writer: writer.name)
@pytest.mark.parametrize("part", ["perm", "pre_scale"])
def test_what_a_format_has_no_place_for_is_refused(writer: type[Writer], part: str) -> None:
    refused = str(writer().refuses(described(LINEAR[writer], more=(part,))))
    assert (refused == "None") if (writer, part) == (gptq.Writer, "perm") else (part in refused)


@pytest.mark.parametrize("writer", ONE_SCHEME, ids=lambda writer: writer.name)
def test_a_weight_that_is_refused_does_not_decide_for_the_others(writer: type[Writer]) -> None:
    one, other = ONE_SCHEME[writer]
    made = writer()
    assert "embedding" in str(made.refuses(described(other, kind="embedding")))
    assert made.refuses(described(one)) is None
    assert made.refuses(described(one)) is None
    assert " one " in str(made.refuses(described(other)))
    assert writer().refuses(described(other)) is None
