"""Rotations of every size, in every model that allows them, without changing what it computes."""

from __future__ import annotations

import copy

import pytest
import torch

import bitport
from bitport.algorithms import Rotate
from bitport.algorithms.rotation_core import Rotation, factors, hadamard, hadamard_product, is_known
from bitport.algorithms.solving import uses_data
from bitport.numerics import quantize, sqnr
from bitport.schemes import preset

from .families import batch_of, model_of, output, plant_outliers, transformers
from .weights import value

ORDERS = [order for order in range(1, 130) if is_known(order)]


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices(order: int) -> None:
    matrix = hadamard(order).double()
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.t(), order * torch.eye(order, dtype=torch.float64))


def test_sizes_of_common_models_need_no_blocks() -> None:
    """Including 12, 20, 28 and 36 times a power of two."""
    assert {12, 20, 28, 36, 44, 60, 68, 76, 84, 108} <= set(ORDERS)
    sizes = (64, 80, 96, 128, 576, 768, 896, 1024, 1280, 1536, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 8192, 14336)
    for size in sizes:
        assert torch.tensor(factors(size)).prod() == size


@pytest.mark.parametrize("size", [1, 2, 6, 12, 64, 96, 172, 256, 768, 1792])
def test_products_of_small_matrices_are_the_large_one(size: int) -> None:
    """Orthogonal, and the same on every run of channels; float32 sums of at most 28 terms per factor."""
    matrix = hadamard_product(torch.eye(size)).double()
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-5)
    rotation = Rotation.random(size, 3)
    x = torch.randn(5, 2 * size)
    expected = (x.double().view(5, 2, size) * rotation.signs.double()) @ matrix
    torch.testing.assert_close(rotation.apply(x).double(), expected.view(5, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(rotation.apply(x.t(), 0), rotation.apply(x).t())


def test_outliers_are_spread() -> None:
    """One element in a hundred is forty times as large as the others; rounded to four bits in groups of 128."""
    w = torch.randn(32, 768)
    w = torch.where(torch.rand(32, 768) < 0.01, 40 * w, w)
    rotated, fmt = Rotation.random(768, 0).apply(w), preset("int4").weight
    errors = [sqnr(each, value(quantize(each, fmt), "int4", 32, 768)) for each in (w, rotated)]
    assert errors[1] > errors[0] + 3


ROTATED = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "qwen3-moe"), "residual stream"),
    "gemma2": "residual stream left: the output would change",
    "phi": "residual stream left: a LayerNorm subtracts the mean",
    "gpt2": "residual stream left: a LayerNorm subtracts the mean",
    "opt": "residual stream left: a LayerNorm subtracts the mean",
}
HEADS = {"llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "mixtral", "qwen3-moe", "gemma2", "phi", "opt", "gpt2"}


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotated_model_computes_what_it_did(name: str) -> None:
    """Float32 sums of 128 products over a few layers: 2^-24 sqrt(128) of each, 110 dB or more."""
    model = model_of(name)
    before, weights = output(model, name), {key: param.clone() for key, param in model.named_parameters()}
    told = Rotate(heads=True, untie=True).model_(model, [batch_of(name)])
    assert sqnr(before, output(model, name)) > 100
    first = next(note for key, note in told.items() if "v_proj" in key or "c_attn" in key or "qkv" in key)
    assert ROTATED[name] in first
    assert ("heads of 16" in first) == (name in HEADS)
    stream = ROTATED[name] == "residual stream"
    changed = {
        key for key, param in model.named_parameters() if key in weights and not torch.equal(param, weights[key])
    }
    assert any("embed" in key or "wte" in key for key in changed) == stream


def test_a_cache_that_a_model_always_uses_does_not_grow_from_run_to_run() -> None:
    """Flaubert creates one whatever its config says; each block starts from what it was given."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "emb_dim": 64, "n_layers": 2, "n_heads": 4}
    model = transformers.FlaubertWithLMHeadModel(transformers.FlaubertConfig(**sizes)).eval()
    before = output(model, "flaubert")
    Rotate(heads=True, untie=True).model_(model, [batch_of("flaubert")])
    assert sqnr(before, output(model, "flaubert")) > 100


def test_a_head_that_is_the_embedding_is_kept_or_parted() -> None:
    model = model_of("gemma")
    other = copy.deepcopy(model)
    before = output(model, "gemma")
    assert "untie them" in Rotate().model_(model, [batch_of("gemma")])["lm_head.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    Rotate(untie=True).model_(other, [batch_of("gemma")])
    assert other.lm_head.weight is not other.model.embed_tokens.weight
    assert not other.config.tie_word_embeddings
    assert sqnr(before, output(other, "gemma")) > 100


def test_a_head_that_was_parted_is_in_the_report() -> None:
    """As documented in docs/transforms.md; gemma's head is tied to its embedding until the rotation unties them."""
    model = model_of("gemma")
    report = bitport.quantize_(
        model, "int8", algorithm=(Rotate(untie=True), "smooth"), calibrate=[batch_of("gemma")], measure=False
    )
    layers = {layer.name: layer for layer in report.layers}
    assert not layers["lm_head.weight"].tied
    assert "rotate+smooth has untied it since: call quantize_ again" in layers["lm_head.weight"].reason
    again = bitport.quantize_(model, {"lm_head": "int4", "*": "skip"}, measure=False)
    assert [layer.name for layer in again.quantized if layer.algorithm] == ["lm_head.weight"]
    assert layers["model.layers.0.mlp.down_proj.weight"].scheme == "int8"


def test_tables_that_are_tied_are_rotated_once() -> None:
    """Such as those of CSM's backbone and depth decoder."""
    model = model_of("llama")
    table = model.model.embed_tokens.weight
    model.more = torch.nn.Embedding(*table.shape)
    model.more.weight = table
    before, as_it_was = output(model, "llama"), table.clone()
    told = Rotate().model_(model, [batch_of("llama")])
    assert "residual stream" in told["model.layers.0.mlp.up_proj.weight"]
    assert "residual stream left" not in told["model.layers.0.mlp.up_proj.weight"]
    assert model.more.weight is model.model.embed_tokens.weight
    assert not torch.equal(table, as_it_was)
    assert sqnr(before, output(model, "llama")) > 100


@pytest.mark.parametrize("norm", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_a_norm_that_cannot_be_folded_is_named(norm: str) -> None:
    model = model_of("llama")
    model.get_parameter(norm).data[3] = 0
    before = model.get_parameter(norm).clone()
    told = Rotate().model_(model, [batch_of("llama")])["model.layers.0.mlp.up_proj.weight"]
    assert told == f"residual stream left: {norm} holds zeros and cannot be folded into what it feeds"
    assert torch.equal(model.get_parameter(norm), before)


def test_the_seed_decides() -> None:
    models = [model_of("llama") for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        Rotate(seed=seed).model_(model, [batch_of("llama")])
    first, again, other = (model.get_parameter("model.layers.0.mlp.down_proj.weight") for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_planted_outliers_hurt_less(name: str) -> None:
    """One weight in a hundred is ten times as large as the others: rounding to four bits has less error for every
    weight, and for the model."""
    model = model_of(name)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.dim() > 1 and "embed" not in key:
                param *= 0.25  # attention far from saturation, where the output would reveal nothing
                param[torch.rand(param.shape) < 0.01] *= 10
    before, reports, errors = output(model, name), {}, {}
    for how in ("rtn", "rotate"):
        other = copy.deepcopy(model)
        data = [batch_of(name, 4)] if uses_data(how, "int4-channel") else None
        reports[how] = bitport.quantize_(other, "int4-channel", algorithm=how, calibrate=data)
        errors[how] = sqnr(before, output(other, name))
    for plain, rotated in zip(reports["rtn"].quantized, reports["rotate"].quantized, strict=True):
        assert plain.sqnr is not None
        assert rotated.sqnr is not None
        assert rotated.sqnr > plain.sqnr
        assert "rotate: " in rotated.note
    assert errors["rotate"] > errors["rtn"] + 1


def test_steps_in_a_row() -> None:
    """SmoothQuant puts its scales into the norms that the rotation has emptied; GPTQ sees the inputs after both."""
    model, errors = model_of("llama"), {}
    plant_outliers(model, "llama")
    before = output(model, "llama")
    for how in (("rtn",), ("smooth", Rotate(heads=True), "gptq")):
        other = copy.deepcopy(model)
        data = [batch_of("llama", 8)] if uses_data(how, "int8-dyn") else None
        report = bitport.quantize_(other, "int8-dyn", algorithm=how, calibrate=data)
        errors[len(how)] = sqnr(before, output(other, "llama"))
    assert errors[3] > errors[1] + 3
    told = next(layer for layer in report.layers if layer.name == "model.layers.0.self_attn.o_proj.weight")
    assert told.algorithm == "smooth+rotate+gptq"
    assert "rotate: heads of 16, residual stream; smooth: self_attn.v_proj.weight takes a scale" in told.note
