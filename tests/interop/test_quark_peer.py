"""Files written by Quark with its schemes for language models, against the weights that it reads from them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitport.errors import CheckpointError
from bitport.interop import convert
from bitport.interop.sources import source_of
from bitport.numerics.activations import fake_quantize
from bitport.tensor import QTensor

pytestmark = pytest.mark.peers
transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
quark = pytest.importorskip("quark.torch", reason="pip install amd-quark")
settings = pytest.importorskip("quark.torch.quantization.config.config")
tensors = pytest.importorskip("quark.torch.quantization.tensor_quantize")

SCHEMES = {
    "fp8": "fp8-static",
    "ptpc_fp8": "fp8-row",
    "int8": "int8-static-tensor",
    "mxfp4": "mxfp4",
    "mxfp4_weight_only": "mxfp4-wo",
    "mxfp4_fp8": "custom(float4_e2m1-g32, e8m0 scales, static fp8-tensor inputs)",
    "nvfp4": "nvfp4-static",
    "int4_wo_32": "int4-g32-sym",
    "uint4_wo_32": "int4-g32",
    "int4_wo_per_channel": "int4-channel-sym",
    "uint4_wo_per_channel": "int4-channel",
}
REFUSED = {"mxfp6_e3m2": "'fp6_e3m2'", "amdfp4": "scale_format 'e5m3'", "int4_fp8": "two levels of scales"}
LAYERS = 7
IDS = torch.arange(60).reshape(1, 60) * 7 % 128
"""A single text: with several, the library gives tokens at the same position one scale."""


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "vocab_size": 128, "initializer_range": 0.1},
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def quiet() -> contextlib.AbstractContextManager[Any]:
    """Quark prints tables to standard output."""
    return contextlib.redirect_stdout(io.StringIO())


def written(path: Path, scheme: str, packing: str = "reorder", mode: str = "quark", **more: Any) -> Any:
    """Quantize a model with the library, write it to ``path``, and return it as the library reads it back."""
    config = quark.LLMTemplate.get("llama").get_config(scheme=scheme, **more)
    with quiet(), torch.no_grad():
        quantizer = quark.ModelQuantizer(config)
        made = quantizer.quantize_model(model(), torch.utils.data.DataLoader(IDS))
        quark.export_safetensors(quantizer.freeze(made), path, pack_method=packing, custom_mode=mode)
        return quark.import_model_from_safetensors(model(), str(path))


def assert_same_layers(path: Path, theirs: Any, scheme: str) -> None:
    found = {name: value for name, value in source_of(path).items() if isinstance(value, QTensor)}
    assert len(found) == LAYERS
    for name, q in found.items():
        layer = theirs.get_submodule(name.removesuffix(".weight"))
        assert str(q.scheme) == scheme
        assert torch.equal(q.dequantize(torch.float32), layer._get_qweight(layer.weight).float()), name
        layer.output_quantizer = None  # used for a quantized KV cache
        x = torch.randn(1, 20, q.shape[1], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            wanted, answer = layer(x).double(), torch.nn.functional.linear(x, q).double()
        # Each sums K products in float32.
        assert float((answer - wanted).norm() / wanted.norm()) < 2 * q.shape[1] * 2**-24, name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_weights_and_answers(scheme: str, tmp_path: Path) -> None:
    assert_same_layers(tmp_path, written(tmp_path, scheme), SCHEMES[scheme])


def test_codes_in_their_order(tmp_path: Path) -> None:
    assert_same_layers(tmp_path, written(tmp_path, "uint4_wo_32", "order"), "int4-g32")


@pytest.mark.parametrize("packing", ["order", "reorder"])
@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_32"])
def test_the_form_of_awq(scheme: str, packing: str, tmp_path: Path) -> None:
    written(tmp_path / "quark", scheme, packing, algorithm="awq")
    written(tmp_path / "awq", scheme, packing, "awq", algorithm="awq")
    file = tmp_path / "awq" / "model.safetensors"
    # From transformers 5.6 on, it gives floats the names of codes, with a warning.
    plain = {
        name.replace("qweight", "weight") if value.is_floating_point() else name: value
        for name, value in load_file(file).items()
    }
    save_file(plain, file)
    one, other = (dict(source_of(tmp_path / name).items()) for name in ("quark", "awq"))
    assert one.keys() == other.keys()
    for name, q in one.items():
        if isinstance(q, QTensor):
            assert str(q.scheme) == SCHEMES[scheme]
            assert torch.equal(q.dequantize(torch.float32), other[name].dequantize(torch.float32)), name


def test_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", "fp8", kv_cache_scheme="fp8")
    assert_same_layers(tmp_path / "theirs", theirs, "fp8-static")
    done = convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    assert done.notes == ("left out: scales of the cache of keys and values",)


def test_layers_of_their_own(tmp_path: Path) -> None:
    more = {"layer_config": {"*mlp*": "int4_wo_32"}, "exclude_layers": ["lm_head", "*o_proj"]}
    written(tmp_path, "mxfp4", **more)
    found = {name: str(q.scheme) for name, q in source_of(tmp_path).items() if isinstance(q, QTensor)}
    assert {each.split(".")[-2]: scheme for each, scheme in found.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "mxfp4"),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "int4-g32-sym"),
    }


@pytest.mark.parametrize("scheme", REFUSED)
def test_what_is_refused(scheme: str, tmp_path: Path) -> None:
    written(tmp_path / "theirs", scheme)
    with pytest.raises(CheckpointError, match=REFUSED[scheme]):
        convert(tmp_path / "theirs", tmp_path / "ours", progress=False)


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 256, generator=generator) * torch.exp(3 * torch.randn(64, 1, generator=generator))


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("mxfp4", "OCP_MXFP4Spec", {"ch_axis": -1}),
        ("fp8", "FP8E4M3PerChannelSpec", {"ch_axis": 0}),
        ("fp8-tensor", "FP8E4M3PerTensorSpec", {"observer_method": "min_max"}),
    ],
)
def test_inputs_are_rounded_alike(name: str, kind: str, more: dict[str, Any]) -> None:
    specification = getattr(settings, kind)(is_dynamic=True, **more).to_quantization_spec()
    x = inputs()
    with quiet():
        wanted = tensors.FakeQuantizeBase.get_fake_quantize(specification)(x.clone())
    assert torch.equal(fake_quantize(x, name), wanted.float())
