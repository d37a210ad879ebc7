"""FBGEMM float8 files against numbers of ml_dtypes in float64, and against transformers' own layers."""

from __future__ import annotations

import dataclasses
import importlib
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from bitport.errors import BitportError, CheckpointError
from bitport.interop import fbgemm

from .files import assert_numbers, held, only, read

E4M3 = torch.float8_e4m3fn
CONFIG = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
N, K, E = 48, 80, 3
GATE_UP, DOWN = "l.experts.gate_up_proj", "l.experts.down_proj"


def codes_of(shape: tuple[int, ...], seed: int) -> tuple[Tensor, np.ndarray]:
    """Return (random float8 codes without NaN, the same in float64)."""
    codes = np.random.default_rng(seed).integers(0, 127, shape).astype(np.uint8)
    codes |= np.random.default_rng(seed + 1).integers(0, 2, shape).astype(np.uint8) << 7
    return torch.from_numpy(codes).view(E4M3), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def scale_of(shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng(9).uniform(1e-4, 1e-2, shape).astype(np.float32))


def layer() -> tuple[dict[str, Tensor], np.ndarray]:
    stored, value = codes_of((N, K), 0)
    scale = scale_of((N, 1))
    return {"m.weight": stored, "m.weight_scale": scale}, value * scale.double().numpy()


def experts() -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Experts in the layout of Llama 4: [E, K, N], with one scale per output."""
    gate_up, up_value = codes_of((E, K, 2 * N), 2)
    down, down_value = codes_of((E, N, K), 4)
    scales = scale_of((E, 1, 2 * N)), scale_of((E, K, 1))
    tensors = {GATE_UP: gate_up, f"{GATE_UP}_scale": scales[0], DOWN: down, f"{DOWN}_scale": scales[1]}
    values = {
        GATE_UP: up_value * scales[0].double().numpy(),
        DOWN: down_value * scales[1].double().numpy().transpose(0, 2, 1),
    }
    return tensors, values


def reader(**more: Any) -> fbgemm.Reader:
    return fbgemm.Reader({**CONFIG, **more}, torch.bfloat16)


def test_values_are_those_of_the_definition() -> None:
    tensors, value = layer()
    made = reader()
    q = only(made, {**tensors, "norm.weight": torch.ones(3)})
    assert (str(q.scheme), q.dtype, tuple(q.shape)) == ("fp8-wo", torch.bfloat16, (N, K))
    assert_numbers(q, value.astype(np.float32))
    assert made.notes == ["inputs are used as they are: no scheme cuts them off at 1200 before they are rounded"]


def test_stacked_experts() -> None:
    tensors, values = experts()
    found = read(reader(), tensors)
    assert found.keys() == values.keys()
    for name, q in found.items():
        assert (tuple(q.shape), q.transposed) == (values[name].shape, True)
        assert_numbers(q, values[name].astype(np.float32))


def test_bounds_of_layers_are_left_out() -> None:
    tensors, _ = layer()
    every = held({**tensors, "m.input_scale_ub": torch.tensor([1200.0])})
    made = reader()
    assert [weight.name for weight in made.weights(every)] == ["m.weight"]
    assert list(made.dropped(every)) == ["m.input_scale_ub"]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' layers with unrounded inputs and the product in float64, since FBGEMM's own product needs a GPU."""
    pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
    module = importlib.import_module("transformers.integrations.fbgemm_fp8")

    def rows(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return x, torch.ones(len(x))

    def product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, **_: Any) -> Tensor:
        assert (w.shape[1], *w_scale.shape) == (x.shape[1], len(w), 1)
        return (x * x_scale.unsqueeze(-1)) @ (w.double() * w_scale.double()).T

    monkeypatch.setattr(module, "quantize_fp8_per_row", rows, raising=False)
    monkeypatch.setattr(torch.ops, "fbgemm", types.SimpleNamespace(f8f8bf16_rowwise=product), raising=False)
    return module


