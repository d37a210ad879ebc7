"""Weights that torchao flattens, or transformers saves with it, are read with the values of torchao's own
dequantize."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bitport
from bitport.checkpoint.source import Source
from bitport.interop import torchao
from bitport.tensor import QTensor

from .files import write

pytestmark = pytest.mark.peers
ao = pytest.importorskip("torchao.quantization", reason="needs torchao")
safe = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason="needs torchao 0.18")
models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")
mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
workflows = pytest.importorskip("torchao.quantization.quantize_.workflows")
gptq = pytest.importorskip("torchao.prototype.gptq.api")
safetensors = pytest.importorskip("safetensors.torch")


def read(path: Path, of: torch.dtype) -> dict[str, QTensor]:
    files = Source(path, quantized=True)
    reader = torchao.Reader(files.quantization or {}, of)
    reader.metadata = files.metadata
    found = {}
    for weight in reader.weights(files.stored):
        tensors = dict(files.read(weight.parts.values()))
        q = reader.read(weight.read(tensors.__getitem__))
        assert isinstance(q, QTensor)
        found[weight.name] = q
    return found


def saved(weight: Tensor, path: Path) -> QTensor:
    """Flatten ``weight`` with torchao, write it, and read it with bitport."""
    tensors, metadata = safe.flatten_tensor_state_dict({"m.weight": weight, "m.bias": torch.zeros(3)})
    safetensors.save_file(tensors, path / "model.safetensors", metadata=metadata)
    return read(path / "model.safetensors", torch.bfloat16)["m.weight"]


def intx(bits: int, per: int, mapping: str = "SYMMETRIC") -> Any:
    kind = getattr(ao.MappingType, mapping)
    return ao.IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), ao.PerGroup(per), mapping_type=kind)


CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
    "int8-tensor": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
    "int8-g32": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
    "int8-dyn": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "int8, int8-asym": lambda: ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ao.MappingType.ASYMMETRIC),
    "int4-g32-sym, int8-asym": lambda: ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "fp8-wo": lambda: ao.Float8WeightOnlyConfig(),
    "custom(int1-g32-asym)": lambda: intx(1, 32),
    **{f"int{bits}-g32-sym": functools.partial(intx, bits, 32) for bits in range(2, 8)},
    "int4-g64": lambda: intx(4, 64, "ASYMMETRIC"),
}
"""By scheme: the weight's and the inputs' where the combination has no name."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model(name: str, tmp_path: Path) -> None:
    transformers = models.transformers
    source = models.make_directory(tmp_path / "float")
    config = transformers.TorchAoConfig(CONFIGS[name]())
    model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    model.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    theirs = {key: each for key, each in model.state_dict().items() if type(each) is not Tensor}
    ours = read(tmp_path / "saved", torch.bfloat16)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 14
    for key, q in ours.items():
        exact = theirs[key]
        if hasattr(exact, "target_dtype"):  # its dequantize computes in its own dtype
            value = exact.qdata.float() - exact.zero_point.float().repeat_interleave(exact.block_size[1], 1)
            value = value * exact.scale.float().repeat_interleave(exact.block_size[1], 1)
            assert torch.equal(value.bfloat16(), exact.dequantize()), key
        else:
            value = exact.dequantize(torch.float32)
        assert torch.equal(q.dequantize(torch.float32), value), key
        both = str(dataclasses.replace(q.scheme, act="")), q.scheme.act
        assert name in (str(q.scheme), ", ".join(both)), (str(q.scheme), both)


def weight(n: int = 160, k: int = 256) -> Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16)


