"""What bitsandbytes itself packs and unpacks on a processor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bitport.interop.bitsandbytes import Reader

from .files import read

CONFIG = {"quant_method": "bitsandbytes"}

pytestmark = pytest.mark.peers
bnb = pytest.importorskip("bitsandbytes")


def weight(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).to(dtype)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("nested", [False, True], ids=["one level", "nested"])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (16, 128), (48, 640), (256, 512)])
def test_nf4_reads_as_the_library_unpacks_it(
    n: int, k: int, nested: bool, block: int, dtype: torch.dtype, storage: torch.dtype
) -> None:
    data, state = bnb.functional.quantize_4bit(
        weight(n, k, dtype), blocksize=block, compress_statistics=nested, quant_type="nf4", quant_storage=storage
    )
    tensors = {"m.weight": data}
    tensors |= {f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    (q,) = read(Reader(CONFIG, dtype), tensors).values()
    state.dtype = torch.float32
    assert torch.equal(q.dequantize(torch.float32), bnb.functional.dequantize_4bit(data, state))


@pytest.mark.parametrize("nested", [False, True], ids=["one level", "nested"])
def test_the_tensors_of_a_layer_of_4_bits(nested: bool) -> None:
    """As its state_dict names them."""
    layer = bnb.nn.Linear4bit(256, 32, bias=True, quant_type="nf4", compress_statistics=nested)
    layer.load_state_dict({"weight": weight(32, 256), "bias": torch.zeros(32)})
    layer = layer.to("cpu")
    tensors = {f"model.m.{name}": tensor for name, tensor in layer.state_dict().items()}
    found = read(Reader(CONFIG, torch.float32), tensors)
    assert list(found) == ["model.m.weight"]
    q = found["model.m.weight"]
    assert str(q.scheme) == "nf4"
    assert torch.equal(q.dequantize(), bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))


def test_the_tensors_of_a_layer_of_8_bits() -> None:
    layer = bnb.nn.Linear8bitLt(256, 32, bias=True, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight(32, 256, torch.float16), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    tensors = {f"model.m.{name}": tensor for name, tensor in layer.state_dict().items()}
    (q,) = read(Reader(CONFIG, torch.float16), tensors).values()
    theirs = bnb.functional.int8_vectorwise_dequant(layer.state_dict()["weight"], layer.state_dict()["SCB"])
    ours = q.dequantize(torch.float32)
    # Theirs is rounded after each of two products, one with a rounded 1/127; ours in the scale and in the product.
    assert bool(((ours - theirs).abs() <= 5 * 2**-24 * theirs.abs()).all())
