"""What torch.load may hand over, also with weights_only=True: any values in any place of what was saved."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from bitport.errors import ArgumentError, BitportError
from bitport.tensor import QTensor, quantize_tensor
from bitport.tensor.pickling import DESCRIPTION, reduced
from bitport.tensor.qtensor import rebuild


def saved(scheme: str = "int4-g32") -> dict[str, Any]:
    torch.manual_seed(0)
    q = quantize_tensor(torch.randn(64, 128), scheme)
    return dict(zip(DESCRIPTION, reduced(q, parameter=False)[1], strict=True))


OTHERS: dict[str, tuple[Any, ...]] = {
    "tensors": (None, [], {}, {"qdata": torch.ones(3)}),
    "scheme": (None, b"int4", "int4", "{}", "[" * 10**5),
    "bits_layout": (None, {}, "", "other"),
    "shape": (None, 64, (), (64,), (64, "128"), (64, 128.0), (-64, 128), (64, True), (2**40, 2**40), (128, 64)),
    "dtype": (None, "float32", torch.int8, torch.ones(3)),
    "transposed": (None, 1, torch.ones(3)),
    "parameter": (None, "", torch.ones(3)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("scheme", ["int4-g32", "nvfp4", "fp8-row"])
def test_other_values(name: str, scheme: str) -> None:
    for other in OTHERS[name]:
        with pytest.raises(BitportError):
            rebuild(*{**saved(scheme), name: other}.values())


def test_more_and_fewer_values() -> None:
    for values in ((), tuple(saved().values())[:-1], (*saved().values(), 1)):
        with pytest.raises(ArgumentError, match="is made of tensors, scheme, "):
            rebuild(*values)


KINDS = {
    "no tensor": lambda part: "x",
    "sparse": lambda part: part.to_sparse(),
    "nested": lambda part: torch.nested.nested_tensor([part.float()[0], part.float()[0, :1]]),
    "PyTorch's quantized": lambda part: torch.quantize_per_tensor(part.float(), 1.0, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["qdata", "scale", "scale2"])
def test_parts_that_are_not_dense(part: str, kind: str) -> None:
    """A sparse scale was accepted, and failed in a kernel."""
    values = saved("nvfp4")
    values["tensors"] = {**values["tensors"], part: KINDS[kind](values["tensors"][part])}
    with pytest.raises(ArgumentError, match=f"{part} must be a (dense )?tensor, not a"):
        rebuild(*values.values())


def test_an_unknown_part() -> None:
    values = saved()
    values["tensors"] = {**values["tensors"], "bias": torch.ones(64)}
    with pytest.raises(ArgumentError, match="has the part 'bias'; known are qdata, scale"):
        rebuild(*values.values())


def test_whole() -> None:
    q = quantize_tensor(torch.randn(64, 128), "nvfp4")
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert isinstance(found, QTensor)
    assert torch.equal(found.dequantize(), q.dequantize())
