"""GPTQ files against GPTQModel's own packing and reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport
from bitport.interop import gptq

from .files import only

pytestmark = pytest.mark.peers
kernels = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="needs GPTQModel: pip install gptqmodel")
model = pytest.importorskip("gptqmodel.utils.model")
formats = pytest.importorskip("gptqmodel.quantization.config").FORMAT

N, K, GROUP = 64, 128, 32
NAMES = ("qweight", "qzeros", "scales", "g_idx")


def empty(bits: int, *, symmetric: bool, shuffled: bool, planar: bool = False) -> Any:
    settings = {"format": formats.GPTQ_P} if planar else {}
    settings |= {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": shuffled}
    return kernels.TorchLinear(**settings, in_features=K, out_features=N, bias=False).eval()


def packed(bits: int, *, symmetric: bool, shuffled: bool, planar: bool = False) -> Any:
    """A GPTQModel layer with random numbers, each a code times a scale."""
    draw = torch.Generator().manual_seed(bits)
    midpoint = 1 << (bits - 1)
    zeros = torch.full((N, K // GROUP), midpoint)
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, zeros.shape, generator=draw)
    scales = (0.01 + torch.rand(zeros.shape, generator=draw)).half().float()
    group_of = torch.arange(K, dtype=torch.int32) // GROUP
    if shuffled:
        group_of = group_of[torch.randperm(K, generator=draw)]
    codes = torch.randint(1 << bits, (N, K), generator=draw)
    linear = nn.Linear(K, N, bias=False)
    linear.weight.data = (codes - zeros[:, group_of.long()]) * scales[:, group_of.long()]
    layer = empty(bits, symmetric=symmetric, shuffled=shuffled, planar=planar)
    layer.pack_original(linear, scales, zeros.float(), group_of)
    return layer


def tensors(layer: Any) -> dict[str, Tensor]:
    return {f"m.{name}": getattr(layer, name).clone() for name in NAMES}


@pytest.mark.parametrize(("kind", "bits"), [(kind, bits) for kind, form in gptq.FORMS.items() for bits in form.bits])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
def test_their_files(bits: int, symmetric: bool, shuffled: bool, kind: str) -> None:
    layer = packed(bits, symmetric=symmetric, shuffled=shuffled, planar=gptq.FORMS[kind].planar)
    value = layer.dequantize_weight().T
    if kind == "gptq":
        layer = model.convert_gptq_v2_to_v1_format_module(layer, quantize_config=_settings(bits, symmetric)) or layer
    said = {"bits": bits, "group_size": GROUP, "sym": symmetric, "checkpoint_format": kind}
    q = only(gptq.Reader(said, torch.float16), tensors(layer))
    assert torch.equal(q.dequantize(torch.float16), value)


def _settings(bits: int, symmetric: bool) -> Any:
    config = pytest.importorskip("gptqmodel.quantization.config")
    return config.QuantizeConfig(bits=bits, group_size=GROUP, sym=symmetric)


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g32-sym", "int8-g32-asym", "int3-g32", "int2-g32-sym"])
def test_our_files(scheme: str) -> None:
    value = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    q = bitport.quantize_tensor(value.half(), scheme).to_layout("plain")
    written = gptq.WriterV2().write("m.weight", q)
    layer = empty(q.scheme.weight.number.bits, symmetric=q.zero is None, shuffled=False)
    for name in NAMES:
        mine = written[f"m.{name}"]
        assert getattr(layer, name).shape == mine.shape
        assert getattr(layer, name).dtype == mine.dtype
        layer.register_buffer(name, mine)
    assert torch.equal(layer.dequantize_weight().T, q.dequantize(torch.float16))
