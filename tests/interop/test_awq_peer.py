"""Packing and unpacking of AWQ by AutoRound itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bitport
from bitport.interop.awq import Reader, Writer

from .files import only, write

pytestmark = pytest.mark.peers
theirs = pytest.importorskip("auto_round.export.export_to_awq.utils")

CASES = [(64, 256, 128), (32, 96, 32), (128, 128, 64)]


def unpacked(tensors: dict[str, Tensor], group: int) -> Tensor:
    """[N, K] in float32, where a float16 scale times an integer below 32 is exact."""
    parts = (tensors["m.qweight"], tensors["m.qzeros"], tensors["m.scales"].float())
    found: Tensor = theirs.dequantize_gemm(*parts, 4, group)
    return found.t()


@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
@pytest.mark.parametrize(("n", "k", "group"), CASES)
def test_what_autoround_packs_reads_as_it_unpacks_it(n: int, k: int, group: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(n + k)
    layer = torch.nn.Linear(k, n, bias=False)
    scales = torch.rand(k // group, n, generator=generator).half() * 0.1 + 0.001
    zeros = 8 if symmetric else torch.randint(0, 16, (k // group, n), generator=generator).float()
    packed = theirs.WQLinear_GEMM.from_linear(layer, 4, group, scales=scales, zeros=zeros, device="cpu")
    tensors = {f"m.{name}": tensor for name, tensor in packed.state_dict().items()}
    said = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": not symmetric}
    q = only(Reader(said, torch.float16), tensors)
    assert (q.zero is None) == symmetric
    assert torch.equal(q.dequantize(torch.float32), unpacked(tensors, group))


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g64-sym", "int4"])
def test_what_is_written_is_unpacked_by_autoround(scheme: str) -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).half()
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    writer = Writer()
    tensors = write(writer, q)
    group = writer.config([])["group_size"]
    assert torch.equal(unpacked(tensors, group), q.dequantize(torch.float32))
