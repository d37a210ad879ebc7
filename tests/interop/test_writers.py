"""What all writers have in common."""

from __future__ import annotations

import pytest
import torch

from bitport import quantize_tensor
from bitport.errors import ArgumentError
from bitport.interop import READERS, WRITERS, awq, bitsandbytes, float8, gptq, hqq, quanto, torchao
from bitport.interop.codec import Writer
from bitport.schemes import PRESETS

from .files import described, only

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


SCHEMES = [name for name, scheme in PRESETS.items() if not scheme.static]
SCHEMES += ["int4-g32", "int4-g32-sym", "int4-sym", "int4-g64-fzero", "int8-g32", "mxfp8-wo", "mxfp4-wo", "nvfp4-wo"]
OTHERS = ("float", "mxfp4", "quanto")
"""Writers of floats, of experts alone, and of settings in a file of their own."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in WRITERS if name not in OTHERS])
def test_what_is_written_is_read_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Every scheme that the writer takes, unless it says that its numbers do not fit or what they lost."""
    taken = []
    for scheme in SCHEMES:
        q = quantize_tensor(torch.randn(128, 256, dtype=dtype), scheme).to_layout("plain")
        writer, parts = WRITERS[name](), [part for part in ("zero", "scale2") if getattr(q, part) is not None]
        if writer.refuses(described(scheme, (128, 256), more=parts)) is not None:
            continue
        try:
            tensors = writer.write("m.weight", q)
        except ArgumentError:
            continue
        config = writer.config([])
        assert config is not None
        taken.append(scheme)
        if writer.notes:
            continue
        reader = READERS[config.get("quant_method", name)](config, dtype)
        reader.metadata = writer.metadata([])
        back = only(reader, tensors)
        assert torch.equal(back.dequantize(torch.float32), q.dequantize(torch.float32)), scheme
    assert taken or dtype == torch.float32  # some keep scales in float16
