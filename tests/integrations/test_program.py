"""Models of transformers as programs: those whose numbers a program can have, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitport.errors import ArgumentError, ExportError

from .models import config, transformers
from .zoo import DECODER, IMAGES, ids

from bitport.integrations.cache_name import with_cache  # isort: skip
from bitport.integrations.kv_cache import KVCache, Layer  # isort: skip
from bitport.integrations.program import causal_lm  # isort: skip
from bitport.integrations.runtimes import with_past, with_state  # isort: skip

WINDOW = 16


def model_of(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(fields.pop("config")(**fields)).eval()


def assert_same_logits(model: Any, capacity: int | None, length: int) -> None:
    """Both in float32, with sums in another order: half of the digits."""
    methods, meta = causal_lm(model, capacity)
    prefill, given = methods["prefill"], ids(length)[:1]
    with torch.no_grad():
        wanted = model(input_ids=given).logits[:, -1]
        cache = [torch.zeros_like(part) for part in prefill.args[2]]
        found = prefill.module(given, torch.arange(length), cache)
    assert length <= meta["capacity"]
    atol = float(wanted.abs().max()) * torch.finfo(torch.float32).eps ** 0.5
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("MistralForCausalLM", {"config": transformers.MistralConfig}),
        ("Gemma3ForCausalLM", {"config": transformers.Gemma3TextConfig, "num_hidden_layers": 6}),
    ],
    ids=["every layer", "five layers of six"],
)
def test_a_sliding_window_limits_the_cache(kind: str, fields: dict[str, Any]) -> None:
    """Up to there it is full attention; behind it a program computed with all that came before."""
    model = model_of(kind, **{**DECODER, **fields, "sliding_window": WINDOW, "max_position_embeddings": 64})
    assert causal_lm(model)[1]["capacity"] == WINDOW
    assert_same_logits(model, WINDOW, WINDOW)
    for make in (causal_lm, with_state):
        with pytest.raises(ArgumentError, match=f"give 6 to {WINDOW}, .*, without a sliding window"):
            make(model, WINDOW + 1)
    with pytest.raises(ExportError, match=f"a sliding window of {WINDOW} positions, and an ONNX model has no limit"):
        with_past(model)


OWN_ATTENTION = {
    "llama": ("LlamaForCausalLM", {"config": transformers.LlamaConfig}),
    "gemma2-soft-cap": ("Gemma2ForCausalLM", {"config": transformers.Gemma2Config, "sliding_window": 64}),
    "gpt-oss-sinks": (
        "GptOssForCausalLM",
        {"config": transformers.GptOssConfig, "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_whose_attention_adds_its_mask(name: str) -> None:
    kind, fields = OWN_ATTENTION[name]
    assert_same_logits(model_of(kind, **{**DECODER, **fields}), 40, 20)


@pytest.mark.parametrize("format", ["int8", "int4-g16-asym:int8", "fp8-wo"])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_quantized_cache(name: str, format: str) -> None:
    """The logits of a prompt and two more tokens are those of the growing cache; half of the digits, as above. Models
    with an attention of their own are given floats."""
    kind, fields = OWN_ATTENTION[name]
    model = model_of(kind, **{**DECODER, **fields})
    methods, meta = causal_lm(model, 40, kv_cache=format)
    assert meta["kv_cache"] == format
    decode, given = methods["decode"], ids(12)[:1]
    cache = [torch.zeros_like(part) for part in decode.args[2]]
    assert len(cache) == (5 if "asym" in format else 4) * DECODER["num_hidden_layers"]
    growing = KVCache(model.config, format)
    for layer in range(len(growing.layers)):  # those with a window too: all of them are quantized in a program
        growing.layers[layer] = Layer(growing.format, model.config)
    for at, step in ((0, given[:, :10]), (10, given[:, 10:11]), (11, given[:, 11:])):
        with torch.no_grad():
            found = decode.module(step, torch.arange(at, at + step.shape[1]), cache)
            wanted = model(step, **with_cache(model, growing)).logits[:, -1]
        atol = float(wanted.abs().max()) * torch.finfo(torch.float32).eps ** 0.5
        torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def test_a_cache_that_keeps_tokens_in_float_is_refused() -> None:
    model = model_of("LlamaForCausalLM", config=transformers.LlamaConfig, **DECODER)
    with pytest.raises(ArgumentError, match=r"int8\+last64 keeps some in float until later"):
        causal_lm(model, kv_cache="int8+last64")


@pytest.mark.parametrize("ends", [7, [7, 9]])
def test_a_program_ends_where_the_model_does(ends: int | list[int]) -> None:
    """By generation_config.json: config.json may name another token, or one of several."""
    model = model_of("LlamaForCausalLM", config=transformers.LlamaConfig, **DECODER, eos_token_id=1)
    assert causal_lm(model)[1]["eos"] == 1
    model.generation_config.eos_token_id = ends
    assert causal_lm(model)[1]["eos"] == ends


def test_a_model_that_asks_whether_its_cache_is_ready() -> None:
    if not hasattr(transformers, "HrmTextForCausalLM"):
        pytest.skip("this transformers has no such model")
    model = model_of("HrmTextForCausalLM", config=transformers.HrmTextConfig, **DECODER)
    assert_same_logits(model, 64, 40)
    assert with_state(model, 64)
    assert with_past(model)


def test_a_model_that_sees_images_too_is_its_decoder() -> None:
    said = {"vision_config": transformers.CLIPVisionConfig(**IMAGES), "text_config": config(dtype="float32")}
    model = model_of("LlavaForConditionalGeneration", config=transformers.LlavaConfig, image_token_index=319, **said)
    assert causal_lm(model)[1] == {"kind": "causal-lm", "capacity": 256, "eos": 0, "kv_cache": None}
    assert_same_logits(model, 64, 40)
    assert with_past(model)[1][:2] == ["input_ids", "past_key_values.0.key"]


@pytest.mark.parametrize(
    ("kind", "config", "fields", "says"),
    [
        ("MambaForCausalLM", "MambaConfig", {}, "keeps what it has seen as LinearAttentionLayer"),
        (
            "OPTForCausalLM",
            "OPTConfig",
            {"ffn_dim": 96, "word_embed_proj_dim": 64},
            "asks its cache how many positions it holds",
        ),
        ("MiniMaxForCausalLM", "MiniMaxConfig", {}, "keeps what it has seen as MiniMaxCache"),
    ],
)
def test_what_a_program_cannot_have_is_refused(kind: str, config: str, fields: dict[str, Any], says: str) -> None:
    said = {**DECODER, **fields, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = model_of(kind, config=getattr(transformers, config), **said)
    for make in (causal_lm, with_past, with_state):
        with pytest.raises(ExportError, match=f"{says}.*: only models with full attention"):
            make(model)
