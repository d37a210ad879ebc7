"""Weights quantized and saved by optimum-quanto are read with the values that it computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitport
from bitport.interop import convert, quanto
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import only

pytestmark = pytest.mark.peers
peer = pytest.importorskip("optimum.quanto", reason="needs optimum-quanto: pip install optimum-quanto")

KINDS = ("qint8", "qint4", "qint2", "qfloat8_e4m3fn", "qfloat8_e5m2")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantized(module: torch.nn.Module, weights: str, **more: Any) -> torch.nn.Module:
    model = torch.nn.Sequential(module)
    peer.quantize(model, weights=peer.qtypes[weights], **more)
    peer.freeze(model)
    return model


def exact(weight: Any) -> tuple[Tensor, Tensor]:
    """(value, shift of each number) in float64, from numbers that the library itself unpacks and ungroups."""
    if "TinyGemm" in type(weight).__name__:
        weight = weight.weight_qbits_tensor()
    scale = weight._scale.double()
    if not hasattr(weight, "_shift"):
        return weight._data.to(torch.float64) * scale, torch.zeros(())
    codes, shift = weight._data.unpack().double(), weight._shift.double()
    shift = shift if weight._shift.is_floating_point() else shift * scale
    value = codes * scale - shift
    size = weight.size()
    return value.reshape(size), shift.expand_as(value).reshape(size)


def assert_same(q: QTensor, weight: Any) -> None:
    wanted, shift = exact(weight)
    off = (q.dequantize(torch.float32).double() - wanted).abs()
    assert tuple(q.shape) == tuple(wanted.shape)
    assert bool((off <= 2.0**-24 * (1 + 2**-20) * (shift.abs() + 2 * wanted.abs())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [64, 128, 256, 136, 160])
def test_a_layer(k: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = quantized(torch.nn.Linear(k, 48).to(dtype), kind)
    config = {"quant_method": "quanto", **peer.quantization_map(model)}
    q = only(quanto.Reader(config, dtype), model.state_dict())
    assert_same(q, model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS)
def test_a_convolution(kind: str) -> None:
    """With few input channels: with groups, its shape is not in the file."""
    torch.manual_seed(0)
    model = quantized(torch.nn.Conv2d(3, 8, 3), kind)
    config = {"quant_method": "quanto", **peer.quantization_map(model)}
    q = only(quanto.Reader(config, torch.float32), model.state_dict())
    assert_same(q, model[0].weight)  # type: ignore[index]


def test_zero_points() -> None:
    torch.manual_seed(0)

    class Whole(peer.MaxOptimizer):  # type: ignore[misc, name-defined]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, zeropoint=True, **kwargs)

    model = quantized(torch.nn.Linear(256, 48), "qint4", optimizer=Whole())
    config = {"quant_method": "quanto", **peer.quantization_map(model)}
    q = only(quanto.Reader(config, torch.float32), model.state_dict())
    assert q.scheme.name == "int4"
    assert_same(q, model[0].weight)  # type: ignore[index]


def test_rounded_inputs() -> None:
    """With the library's rounding of outputs disabled, a layer gives the same outputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False))
    x = torch.randn(64, 256)
    peer.quantize(model, weights=peer.qint8, activations=peer.qint8)
    with torch.no_grad(), peer.Calibration(streamline=False):
        model(x)
    peer.freeze(model)
    model[0].disable_output_quantization()
    config = {"quant_method": "quanto", **peer.quantization_map(model)}
    q = only(quanto.Reader(config, torch.float32), model.state_dict())
    assert q.scheme.name == "int8-static"
    with torch.no_grad():
        theirs = model(x)
    theirs = theirs.dequantize() if hasattr(theirs, "dequantize") else theirs
    ours = torch.nn.functional.linear(x, q)
    assert float((ours - theirs).norm() / theirs.norm()) < 256 * 2.0**-24


@pytest.mark.parametrize("kind", ["qint8", "qint4", "qfloat8_e4m3fn"])
def test_a_model_as_it_saves_it(kind: str, tmp_path: Path) -> None:
    models = pytest.importorskip("tests.integrations.models")
    huggingface = pytest.importorskip("bitport.integrations.huggingface")
    source = models.make_directory(tmp_path / "float", hidden_size=256, intermediate_size=384)
    model = huggingface.load_model(source)
    theirs = peer.QuantizedModelForCausalLM.quantize(model, weights=peer.qtypes[kind])
    theirs.save_pretrained(tmp_path / "theirs")
    done = convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    assert done.read == "quanto"
    assert len(done.weights) == 15
    modules = dict(model.named_modules())
    for name, tensor in Own(tmp_path / "ours").items():
        if isinstance(tensor, QTensor):
            assert_same(tensor, modules[name.removesuffix(".weight")].weight)
    answers = models.logits(model).float()
    ours = models.logits(huggingface.load_model(tmp_path / "ours")).float()
    off = float((ours - answers).norm() / answers.norm())
    assert off < 15 * 2.0**-8, off  # in each of 15 layers they round weights to bfloat16 twice, by a relative 2^-9


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *((name, torch.float32) for name in ("int8", "int4-fzero", "int4", "int2", "int4-sym", "fp8-wo")),
        *((name, torch.float16) for name in ("int8", "int4", "int4-sym")),
        *((name, torch.bfloat16) for name in ("int8", "int4-sym", "int2-sym")),
    ],
    ids=str,
)
def test_the_library_loads_what_is_written(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A whole model with its own from_pretrained; in float32, the logits match those of the written numbers."""
    peer_models = pytest.importorskip("tests.interop.peer_models")
    source = peer_models.models.make_directory(tmp_path / "float", hidden_size=256, intermediate_size=512, dtype=dtype)
    rules = {"*.down_proj": "skip", "*_proj": scheme}
    bitport.checkpoint.quantize_files(source, tmp_path / "q", rules, progress=False)
    for to, target in (("quanto", "theirs"), ("float", "dense")):
        convert(tmp_path / "q", tmp_path / target, to=to, shard_size=200_000, progress=False)
    theirs = peer.QuantizedModelForCausalLM.from_pretrained(str(tmp_path / "theirs"))
    weights = peer_models.weights(tmp_path)
    assert len(weights) == 12
    modules = dict(theirs._wrapped.named_modules())
    for name, q in weights.items():
        weight = modules[name].weight
        if dtype == torch.float32:
            assert_same(q, weight)
        elif "TinyGemm" not in type(weight).__name__:  # TinyGemm rounds shifts on loading
            assert torch.equal(exact(weight)[0].to(torch.float32), q.dequantize(torch.float32)), name
    if dtype == torch.float32:
        dense = peer_models.models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
        found, wanted = peer_models.models.logits(theirs), peer_models.models.logits(dense)
        assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
