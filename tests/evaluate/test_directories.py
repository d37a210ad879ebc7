"""Evaluating models in directories, compared with the same models in memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")

import bitport as bp
from bitport.checkpoint import quantize_files
from bitport.checkpoint.source import Source
from bitport.errors import ArgumentError, CheckpointError
from bitport.evaluate import directories, divergence, perplexity
from bitport.evaluate.directories import Evaluation, How, evaluate_directories
from bitport.evaluate.layers import ROWS, SampledRows, layer_errors, sampled
from bitport.integrations.huggingface import load_model, load_tokenizer, logits_of, token_ids
from bitport.numerics import sqnr
from bitport.numerics.activations import fake_quantize

from ..integrations.models import TEXT, make_directory, make_tokenizer, transformers
from ..integrations.zoo import ENCODER

HOW = How(window=64, stride=48, max_tokens=200, batch=2, dtype=torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An original with an untied head, and two quantized versions of it."""
    folder = tmp_path_factory.mktemp("models")
    original = make_directory(folder / "llama", tie_word_embeddings=False)
    made = {"int4": "int4", "mixed": {"*.q_proj": "int4-int8", "model.embed_tokens": "int8", "*.mlp.*": "int3-g32"}}
    for name, recipe in made.items():
        quantize_files(original, folder / name, recipe)
    return [original, folder / "int4", folder / "mixed"]


@pytest.fixture(scope="module")
def rows(models: list[Path]) -> list[Evaluation]:
    return list(evaluate_directories(models, TEXT, HOW, layers=True))


def test_figures_are_those_of_the_models_in_memory(models: list[Path], rows: list[Evaluation]) -> None:
    tokens = token_ids(load_tokenizer(models[0]), TEXT)[:200]
    logits = [logits_of(load_model(directory, dtype=torch.float32)) for directory in models]
    options: dict[str, Any] = {"window": 64, "stride": 48, "batch": 2}
    assert rows[0].divergence is None
    for row, one in zip(rows, logits, strict=True):
        assert (row.perplexity, row.scored) == (perplexity(one, tokens, **options).value, 199)
        assert row.change_percent == pytest.approx(100 * (row.perplexity / rows[0].perplexity - 1), abs=1e-9)
    for row, one in zip(rows[1:], logits[1:], strict=True):
        assert row.divergence == divergence(logits[0], one, tokens, **options)
        assert row.divergence.kl > 0
        assert 0 < row.divergence.top1 < 1


def test_errors_of_weights_are_those_that_quantize_reports(models: list[Path], rows: list[Evaluation]) -> None:
    model = load_model(models[0])
    told = {layer.name: layer.sqnr for layer in bp.quantize_(model, "int4").quantized}
    report = rows[1].layers
    assert report is not None
    assert {layer.name: layer.sqnr for layer in report.quantized} == pytest.approx(told, rel=1e-12)
    assert {layer.name for layer in report.skipped} == {"model.embed_tokens.weight", "lm_head.weight"} - set(told)
    assert report.bytes_before == rows[0].nbytes / 2, "the files hold bfloat16, the model computes in float32"
    assert rows[0].layers is None


