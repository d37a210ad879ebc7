"""Algorithms give the same numbers whatever the default dtype and device of torch are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import bitport
from bitport.algorithms.solving import uses_data

CPU = {"dtype": torch.float32, "device": "cpu"}


def batches() -> list[Tensor]:
    return [torch.randn(40, 96, generator=torch.Generator().manual_seed(1), **CPU)]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64, **CPU), nn.LayerNorm(64, **CPU), nn.Linear(64, 64, **CPU)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, **CPU))
    return model


def values(scheme: object, **options: object) -> list[Tensor]:
    model = model_of()
    data = batches() if uses_data(options.get("algorithm", "rtn"), scheme) else None
    bitport.quantize_(model, scheme, calibrate=data, **options)
    return [model(batches()[0]), *(q.dequantize() for q in model.parameters() if isinstance(q, bitport.QTensor))]


def by(algorithm: str) -> Callable[[], list[Tensor]]:
    return lambda: values("int3-g32", algorithm=algorithm)


MADE: dict[str, Callable[[], list[Tensor]]] = {
    "gptq": by("gptq"),
    "signround": by("signround"),
    "smooth": by("smooth"),
    "awq+gptq": by("awq+gptq"),
    "rotate": by("rotate"),
    "static": lambda: values("int8-static"),
    "mixed": lambda: values(bitport.mixed(model_of(), ("int2", "int4", "int8"), bits=5, calibrate=batches())),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16, "meta"], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """A function that sets the default; ``meta`` stands for any device that the model is not on."""
    by_dtype = isinstance(request.param, torch.dtype)
    yield lambda: (torch.set_default_dtype if by_dtype else torch.set_default_device)(request.param)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("how", MADE)
def test_a_default_does_not_matter(how: str, default: Callable[[], None]) -> None:
    """Without care, all but "static" and "mixed" fail under another dtype, and all but "gptq" and "signround" under
    another device."""
    wanted = MADE[how]()
    default()
    for mine, theirs in zip(MADE[how](), wanted, strict=True):
        assert torch.equal(mine, theirs)
