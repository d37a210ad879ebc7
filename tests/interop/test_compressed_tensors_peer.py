"""The library compressed-tensors itself: bitport reads what it packs, and it unpacks what bitport writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitport.checkpoint.source import Source
from bitport.interop.compressed_tensors import Reader, Writer
from bitport.interop.compressed_tensors.arguments import formats_of
from bitport.interop.compressed_tensors.groups import Groups
from bitport.schemes import preset
from bitport.schemes.elsewhere import named_elsewhere
from bitport.tensor import QTensor

from .compressed_tensors_files import SCHEMES, assert_same, plain, written
from .files import only, read

pytestmark = pytest.mark.peers
library = pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

MODULE = {"targets": ["Linear"]}


def scheme_of(name: str, **changes: Any) -> Any:
    """A preset of the library, with ``changes`` to the arguments of its weights."""
    found = QuantizationScheme(**MODULE, **PRESET_SCHEMES[name])
    made = found.model_dump(mode="json")
    made["weights"].update(changes)
    return QuantizationScheme.model_validate(made)


def blocks_of(weight: Tensor, arguments: Any) -> Tensor:
    """Reshape the weight to [rows of scales, columns of scales, elements per scale]."""
    n, k = weight.shape
    rows, columns = {
        "tensor": (n, k),
        "channel": (1, k),
        "block": tuple(arguments.block_structure or ()),
    }.get(arguments.strategy, (1, arguments.group_size))
    return weight.reshape(n // rows, rows, k // columns, columns).transpose(1, 2).flatten(2)


def compressed(scheme: Any, weight: Tensor) -> tuple[dict[str, Tensor], str]:
    """Return (the tensors that the library makes of ``weight``, the name of their format)."""
    arguments = scheme.weights
    blocks = blocks_of(weight, arguments)
    state = {"weight": weight}
    more = {}
    if arguments.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        more["global_scale"] = state["weight_global_scale"]
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, **more)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if arguments.strategy == "tensor":
        state |= {"weight_scale": scale.reshape(1), "weight_zero_point": zero.reshape(1)}
    if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
        state["input_scale"] = torch.tensor([0.5], dtype=weight.dtype)
    if scheme.input_activations is not None and scheme.input_activations.strategy == "tensor_group":
        state["input_global_scale"] = torch.tensor([0.5])
    return BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme), scheme.format


def decompressed(tensors: dict[str, Tensor], scheme: Any) -> Tensor:
    result: Tensor = BaseCompressor.get_value_from_registry(scheme.format).decompress(tensors, scheme)["weight"]
    return result


def as_stored(scheme: Any) -> dict[str, Any]:
    """The config.json of a model with only this scheme."""
    made = QuantizationConfig(config_groups={"group_0": scheme}, format=scheme.format, quantization_status="compressed")
    said: dict[str, Any] = json.loads(json.dumps(made.model_dump(), default=str))
    return {"version": library.__version__, "sparsity_config": {}, "transform_config": {}, **said}


def values_agree(ours: QTensor, theirs: Tensor) -> None:
    """Bit for bit in the dtype that the library computes in. Its nvfp4 scale is a quotient and bitport's is a product,
    so they may round to neighbours."""
    mine = ours.dequantize(theirs.dtype)
    if ours.scale2 is None:
        assert torch.equal(mine, theirs)
        return
    torch.testing.assert_close(mine, theirs, rtol=torch.finfo(theirs.dtype).eps, atol=0)
    assert (mine == theirs).double().mean() > 0.999


INTS = [
    (f"W{bits}A16", stored, {"symmetric": symmetric, **blocks})
    for bits in range(2, 9)
    for stored in ("pack-quantized", "int-quantized")
    for symmetric in (True, False)
    for blocks in ({"group_size": 32}, {"strategy": "channel", "group_size": None})
]
THEIRS: list[tuple[str, str, dict[str, Any]]] = [
    *INTS,
    ("W2A16", "pack-quantized", {"num_bits": 1, "group_size": 32}),
    ("W2A16", "pack-quantized", {"num_bits": 1, "group_size": 32, "symmetric": False}),
    ("W4A16", "pack-quantized", {"strategy": "tensor", "group_size": None, "symmetric": False}),
    ("W4A8", "int-quantized", {}),
    ("W4AFP8", "int-quantized", {}),
    ("INT8", "int-quantized", {}),
    ("FP8", "float-quantized", {}),
    ("FP8_DYNAMIC", "float-quantized", {}),
    ("FP8_BLOCK", "float-quantized", {}),
    ("FP8_BLOCK", "naive-quantized", {"block_structure": [32, 64]}),
    ("NVFP4A16", "nvfp4-pack-quantized", {}),
    ("NVFP4", "nvfp4-pack-quantized", {}),
    ("MXFP4A16", "mxfp4-pack-quantized", {}),
    ("MXFP4", "mxfp4-pack-quantized", {}),
    ("MXFP4XFP8", "mxfp4-pack-quantized", {}),
    ("MXFP6A8", "mxfp6-pack-quantized", {}),
    ("MXFP8", "mxfp8-quantized", {}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "stored", "changes"), THEIRS)
def test_what_the_library_packs_is_read(name: str, stored: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    scheme = scheme_of(name, **changes)
    scheme.format = stored
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors, _ = compressed(scheme, weight)
    q = only(Reader(as_stored(scheme), dtype), {f"m.{role}": part for role, part in tensors.items()})
    values_agree(q, decompressed(tensors, scheme))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SCHEMES, "nvfp4-wo", "nvfp4-static"])
def test_what_bitport_writes_the_library_unpacks(name: str, dtype: torch.dtype) -> None:
    q = plain(SCHEMES.get(name) or preset(name), dtype=dtype)
    said, tensors = written({"m.weight": q}, ["lm_head"])
    parsed = QuantizationConfig.model_validate(said)
    scheme = parsed.config_groups["group_0"]
    assert parsed.ignore == ["lm_head"]
    assert scheme.format == parsed.format
    values_agree(q, decompressed({role.removeprefix("m."): part for role, part in tensors.items()}, scheme))
    again = only(Reader(as_stored(scheme), dtype), tensors)
    assert_same(again, q, but=("scale2",))


@pytest.fixture
def tiny() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()


LINEAR = "proj.weight"
"""Suffix of the names of the layers to quantize."""


@pytest.mark.parametrize("schemes", [("int4-g32-sym",), ("mxfp8-wo", "int3-g64-sym", "mxfp4-wo"), ("int8",)])
def test_transformers_runs_what_bitport_writes(tiny: Any, tmp_path: Path, schemes: tuple[str, ...]) -> None:
    """Except packed zero points, which compressed-tensors 0.20 expects unpacked when transformers loads a model, and
    float32 scales, which transformers rounds to the dtype of the model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from bitport.tensor import quantize_tensor

    writer = Writer()
    weights: dict[str, QTensor] = {}
    tensors = {}
    for at, (name, parameter) in enumerate(tiny.state_dict().items()):
        if name.endswith(LINEAR):
            weights[name] = quantize_tensor(parameter, schemes[at % len(schemes)]).to_layout("plain")
            tensors.update(writer.write(name, weights[name]))
        else:
            tensors[name] = parameter
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    said = tiny.config.to_dict() | {"quantization_config": writer.config(["lm_head"])}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model(torch.arange(8)[None])  # the first call unpacks
    for name, q in weights.items():
        values_agree(q, model.get_parameter(name))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "W3A16", "FP8_DYNAMIC", "MXFP4A16"])