def test_errors_of_weights_that_the_files_have_in_pieces(tmp_path: Path) -> None:
    """Experts are one by one in the files of Mixtral, and a stack in the model."""
    torch.manual_seed(0)
    fields = {"num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0, **ENCODER}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=320, **fields)).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    assert any(name.endswith("experts.0.w1.weight") for name in Source(tmp_path).tensors)
    model = load_model(tmp_path)
    with torch.no_grad(), sampled(model) as seen:
        logits_of(model)(torch.arange(64)[None])
    told = {layer.name: layer.sqnr for layer in bp.quantize_(model, "int4").quantized}
    report = layer_errors(model, tmp_path, seen)
    assert {layer.name: layer.sqnr for layer in report.quantized} == pytest.approx(told, rel=1e-12)
    assert all(layer.output_sqnr is not None for layer in report.quantized)


def test_errors_of_outputs(models: list[Path], rows: list[Evaluation]) -> None:
    """Against float64, including inputs rounded to int8; float32 sums of 128 products over 64 rows."""
    original, mixed = load_model(models[0], dtype=torch.float32), load_model(models[2], dtype=torch.float32)
    tokens = token_ids(load_tokenizer(models[0]), TEXT)[None, :64]
    report = rows[2].layers
    assert report is not None
    errors = {layer.name: layer.output_sqnr for layer in report.quantized}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        x, exact, q = (
            _input(original, name, tokens),
            original.get_submodule(name).weight,
            mixed.get_submodule(name).weight,
        )
        seen = fake_quantize(x, q.scheme.act) if q.scheme.act else x
        wanted = x.double() @ exact.double().t()
        got = seen.double() @ q.dequantize(torch.float32).double().t()
        judge = 20 * torch.log10(wanted.norm() / (wanted - got).norm())
        assert errors[f"{name}.weight"] == pytest.approx(judge.item(), abs=1e-3)
    assert errors["model.embed_tokens.weight"] is None, "a lookup is no product"


@pytest.mark.parametrize("scheme", ["int8-dyn", "mxfp8", "int4-g32"])
def test_errors_of_outputs_behind_a_scale_and_an_order_of_the_input(scheme: str, tmp_path: Path) -> None:
    """Against the float32 product itself, where inputs are rounded in the order and scale in which they meet the
    codes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 48, bias=False)), torch.randn(30, 64) * torch.logspace(-1, 1, 64)
    save_file({"0.weight": model[0].weight.detach()}, tmp_path / "model.safetensors")
    pre_scale, perm = 1 / x.abs().amax(0), torch.randperm(64)
    with sampled(model) as seen:
        exact = model(x).detach()
    q = bp.quantize_tensor((model[0].weight.detach() / pre_scale)[:, perm], scheme)
    q = q.replace(pre_scale=pre_scale, perm=perm.to(torch.int32))
    model[0].weight = nn.Parameter(q, requires_grad=False)
    (layer,) = layer_errors(model, tmp_path, seen).layers
    assert layer.output_sqnr == pytest.approx(float(sqnr(exact, model(x))), abs=0.01)


def _input(model: Any, name: str, tokens: Tensor) -> Tensor:
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    logits_of(model)(tokens)
    hook.remove()
    return seen[0].flatten(0, -2)


def test_few_rows_of_each_input_are_kept(models: list[Path]) -> None:
    model = load_model(models[0])
    with torch.no_grad(), sampled(model) as seen:
        logits_of(model)(torch.arange(200)[None])
        logits_of(model)(torch.arange(10)[None])
    kept = {len(x) for name, rows in seen.items() if "embed" not in name for x in rows.kept.values()}
    assert kept == {ROWS}
    rows = SampledRows()
    rows.add(torch.arange(1000.0)[:, None])
    assert rows.kept[()][0] == 0, "from the first to the last"
    assert rows.kept[()][-1] == 999


def test_what_has_no_counterpart_is_told(models: list[Path], tmp_path: Path) -> None:
    other = make_directory(tmp_path / "small", num_hidden_layers=1, tie_word_embeddings=False)
    report = layer_errors(load_model(models[1]), other, {})
    assert {"layers.1." in layer.name for layer in report.quantized if layer.sqnr is None} == {True}
    assert all("have no tensor of this name" in layer.note for layer in report.quantized if layer.sqnr is None)
    narrow = make_directory(tmp_path / "narrow", intermediate_size=128, tie_word_embeddings=False)
    told = {layer.name: layer.note for layer in layer_errors(load_model(models[1]), narrow, {}).layers}
    assert "[256, 128] here, [128, 128] in the original" in told["model.layers.0.mlp.up_proj.weight"]


def test_one_model_is_in_memory_at_a_time(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []

    def loading(*args: Any) -> Any:
        gc.collect()
        assert [ref for ref in alive if ref() is not None] == []
        model = load_model(*args)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(directories, "load_model", loading)
    lines: list[str] = []
    assert len(list(evaluate_directories(models, TEXT, HOW, layers=True, tell=lines.append))) == 3
    assert len(alive) == 3
    [line] = [line for line in lines if "in memory" in line]
    assert "one model is in memory at a time" in line
    assert "254.7 kB" in line, "199 tokens of 320 logits in float32"


def test_other_tokens_are_refused(models: list[Path], tmp_path: Path) -> None:
    other = make_directory(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        tokenizer.replace('"a":', '"b_":').replace('"b":', '"a":').replace('"b_":', '"b":')
    )
    with pytest.raises(ArgumentError, match="different tokens"):
        list(evaluate_directories([models[0], other], TEXT, HOW))


def test_a_directory_that_is_missing_is_told_before_any_is_measured(models: list[Path], tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ArgumentError, match="nowhere is not a directory"):
        next(evaluate_directories([models[0], tmp_path / "nowhere"], TEXT, HOW, tell=lines.append))
    assert lines == []


def test_layers_need_the_files_of_an_original(models: list[Path]) -> None:
    with pytest.raises(CheckpointError, match="give the original model"):
        next(evaluate_directories([models[1], models[2]], TEXT, HOW, layers=True))


def test_speed_is_measured_where_asked_for(models: list[Path], rows: list[Evaluation]) -> None:
    assert rows[0].tokens_per_second is None
    [row] = evaluate_directories(models[:1], TEXT, How(window=64, max_tokens=70, new_tokens=2))
    assert row.tokens_per_second is not None
    assert row.tokens_per_second > 0


def test_speed_is_not_measured_beyond_the_positions_of_a_model(tmp_path: Path) -> None:
    """The last new token is not fed back, so it needs no position."""
    directory = make_directory(tmp_path / "short", max_position_embeddings=40)
    lines: list[str] = []
    [row] = evaluate_directories([directory], TEXT, How(window=32, max_tokens=70, new_tokens=9))
    assert row.tokens_per_second is not None
    with pytest.raises(ArgumentError, match=r"short supports 40 positions, .* after the 32 .* give --speed at most 9"):
        next(evaluate_directories([directory], TEXT, How(window=32, max_tokens=70, new_tokens=10), tell=lines.append))
    assert lines == [f"evaluating {directory}"], "before anything was measured"
