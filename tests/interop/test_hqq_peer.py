"""Weights quantized and saved by HQQ are read with the values that HQQ itself computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bitport
from bitport.interop import convert, hqq
from bitport.interop.sources import Own
from bitport.tensor import QTensor

from .files import only, write

pytestmark = pytest.mark.peers
core = pytest.importorskip("hqq.core.quantize", reason="needs HQQ: pip install hqq")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantized(n: int, k: int, nbits: float, group: int | None, axis: int, floated: bool, dtype: torch.dtype) -> object:
    torch.manual_seed(0)
    config = core.BaseQuantizeConfig(nbits=nbits, group_size=group, axis=axis, view_as_float=floated)
    return core.HQQLinear(torch.nn.Linear(k, n), config, compute_dtype=dtype, device="cpu")


def exact(module: object) -> np.ndarray:
    """(q - zero) * scale in float64, from codes that the library unpacks."""
    meta = {key: value for key, value in module.meta.items()}  # type: ignore[attr-defined]
    meta["compute_dtype"] = torch.float64
    meta |= {key: meta[key].double() for key in ("scale", "zero")}
    value: np.ndarray = core.Quantizer.dequantize(module.W_q.data, meta).numpy()  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("floated", [False, True])
@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1.58, 1])
@pytest.mark.parametrize(("group", "axis"), [(64, 1), (None, 1), (512, 1), (None, 0)])
def test_a_layer(group: int | None, axis: int, nbits: float, floated: bool, dtype: torch.dtype) -> None:
    module = quantized(64, 256, nbits, group, axis, floated, dtype)
    tensors: dict[str, torch.Tensor] = {}
    module.state_dict(destination=tensors, prefix="m.")  # type: ignore[attr-defined]
    q = only(hqq.Reader({"quant_method": "hqq"}, dtype), tensors)
    wanted = exact(module)
    got = q.dequantize(torch.float32).double().numpy()
    assert (np.abs(got - wanted) <= 2.0**-23 * (1 + 2**-20) * np.abs(wanted)).all()


@pytest.mark.parametrize("nbits", [4, 3])
def test_a_model_as_it_saves_it(nbits: int, tmp_path: Path) -> None:
    models = pytest.importorskip("tests.integrations.models")
    huggingface = pytest.importorskip("bitport.integrations.huggingface")
    theirs = pytest.importorskip("hqq.models.hf.base").AutoHQQHFModel
    model = huggingface.load_model(models.make_directory(tmp_path / "float", tie_word_embeddings=False))
    config = core.BaseQuantizeConfig(nbits=nbits, group_size=64, axis=1)
    theirs.quantize_model(model, config, compute_dtype=torch.bfloat16, device="cpu")
    answers = models.logits(model).float()
    theirs.save_to_safetensors(model, str(tmp_path / "theirs"))
    done = convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    assert set(done.weights.values()) == {f"int{nbits}-g64-fzero"}
    assert len(done.weights) == 14
    modules = dict(model.named_modules())
    for name, tensor in Own(tmp_path / "ours").items():
        if isinstance(tensor, QTensor):
            wanted = exact(modules[name.removesuffix(".weight")])
            got = tensor.dequantize(torch.float32).double().numpy()
            assert (np.abs(got - wanted) <= 2.0**-23 * (1 + 2**-20) * np.abs(wanted)).all(), name
    ours = models.logits(huggingface.load_model(tmp_path / "ours")).float()
    off = float((ours - answers).norm() / answers.norm())
    assert off < 14 * 2.0**-8, off  # in each of 14 layers they round weights to bfloat16 twice, by a relative 2^-9


def of_the_library(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.nn.Module:
    """A layer of the library that loads ``tensors``, those of one module, as its state."""
    module = core.HQQLinear(None, None, compute_dtype=dtype, device="cpu")
    module.load_state_dict({name.rpartition(".")[2]: tensor for name, tensor in tensors.items()})
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scheme", ["int8", "int7-g32", "int6-g64-sym", "int4-g64", "int4-g64-fzero", "int3", "int2-g32", "int4-channel"]
)
def test_what_is_written_is_unpacked_by_the_library(scheme: str, dtype: torch.dtype) -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = bitport.quantize_tensor(value, scheme).to_layout("plain")
    writer = hqq.Writer()
    module = of_the_library(write(writer, q), dtype)
    wanted, got = exact(module), q.dequantize(torch.float32).double().numpy()
    assert (np.abs(got - wanted) <= 2.0**-23 * (1 + 2**-20) * np.abs(wanted)).all()
    if dtype == torch.float32:
        assert torch.equal(module.dequantize(), q.dequantize())
        x = torch.randn(3, 256)
        assert torch.equal(module(x), torch.nn.functional.linear(x, q.dequantize()))
    said = writer.config([])["quant_config"]
    its = said["weight_quant_params"]
    made = core.BaseQuantizeConfig(nbits=its["nbits"], group_size=its["group_size"], axis=1)
    made["weight_quant_params"]["round_zero"] = its["round_zero"]
    assert made == said


@pytest.mark.parametrize("scheme", ["int4-g64", "int3-g64-sym"])
def test_a_model_of_layers_that_load_what_is_written(scheme: str, tmp_path: Path) -> None:
    """transformers 5 does not load HQQ files; the library loads its layers one by one."""
    peer = pytest.importorskip("tests.interop.peer_models")
    load_file = pytest.importorskip("safetensors.torch").load_file
    source = peer.models.make_directory(tmp_path / "float", dtype=torch.float32)
    rules = {"*.down_proj": "skip", "*_proj": scheme}
    bitport.checkpoint.quantize_files(source, tmp_path / "q", rules, progress=False)
    convert(tmp_path / "q", tmp_path / "theirs", to="hqq", progress=False)
    convert(tmp_path / "q", tmp_path / "dense", to="float", progress=False)
    model = peer.models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    wanted = peer.models.logits(model)
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    names = [name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")]
    assert len(names) == 12
    for name in names:
        its = {part: tensor for part, tensor in tensors.items() if part.startswith(f"{name}.")}
        model.set_submodule(name, of_the_library(its, torch.float32))
    assert torch.equal(peer.models.logits(model), wanted)
