"""Gemma's own files against numbers of numpy in float64, and against transformers' own layers and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import convert, gemma
from bitport.tensor import QTensor

from .files import assert_numbers, held, read

EXTRA = "needs the extra: pip install 'bitport[hf]'"
N, K, INPUT = 24, 80, 0.125
LAYERS = {r"mlp\..*proj": {"num_bits": 2}, "proj": {"num_bits": 8}, "embed": {"num_bits": 2}, "head": {}}


def matrix(n: int, k: int, bits: int, groups: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return (codes as stored, scales, values)."""
    chance, half = np.random.default_rng(seed), 1 << (bits - 1)
    codes = chance.integers(-half, half, (n, k))
    scale = chance.uniform(0.01, 0.04, (n, groups)).astype(np.float32) / half
    values = codes * np.repeat(scale.astype(np.float64), k // groups, 1)
    if bits == 8:
        return torch.from_numpy(codes.astype(np.int8)), torch.from_numpy(scale), values
    each = (codes + half).reshape(n, -1, 8 // bits)
    stored = sum(each[..., at] << bits * at for at in range(8 // bits))
    return torch.from_numpy(stored.astype(np.uint8)), torch.from_numpy(scale), values


def layer(bits: int = 4, inputs: float = INPUT, outputs: float = 0.0) -> tuple[dict[str, Tensor], np.ndarray]:
    codes, scale, values = matrix(N, K, bits)
    scales = {"m.input_activation_scale": torch.tensor(inputs), "m.output_activation_scale": torch.tensor(outputs)}
    return {"m.weight": codes, "m.weight_scale": scale, **scales}, values


def embedding(bits: int, groups: int) -> tuple[dict[str, Tensor], np.ndarray]:
    codes, scale, values = matrix(N, K, bits, groups)
    return {"m.embedding_quantized": codes, "m.embedding_scale": scale}, values


def reader(dtype: torch.dtype = torch.float32, **more: Any) -> gemma.Reader:
    return gemma.Reader({"quant_method": "gemma", "modules_to_not_convert": ["vision_tower"], **more}, dtype)


def only(made: gemma.Reader, tensors: dict[str, Tensor]) -> QTensor:
    ((name, q),) = read(made, tensors).items()
    assert name == "m.weight"
    return q


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("inputs", [INPUT, 0.0])
def test_values_are_those_of_the_definition(bits: int, inputs: float) -> None:
    tensors, values = layer(bits, inputs)
    q = only(reader(torch.bfloat16, num_bits=bits), {**tensors, "norm.weight": torch.ones(3)})
    assert_numbers(q, values.astype(np.float32))
    assert (tuple(q.shape), q.dtype) == ((N, K), torch.bfloat16)
    if inputs:
        assert (q.scheme.act, q.scheme.static, float(q.act_scale)) == ("int8-tensor", True, inputs)
    else:
        assert (q.scheme.act, q.scheme.static, q.act_scale) == ("", False, None)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 5])
def test_embeddings(bits: int, groups: int) -> None:
    tensors, values = embedding(bits, groups)
    q = only(reader(num_bits=bits), tensors)
    np.testing.assert_array_equal(q.dequantize().numpy(), values.astype(np.float32))
    theirs = pytest.importorskip("transformers.integrations.gemma_quant", reason=EXTRA)
    module = theirs.QuantizedEmbedding(N, K, torch.float32, num_bits=bits)
    module.embedding_quantized = torch.nn.Parameter(tensors["m.embedding_quantized"], requires_grad=False)
    module.embedding_scale = torch.nn.Parameter(tensors["m.embedding_scale"])
    ids = torch.tensor([[3, 0], [N - 1, 3]])
    assert torch.equal(F.embedding(ids, q), module(ids))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("inputs", [INPUT, 0.0])
def test_a_layer_of_transformers(bits: int, inputs: float) -> None:
    theirs = pytest.importorskip("transformers.integrations.gemma_quant", reason=EXTRA)
    tensors, _ = layer(bits, inputs)
    module = theirs.QuantizedLinear(K, N, num_bits=bits).requires_grad_(False)
    module.load_state_dict({name.removeprefix("m."): tensor for name, tensor in tensors.items()})
    # Inputs between codes and beyond the outermost ones, whose quotients by a power of two are exact.
    x = torch.from_numpy(np.random.default_rng(1).integers(-600, 600, (5, K))).float() / 4 * INPUT
    ours, found = F.linear(x, only(reader(num_bits=bits), tensors)), module(x)
    # A sum of K products in float32, and roundings of what is added.
    assert float((ours - found).norm() / found.norm()) < K * 2**-24


def test_bits_are_those_of_the_match_that_begins_first() -> None:
    made = reader(num_bits=4, module_quant_configs=LAYERS)
    names = {"a.mlp.up_proj": 2, "a.mlp": 4, "a.o_proj": 8, "a.proj.mlp.up_proj": 8, "embed_tokens": 2, "lm_head": 4}
    assert {name: made._bits_of(name) for name in names} == names
    either = {"up": {"num_bits": 2}, "up_proj": {"num_bits": 8}}
    assert reader(module_quant_configs=either)._bits_of("a.up_proj") == 2


def test_what_is_left_out_is_said() -> None:
    tensors, _ = layer(outputs=0.5)
    every = held({**tensors, "l.self_attn.k_cache_scale": torch.ones(()), "l.self_attn.v_cache_scale": torch.ones(1)})
    assert [weight.name for weight in reader().weights(every)] == ["m.weight"]
    names = ["m.output_activation_scale", "l.self_attn.k_cache_scale", "l.self_attn.v_cache_scale"]
    assert [*reader().dropped(every)] == names


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory by the rules of transformers, with layers and an embedding of different bits."""
    transformers = pytest.importorskip("transformers", reason=EXTRA)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"]}
    config = transformers.Gemma3TextConfig(**sizes, **heads, tie_word_embeddings=False, pad_token_id=0)
    torch.manual_seed(0)
    tensors = {}
    for seed, (name, tensor) in enumerate(transformers.Gemma3ForCausalLM(config).state_dict().items()):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2:
            tensors[name] = tensor
            continue
        bits = reader(module_quant_configs=LAYERS)._bits_of(module)
        codes, scale, _ = matrix(*tensor.shape, bits, seed=seed)
        table = "embed" in name
        tensors[f"{module}.embedding_quantized" if table else name] = codes
        tensors[f"{module}.embedding_scale" if table else f"{name}_scale"] = scale
        if not table:
            tensors[f"{module}.input_activation_scale"] = torch.tensor(0.05)
            tensors[f"{module}.output_activation_scale"] = torch.tensor(0.0)
    directory = tmp_path / "published"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True, "module_quant_configs": LAYERS}
    named = {"architectures": ["Gemma3ForCausalLM"], "dtype": "float32", "quantization_config": said}
    more = {**named, "quantization_config": {**said, "modules_to_not_convert": []}}
    (directory / "config.json").write_text(json.dumps({**json.loads(config.to_json_string()), **more}))
    return directory


def test_a_model_of_transformers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gemma_quant", reason=EXTRA)
    transformers = pytest.importorskip("transformers")
    huggingface = pytest.importorskip("bitport.integrations.huggingface")
    done = convert(model, tmp_path / "out", progress=False)
    assert done.notes == ("left out: scales of outputs, which are not rounded here",)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        found = transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits
        ours = huggingface.load_model(tmp_path / "out")(ids).logits
    # An input that is rounded the other way moves by one of 255 steps at most, in one of 32 columns or more.
    assert float((ours - found).norm() / found.norm()) < 1 / 255


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_bits": 3}, "quantization_config: num_bits 3: 8, 4, 2 are read"),
        ({"num_bits": "4"}, "num_bits must be int"),
        ({"num_bits": True}, "num_bits must be int"),
        ({"module_quant_configs": ["a"]}, "module_quant_configs must be dict"),
        ({"module_quant_configs": {"a": 4}}, "a must be dict"),
        ({"module_quant_configs": {"a": {"num_bits": 5}}}, "module_quant_configs of 'a': num_bits 5"),
        ({"module_quant_configs": {"a": {"group_size": 32}}}, "group_size is not understood"),
        ({"module_quant_configs": {"(": {}}}, "is no regular expression"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(said: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        reader(**said)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("m.weight", torch.zeros(N, K, dtype=torch.int8)),
        ("m.weight", torch.zeros(0, K, dtype=torch.uint8)),
        ("m.weight", torch.zeros(2, N, K, dtype=torch.uint8)),
        ("m.weight", torch.zeros(N, K)),
        ("m.weight", None),
        ("m.weight_scale", torch.ones(N)),
        ("m.weight_scale", torch.ones(1, 1)),
        ("m.weight_scale", torch.ones(N, 3)),
        ("m.weight_scale", torch.ones(N, 0)),
        ("m.weight_scale", torch.ones(N, 1).bfloat16()),
        ("m.weight_scale", None),
        ("m.input_activation_scale", torch.ones(K)),
        ("m.embedding_quantized", torch.zeros(N, K, dtype=torch.uint8)),
        ("n.embedding_scale", torch.zeros(N, 1)),
    ],
)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors = layer()[0]
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\.|m has both|n\.embedding_scale"):
        read(reader(), tensors)