def loaded(module: torch.nn.Module, prefix: str, tensors: dict[str, Tensor]) -> torch.nn.Module:
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    assert own.keys() == module.state_dict().keys()
    with torch.no_grad():
        for name, value in module.named_parameters():
            assert (value.shape, value.dtype) == (own[name].shape, own[name].dtype), name
            value.requires_grad_(False).copy_(own[name])
    return module


def test_a_layer_of_transformers(theirs: Any) -> None:
    tensors, value = layer()
    module = loaded(theirs.FbgemmFp8Linear(K, N, bias=False), "m.", tensors)
    x = torch.randn(5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = module(x)
    assert float((found - x @ torch.from_numpy(value).T).norm() / found.norm()) < K * 2**-52
    q = only(reader(), tensors)
    ours = torch.nn.functional.linear(x.float(), q).double()
    # A sum of K products in float32.
    assert float((ours - found).norm() / found.norm()) < K * 2**-24


def test_experts_of_transformers(theirs: Any) -> None:
    tensors, _ = experts()
    config = dataclasses.make_dataclass("Config", ["num_local_experts", "intermediate_size", "hidden_size"])(E, N, K)
    config.hidden_act = "silu"
    module = loaded(theirs.FbgemmFp8Llama4TextExperts(config), "l.experts.", tensors)
    x = torch.randn(E, 4, K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = module(x.reshape(-1, K)).reshape(x.shape)
    weights = {name: q.dequantize(torch.float32).double() for name, q in read(reader(), tensors).items()}
    gate, up = (x @ weights[GATE_UP]).chunk(2, -1)
    ours = (up * torch.nn.functional.silu(gate)) @ weights[DOWN]
    # Each weight was rounded to float32 once; the values of an output do not come close to cancelling.
    assert float((ours - found).norm() / found.norm()) < 2**-22


@pytest.mark.parametrize(
    "change",
    [
        {"activation_scale_ub": "1200"},
        {"activation_scale_ub": 0},
        {"activation_scale_ub": float("nan")},
        {"activation_scale_ub": float("inf")},
        {"activation_scale_ub": True},
        {"activation_scale_ub": 10**400},
        {"weight_block_size": [128, 128]},
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_errors(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(change))):
        reader(**change)


def test_the_bound_that_an_absent_one_stands_for() -> None:
    assert "at 1200 before" in fbgemm.Reader({"quant_method": "fbgemm_fp8"}, torch.bfloat16).notes[0]
    assert "at 800.5 before" in reader(activation_scale_ub=800.5).notes[0]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("m.weight", torch.zeros(N, K)),
        ("m.weight", torch.zeros(N, K, dtype=torch.int8)),
        ("m.weight", torch.zeros(N, K).to(torch.float8_e5m2)),
        ("m.weight", torch.zeros(0, K).to(E4M3)),
        ("m.weight", torch.zeros(2, N, K).to(E4M3)),
        ("m.weight", None),
        ("m.weight_scale", torch.zeros(N)),
        ("m.weight_scale", torch.zeros(1, 1)),
        ("m.weight_scale", torch.zeros(1, N)),
        ("m.weight_scale", torch.zeros(N, 1).bfloat16()),
        ("m.weight_scale", None),
        ("m.other", torch.zeros(N, K).to(E4M3)),
        (GATE_UP, torch.zeros(K, 2 * N).to(E4M3)),
        (GATE_UP, torch.zeros(E, 2 * N, K).to(E4M3)),
        (GATE_UP, None),
        (f"{GATE_UP}_scale", torch.zeros(E, 2 * N, 1)),
        (f"{GATE_UP}_scale", None),
        (f"{DOWN}_scale", torch.zeros(E, 1, K)),
        (f"{DOWN}_scale", torch.zeros(E, N, 1)),
    ],
)
def test_damaged_tensors_are_errors(name: str, tensor: Tensor | None) -> None:
    tensors = {**layer()[0], **experts()[0]}
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BitportError, match=name.removesuffix("_scale").rpartition(".")[0]):
        read(reader(), tensors)
