"""Reading and writing of float8 by transformers itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import bitport
from bitport.interop.float8 import Reader, Writer

from .files import only, read

pytestmark = pytest.mark.peers
theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")


def config(scale_fmt: str = "float") -> dict[str, object]:
    block = [128, 128]
    return {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": scale_fmt, "activation_scheme": "dynamic"}


def unpacked(tensors: dict[str, Tensor]) -> Tensor:
    quantized, scale = tensors["m.weight"], tensors["m.weight_scale_inv"]
    return theirs.Fp8Dequantize(None)._dequantize_one(quantized, scale, output_dtype=torch.float32)


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("shape", [(128, 128), (256, 640)])
def test_what_transformers_writes_reads_as_it_unpacks_it(shape: tuple[int, int], scale_fmt: str) -> None:
    said = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt))
    tensors = theirs.Fp8Quantize(said).convert({"m.weight": matrix(*shape)})
    q = only(Reader(config(scale_fmt), torch.float32), tensors)
    assert str(q.scheme) == "fp8-block"
    assert torch.equal(q.dequantize(), unpacked(tensors))


@pytest.mark.parametrize("exponents", [torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_mxfp8_of_transformers(exponents: torch.dtype) -> None:
    said = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(1, 32), scale_fmt="ue8m0"))
    tensors = theirs.Fp8Quantize(said).convert({"m.weight": matrix(48, 96)})
    tensors["m.weight_scale_inv"] = tensors["m.weight_scale_inv"].view(exponents)
    q = only(Reader({"quant_method": "mxfp8"}, torch.float32), tensors)
    assert str(q.scheme) == "mxfp8"
    assert torch.equal(q.dequantize(), unpacked(tensors))


def test_stacked_experts_of_transformers() -> None:
    said = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    name = "l.mlp.experts.gate_up_proj"
    tensors = theirs.Fp8Quantize(said).convert({name: matrix(3, 256, 128)})
    found = read(Reader(config(), torch.float32), tensors)
    renamed = {"m.weight": tensors[name], "m.weight_scale_inv": tensors[f"{name}_scale_inv"]}
    assert torch.equal(found[name].dequantize(), unpacked(renamed))


@pytest.mark.parametrize("shape", [(128, 128), (256, 640)])
def test_what_is_written_is_unpacked_by_transformers(shape: tuple[int, int]) -> None:
    q = bitport.quantize_tensor(matrix(*shape), "fp8-block").to_layout("plain")
    assert torch.equal(unpacked(Writer().write("m.weight", q)), q.dequantize())


@pytest.mark.parametrize("left", [[], ["lm_head", "model.layers.0.mlp.gate"]], ids=str)
def test_transformers_takes_the_settings_that_are_written(left: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    said = transformers.FineGrainedFP8Config(**Writer().config(left))
    assert (tuple(said.weight_block_size), said.activation_scheme) == ((128, 128), "dynamic")
    assert said.modules_to_not_convert == left
