"""BitNet files against numbers of numpy in float64, and against transformers' own layers and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import bitnet, convert

from .files import assert_numbers, held, only, read

N, K = 24, 80
EXTRA = "needs the extra: pip install 'bitport[hf]'"
CLASSES = ("bitlinear", "autobitlinear")


def ternary(n: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1, 2, (n, k))


def packed(numbers: np.ndarray) -> Tensor:
    """A quarter of the rows in each pair of bits."""
    quarters = np.split(numbers + 1, 4)
    return torch.from_numpy(sum(quarter << 2 * at for at, quarter in enumerate(quarters)).astype(np.uint8))


def layer(scale: float = 1.3) -> tuple[dict[str, Tensor], np.ndarray]:
    numbers = ternary(N, K, 0)
    stored = torch.tensor([scale], dtype=torch.bfloat16)
    return {"m.weight": packed(numbers), "m.weight_scale": stored}, numbers


def reader(dtype: torch.dtype = torch.float32, **more: Any) -> bitnet.Reader:
    return bitnet.Reader({"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"], **more}, dtype)


@pytest.mark.parametrize("linear_class", [None, *CLASSES])
def test_values_are_those_of_the_definition(linear_class: str | None) -> None:
    tensors, numbers = layer()
    made = reader(torch.bfloat16, linear_class=linear_class)
    q = only(made, {**tensors, "norm.weight": torch.ones(3)})
    scale = tensors["m.weight_scale"].double().numpy()
    multiplies = linear_class == "autobitlinear"
    wanted = numbers * (scale if multiplies else 1 / scale).astype(np.float32)
    assert_numbers(q, wanted)
    assert (tuple(q.shape), q.dtype, q.scheme) == ((N, K), torch.bfloat16, bitnet.SCHEME)
    assert made.notes == ([] if multiplies else [bitnet.RECIPROCAL])


@pytest.mark.parametrize("linear_class", CLASSES)
def test_a_layer_of_transformers(linear_class: str) -> None:
    theirs = pytest.importorskip("transformers.integrations.bitnet", reason=EXTRA)
    tensors, numbers = layer()
    scale = tensors["m.weight_scale"]
    if linear_class == "bitlinear":
        module = theirs.BitLinear(K, N, bias=False, dtype=torch.float32)
        module.weight, module.weight_scale = tensors["m.weight"], scale.float()
    else:
        module = theirs.AutoBitLinear(K, N, bias=False, dtype=torch.float32)
        module.weight.requires_grad_(False).copy_(torch.from_numpy(numbers))
        module.weight_scale = scale.float()
    q = only(reader(linear_class=linear_class), tensors)
    # Numbers of int8 by a power of two, so that both round inputs to the same codes.
    x = torch.from_numpy(np.random.default_rng(1).integers(-127, 128, (5, K))).float() / 64
    x[:, 3] = 127 / 64
    with torch.compiler.set_stance("force_eager"):
        found = module(x)
    ours = torch.nn.functional.linear(x, q)
    # The sums are whole numbers below 2^24; what is left are roundings of scales and of products with them.
    assert float((ours - found).norm() / found.norm()) < 4 * 2**-24


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as published: tensors by the names of the model in float, packed by transformers itself."""
    theirs = pytest.importorskip("transformers.integrations.bitnet", reason=EXTRA)
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.BitNetConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    torch.manual_seed(0)
    tensors = transformers.BitNetForCausalLM(config).state_dict()
    assert tensors.pop("lm_head.weight") is not None
    for seed, (name, tensor) in enumerate([*tensors.items()]):
        if tensor.dim() == 2 and "embed" not in name:
            numbers = torch.from_numpy(ternary(*tensor.shape, seed))
            tensors[name] = theirs.pack_weights(numbers)
            assert torch.equal(tensors[name], packed(numbers.numpy() - 1))  # which it has added 1 to
            tensors[f"{name}_scale"] = torch.tensor([0.11])
    directory = tmp_path / "published"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    named = {"architectures": ["BitNetForCausalLM"], "dtype": "float32", "quantization_config": said}
    (directory / "config.json").write_text(json.dumps({**json.loads(config.to_json_string()), **named}))
    return directory


def test_a_model_of_transformers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers requires it for BitNet")
    transformers = pytest.importorskip("transformers")
    huggingface = pytest.importorskip("bitport.integrations.huggingface")
    convert(model, tmp_path / "out", progress=False)
    ids = torch.arange(12)[None]
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        found = transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits
        ours = huggingface.load_model(tmp_path / "out")(ids).logits
    # A code of an input that is rounded the other way is one of 127 at most, in one of 32 or 64 columns.
    assert float((ours - found).norm() / found.norm()) < 1 / 127


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"linear_class": "other"}, "linear_class 'other': bitlinear and autobitlinear are read"),
        ({"linear_class": 1}, "linear_class must be str"),
        ({"quantization_mode": "online"}, "rounded in every call"),
        ({"quantization_mode": "never"}, "offline and online are read"),
        ({"use_rms_norm": True}, "normalizes its input"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(said: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        reader(**said)


def test_a_bias_that_is_scaled_too() -> None:
    tensors = {**layer()[0], "m.bias": torch.zeros(N)}
    assert len(reader().weights(held(tensors))) == 1
    with pytest.raises(CheckpointError, match=r"m\.bias is multiplied by weight_scale"):
        reader(linear_class="autobitlinear").weights(held(tensors))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("m.weight", torch.full((N // 4, K), 0b11000000, dtype=torch.uint8)),
        ("m.weight", torch.zeros(0, K, dtype=torch.uint8)),
        ("m.weight", torch.zeros(2, N // 4, K, dtype=torch.uint8)),
        ("m.weight", torch.zeros(N, K)),
        ("m.weight", None),
        ("m.weight_scale", torch.zeros(1)),
        ("m.weight_scale", torch.full((1,), -1.0)),
        ("m.weight_scale", torch.full((1,), float("nan"))),
        ("m.weight_scale", torch.full((1,), float("inf"))),
        ("m.weight_scale", torch.full((1,), 1e-40)),
        ("m.weight_scale", torch.ones(N)),
        ("m.weight_scale", torch.ones(1, dtype=torch.int32)),
        ("m.weight_scale", None),
    ],
)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors = layer()[0]
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=r"m\.weight"):
        read(reader(), tensors)
