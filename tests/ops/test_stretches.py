"""Generic kernels multiply by a large weight in stretches of its rows, and by an expert's weight only if it has rows:
in little memory, with the same results."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bitport.ops import OPS, Weight, weight
from bitport.ops.product import operand
from bitport.schemes import preset
from bitport.tensor import quantize_tensor
from tests.scripts import printed

N, K = 150, 96
SCHEMES = ("int4-g32", "int4-g32-sym", "int3-g32", "int8-tensor", "int8-b64x32", "int8-b200x32")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each matrix that F.linear was called with."""
    linear, found = F.linear, []

    def counting(x: Tensor, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append(len(dense))
        return linear(x, dense, bias)

    monkeypatch.setattr(F, "linear", counting)
    return found


def exact(scheme: str, *batch: int) -> Weight:
    """A weight of small whole numbers, so that sums are exact in any order."""
    q = quantize_tensor(torch.randn(*batch, N, K, generator=torch.Generator().manual_seed(1)), preset(scheme))
    return Weight._make(operand(q.to_layout("plain")))._replace(scale=torch.ones_like(q.to_layout("plain").scale))


def whole(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(2)).float()


def largest(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype = torch.float32) -> None:
    monkeypatch.setattr(weight, "LARGEST", rows * K * dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    x, w, bias = whole(5, K).to(dtype), exact(scheme), whole(N)
    wanted = OPS["linear"].generic(x, *w, bias)
    assert multiplied == [N]
    largest(monkeypatch, 70, dtype)
    assert torch.equal(OPS["linear"].generic(x, *w, bias), wanted)
    assert sum(multiplied) == 2 * N
    assert len(multiplied[1:]) == 3
    assert max(multiplied[1:]) <= 70
    assert torch.equal(wanted, (x.double() @ w.dense(torch.float64).T + bias).to(dtype))


@pytest.mark.parametrize("act", ["int8", "mxfp8"])
def test_dyn_linear(act: str, monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    x, w = whole(2, 3, K), exact("int4-g32")
    wanted = OPS["dyn_linear"].generic(x, *w, act, None, None)
    largest(monkeypatch, 40)
    assert torch.allclose(OPS["dyn_linear"].generic(x, *w, act, None, None), wanted, rtol=K * 2**-24, atol=1e-4)
    assert multiplied == [N, 38, 38, 38, 36]


def test_experts(monkeypatch: pytest.MonkeyPatch, multiplied: list[int]) -> None:
    x, w = whole(9, K), exact("int4-g32", 4)
    ends = torch.tensor([3, 3, 7, 7], dtype=torch.int32)
    largest(monkeypatch, 75)
    made = OPS["grouped_linear"].generic(x, ends, *w)
    dense = w.dense(torch.float32)
    assert multiplied == [75] * 4
    assert torch.equal(made, torch.cat([x[:3] @ dense[0].T, x[3:7] @ dense[2].T, torch.zeros(2, N)]))


def test_a_traced_program_multiplies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = exact("int4-g32-sym")
    largest(monkeypatch, 10)

    def generic(x: Tensor, data: Tensor, scale: Tensor) -> Any:
        return OPS["linear"].generic(x, *w._replace(data=data, scale=scale), None)

    code = make_fx(generic, tracing_mode="fake")(whole(2, K), w.data, w.scale).code
    assert code.count("aten.t.default") == 1
    assert "aten.cat" not in code


PEAK = """
import resource, torch
from bitport.ops import OPS, Weight
def weight(n, k):
    data, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // 128, dtype=torch.bfloat16)
    return Weight(data, scale, None, None, "int4", n, k, 1, 128, "plain")
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
x, large = torch.ones(1, 4096, dtype=torch.bfloat16), weight(1 << 15, 4096)
OPS["linear"].generic(x, *weight(1024, 4096), None)
before = peak()
OPS["linear"].generic(x, *large, None)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_the_memory_of_a_large_product_is_that_of_a_stretch() -> None:
    """At most 67 MB for a stretch, and less than half of that to dequantize it; all at once are 268 MB."""
    assert int(printed(PEAK)) < 100e6