@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_float8(granularity: str, tmp_path: Path) -> None:
    per = getattr(ao, granularity)()
    inputs = workflows.QuantizeTensorToFloat8Kwargs(granularity=per)
    theirs = ao.Float8Tensor.from_hp(weight(), granularity=per, act_quant_kwargs=inputs)
    q = saved(theirs, tmp_path)
    assert str(q.scheme) == {"PerTensor": "fp8", "PerRow": "fp8-row"}[granularity]
    assert torch.equal(q.dequantize(torch.float32), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize(
    ("elements", "name"),
    [(torch.float8_e4m3fn, "mxfp8"), (torch.float8_e5m2, "float8_e5m2"), (torch.float4_e2m1fn_x2, "mxfp4")],
)
def test_mx(elements: torch.dtype, name: str, swizzle: bool, tmp_path: Path) -> None:
    acts = torch.float8_e4m3fn if elements == torch.float8_e5m2 else elements
    inputs = mx.QuantizeTensorToMXKwargs(elem_dtype=acts, is_swizzled_scales=swizzle)
    theirs = mx.MXTensor.to_mx(weight(), elements, is_swizzled_scales=swizzle, act_quant_kwargs=inputs)
    q = saved(theirs, tmp_path)
    assert name in (str(q.scheme), q.scheme.weight.dtype)
    assert torch.equal(q.dequantize(torch.float32), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("swizzle", [False, True])
def test_nvfp4(swizzle: bool, second: bool, tmp_path: Path) -> None:
    value = weight()
    whole = nv.per_tensor_amax_to_scale(value.abs().max()) if second else None
    inputs = nv.QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=second)
    theirs = nv.NVFP4Tensor.to_nvfp4(value, per_tensor_scale=whole, is_swizzled_scales=swizzle, act_quant_kwargs=inputs)
    q = saved(theirs, tmp_path)
    assert str(q.scheme) == ("nvfp4" if second else "nvfp4-static")
    assert torch.equal(q.dequantize(torch.float32), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("group", [32, 128])
def test_int4(group: int, tmp_path: Path) -> None:
    """Its own packing needs a GPU; codes and their meaning are from torchao's GPTQ."""
    value = weight()
    blocks = value.float().unflatten(1, (-1, group))
    low, high = blocks.amin(-1), blocks.amax(-1)
    scale = ((high - low) / 15).t().contiguous()
    zero = low.t() + 8 * scale
    codes = gptq._int4_row_quantize_zp_precomputed_qparams(value, scale, zero, group)
    qdata = (codes[:, 1::2] << 4) | (codes[:, ::2] & 15)
    theirs = ao.Int4Tensor(qdata, scale, zero.contiguous(), [1, group], value.shape)
    q = saved(theirs, tmp_path)
    exact = gptq._int4_row_dequantize_zp(codes, scale.double(), zero.double(), group)
    # The zero point, the difference from it and the product are rounded to float32
    shift = (zero.double() - 8 * scale.double()).t().abs().repeat_interleave(group, 1)
    bound = 2.0**-24 * (1 + 2**-20) * (shift + 2 * exact.abs())
    assert bool(((q.dequantize(torch.float32).double() - exact).abs() <= bound).all())


def written(q: QTensor) -> tuple[Any, dict[str, Any]]:
    """Return (``q`` as torchao unflattens it, the configuration)."""
    writer = torchao.Writer()
    tensors = write(writer, q)
    found, left = safe.unflatten_tensor_state_dict(tensors, writer.metadata([]))
    assert not left
    return found["m.weight"], writer.config([])


@pytest.mark.parametrize("scheme", ["fp8", "fp8-row"])
def test_inputs_in_float8_are_rounded_by_torchao(scheme: str) -> None:
    """To the same numbers; float32 sums differ only in their order."""
    q = bitport.quantize_tensor(weight(160, 256), scheme).to_layout("plain").to(torch.float32)
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    theirs, _ = written(q)
    ours, found = (torch.nn.functional.linear(x, each) for each in (q, theirs))
    assert bool(((found - ours).abs() <= 256 * 2**-24 * (x.abs() @ q.dequantize().abs().t())).all())
    assert float((ours - x @ q.dequantize().t()).abs().max()) > 0.5


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4"])
def test_inputs_in_mx_are_rounded_by_torchao(scheme: str) -> None:
    """To the same numbers, using its emulation of hardware that supports such products."""
    q = bitport.quantize_tensor(weight(160, 256), scheme).to_layout("plain")
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs, _ = written(q)
    emulated = type(theirs.kernel_preference).EMULATED
    theirs.kernel_preference = theirs.act_quant_kwargs.kernel_preference = emulated
    theirs.scale, theirs.is_swizzled_scales = mx.from_blocked(theirs.scale, 160, 8).reshape(160, 8), False
    theirs.act_quant_kwargs.is_swizzled_scales = False
    ours = torch.nn.functional.linear(x.float(), q.to(torch.float32))
    found = torch.nn.functional.linear(x, theirs).float()
    assert bool(((found - ours).abs() <= 2**-8 * ours.abs() + 1e-3).all())


@pytest.mark.parametrize(
    "scheme", ["fp8", "fp8-row", "fp8-wo", "int8", "int8-dyn", "int8-g32", "int4", "mxfp8", "mxfp4", "nvfp4"]
)
def test_the_configuration_is_one_of_torchao(scheme: str) -> None:
    q = bitport.quantize_tensor(weight(128, 256), scheme).to_layout("plain")
    theirs, said = written(q)
    config = models.transformers.TorchAoConfig.from_dict(said)
    assert type(config.quant_type).__name__ == said["quant_type"]["default"]["_type"]
    rounds = getattr(theirs, "act_quant_kwargs", None) is not None
    assert rounds == bool(q.scheme.act) == ("Dynamic" in type(config.quant_type).__name__)


@pytest.mark.parametrize(
    ("scheme", "budget"),
    [
        ("int8", 1e-5),
        *(
            (name, 0.0)
            for name in ("int8-g32", "int4-g32", "int3-g64-sym", "int8-asym", "fp8-wo", "int5-channel-sym", "nvfp4-wo")
        ),
    ],
)
def test_transformers_loads_what_is_written(scheme: str, budget: float, tmp_path: Path) -> None:
    """It computes the same: torchao's products dequantize, except int8 per row, which applies the scales last."""
    peer = pytest.importorskip("tests.interop.peer_models")
    theirs, dense = peer.loaded(tmp_path, "torchao", scheme)
    for name, q in peer.weights(tmp_path).items():
        assert torch.equal(theirs.get_submodule(name).weight.dequantize(), q.dequantize()), name
    found, wanted = peer.models.logits(theirs), peer.models.logits(dense)
    assert float((found - wanted).abs().max()) <= budget * float(wanted.abs().max())


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int8-dyn", "fp8-row", "mxfp8", "mxfp4", "nvfp4"])
def test_transformers_loads_what_needs_other_devices(scheme: str, tmp_path: Path) -> None:
    """In bfloat16: without products, or with inputs that torchao rounds in its own way."""
    peer = pytest.importorskip("tests.interop.peer_models")
    theirs, _ = peer.loaded(tmp_path, "torchao", scheme, torch.bfloat16)
    for name, q in peer.weights(tmp_path).items():
        its = theirs.get_submodule(name).weight
        if scheme == "int4-g32-sym":
            codes = torch.stack([its.qdata << 4 >> 4, its.qdata >> 4], -1).flatten(-2).double()
            assert bool((its.zero_point == 0).all())
            value = gptq._int4_row_dequantize_zp(codes, its.scale.double(), its.zero_point.double(), 32)
            assert torch.equal(value, q.dequantize(torch.float32).double()), name
        else:
            assert torch.equal(its.dequantize(torch.float32), q.dequantize(torch.float32)), name
