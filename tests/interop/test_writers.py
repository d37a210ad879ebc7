"""What all writers have in common."""

from __future__ import annotations

import pytest

from bitport.interop import awq, bitsandbytes, gptq, hqq, torchao
from bitport.interop.codec import Described, Writer
from bitport.schemes import preset

PARTS = frozenset({"qdata", "scale", "zero"})


def described(scheme: str, kind: str = "linear") -> Described:
    return Described(f"{kind}.weight", preset(scheme), (128, 128), kind, False, PARTS)


ONE_SCHEME: dict[type[Writer], tuple[str, str]] = {
    awq.Writer: ("int4-g32", "int4-g64"),
    bitsandbytes.Writer: ("nf4", "int8"),
    gptq.Writer: ("int4-g32", "int8-g32"),
    hqq.Writer: ("int4-g32-fzero", "int8-g32"),
    torchao.Writer: ("int4-g32", "int8"),
}
"""Writer -> two schemes that it takes, one at a time."""


@pytest.mark.parametrize("writer", ONE_SCHEME, ids=lambda writer: writer.name)
def test_a_weight_that_is_refused_does_not_decide_for_the_others(writer: type[Writer]) -> None:
    one, other = ONE_SCHEME[writer]
    made = writer()
    assert "embedding" in str(made.refuses(described(other, "embedding")))
    assert made.refuses(described(one)) is None
    assert made.refuses(described(one)) is None
    assert " one " in str(made.refuses(described(other)))
    assert writer().refuses(described(other)) is None