def test_what_the_library_saves_of_a_model_is_read(tiny: Any, tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import apply_quantization_config

    scheme = scheme_of(name)
    if scheme.weights.strategy == "group" and scheme.weights.group_size > 64:
        scheme.weights.group_size = 64
    apply_quantization_config(tiny, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    layers = {key: module for key, module in tiny.named_modules() if hasattr(module, "weight_scale")}
    for module in layers.values():
        blocks = blocks_of(module.weight, module.quantization_scheme.weights)
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), module.quantization_scheme.weights)
        module.weight_scale.data.copy_(scale)
        module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(tiny)
    compressor.compress_model(tiny)
    tiny.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    source = Source(tmp_path, quantized=True)
    assert source.quantization is not None
    found = read(Reader(source.quantization, torch.bfloat16), dict(source.read(source.tensors)))
    assert found.keys() == {f"{key}.weight" for key in layers}
    compressor.decompress_model(tiny)
    for key, module in layers.items():
        values_agree(found[f"{key}.weight"], module.weight.data)


NAMES = [(name, scheme) for name, scheme, row in named_elsewhere() if row.library == "llm-compressor"]


@pytest.mark.parametrize(("name", "scheme"), NAMES)
def test_presets_are_what_bitport_says(name: str, scheme: str) -> None:
    theirs = scheme_of(name)
    theirs.format = formats_of(preset(scheme).weight)[0]
    (group,) = Groups(as_stored(theirs)).groups.values()
    assert group is not None
    assert str(group.scheme) == scheme
