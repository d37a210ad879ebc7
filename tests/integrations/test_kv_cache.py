"""transformers models with a quantized cache: the same numbers as with tokens rounded by definition, for every
architecture, attention implementation, split into steps and way of generating."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.cache import CacheFormat, cache_format
from bitport.errors import ArgumentError
from bitport.integrations.cache_name import with_cache
from bitport.numerics import quantize_dequantize, sqnr

from . import sizes

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
kv_cache = pytest.importorskip("bitport.integrations.kv_cache")
cache_attention = pytest.importorskip("bitport.integrations.cache_attention")
KVCache = kv_cache.KVCache

SMALL = {**sizes.SMALL, "max_position_embeddings": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
}
ARCHITECTURES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    "gemma3-sliding": (
        "Gemma3TextConfig",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3-next-hybrid": ("Qwen3NextConfig", {**MOE, **LINEAR}),
    "lfm2-convolution": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "deepseek-v3-latent": ("DeepseekV3Config", LATENT),
}
"""In each of these a layer keeps all tokens; in the last one keys and values differ in width."""


def model_of(name: str = "llama", **changes: Any) -> Any:
    config, fields = ARCHITECTURES[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SMALL, **fields, **changes})
    return transformers.AutoModelForCausalLM.from_config(made).float().eval()


class Rounded(transformers.cache_utils.DynamicLayer):  # type: ignore[misc, name-defined]
    """Tokens are rounded by definition as they arrive, and kept as floats."""

    format: CacheFormat

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys = quantize_dequantize(keys, self.format.keys)
        return super().update(keys, quantize_dequantize(values, self.format.values))  # type: ignore[no-any-return]


def rounded_cache(model: Any, name: str) -> Any:
    cache = KVCache(model.config, name)
    for at, layer in enumerate(cache.layers):
        if isinstance(layer, kv_cache.Layer):
            cache.layers[at] = Rounded()
            cache.layers[at].format = cache_format(name)
    return cache


IDS = torch.arange(44).reshape(2, 22) * 5 % 96
PADDED = torch.ones(2, 22, dtype=torch.long)
PADDED[0, :5] = 0


@torch.no_grad()
def logits(model: Any, cache: Any, *steps: int, mask: Tensor = PADDED) -> Tensor:
    found, at = [], 0
    for step in steps or (22,):
        seen = {"attention_mask": mask[:, : at + step], **with_cache(model, cache)}
        found.append(model(IDS[:, at : at + step], **seen).logits)
        at += step
    return torch.cat(found, 1)[mask.bool()]


@torch.no_grad()
def generated(model: Any, cache: Any = None, **options: Any) -> Tensor:
    made: Tensor = model.generate(
        IDS,
        attention_mask=PADDED,
        max_new_tokens=12,
        pad_token_id=0,
        **{"do_sample": False, **options},
        **({} if cache is None else with_cache(model, cache)),
    )
    return made


def every_attention(test: Any) -> Any:
    """Of each architecture, in some formats."""
    for axis, values in (
        ("name", ARCHITECTURES),
        ("format", ["int8", "int4-g16", "fp8-wo"]),
        ("attention", ["eager", "sdpa", "bitport"]),
    ):
        test = pytest.mark.parametrize(axis, values)(test)
    return test


def assert_logits_are_those_of_rounded_tokens(name: str, format: str, attention: str, make: Any) -> None:
    """In float32 with two layers, only the order of sums differs: 90 dB of 144."""
    model = model_of(name)
    wanted = logits(model, rounded_cache(model, format), 15, 1, 6)
    model.set_attn_implementation(attention)
    assert float(sqnr(wanted, logits(model, make(model.config, format), 15, 1, 6))) > 90


@every_attention
def test_logits_are_those_of_rounded_tokens(name: str, format: str, attention: str) -> None:
    assert_logits_are_those_of_rounded_tokens(name, format, attention, KVCache)


OWN_ATTENTION = {
    "gemma2-soft-cap": ("Gemma2Config", {"sliding_window": 8}),
    "gpt-oss-sinks": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "bloom-biases": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_cannot_have_another_attention_keeps_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, name, OWN_ATTENTION[name])
    model = model_of(name)
    own = model.config._attn_implementation  # "sdpa" in transformers 5.20 for gemma2, "eager" in later versions
    wanted = logits(model, rounded_cache(model, "int8"), 15, 7)
    got = logits(model, KVCache.of(model, "int8"), 15, 7)
    assert own == "eager" or (name, own) == ("gemma2-soft-cap", "sdpa")
    assert model.config._attn_implementation == own
    assert float(sqnr(wanted, got)) > 90


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cache_of_floats_changes_nothing(name: str) -> None:
    model = model_of(name)
    wanted, text = logits(model, None), generated(model)
    cache = KVCache.of(model, "float")
    assert model.config.get_text_config(decoder=True)._attn_implementation == "bitport"
    assert float(sqnr(wanted, logits(model, cache, 15, 7))) > 90
    assert torch.equal(generated(model, KVCache.of(model, "float")), text)


@pytest.mark.parametrize("format", ["int8", "int4-g16", "nf4-g16:fp8-wo"])
def test_the_steps_make_no_difference(format: str) -> None:
    """If no token stays in float, each is read in its quantized form from the first step on."""
    model = model_of()
    whole = logits(model, KVCache.of(model, format))
    for steps in ((1,) * 22, (15, 7)):
        assert float(sqnr(whole, logits(model, KVCache.of(model, format), *steps))) > 90


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-4},
        {"prefill_chunk_size": 6},
    ],
    ids=["beams", "returned-beams", "returned", "chunks"],
)
def test_ways_of_generating(options: dict[str, Any]) -> None:
    """The generated text is that of a cache of tokens rounded by definition."""
    model = model_of()
    wanted = generated(model, rounded_cache(model, "int8"), **options)
    assert torch.equal(generated(model, KVCache.of(model, "int8"), **options), wanted)


def test_tokens_that_were_guessed_wrongly_are_taken_back() -> None:
    model = model_of()
    options = {"pad_token_id": 0, "do_sample": False, "max_new_tokens": 24}
    ids = IDS[1:].repeat(1, 2)
    with torch.no_grad():
        wanted = model.generate(ids, **with_cache(model, rounded_cache(model, "int8")), **options)
        cache = KVCache.of(model, "int8")
        got = model.generate(ids, **with_cache(model, cache), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(wanted, got)
    assert cache.get_seq_length() < got.shape[1] + 4


def test_weights_may_be_quantized_too() -> None:
    model = model_of()
    bp.quantize_(model, "int4-g16")
    wanted = logits(model, rounded_cache(model, "int4-g16"), 15, 7)
    assert float(sqnr(wanted, logits(model, KVCache.of(model, "int4-g16"), 15, 7))) > 80


def test_layers_of_bounded_memory_stay_as_they_are() -> None:
    model = model_of("gemma3-sliding")
    cache = KVCache.of(model, "int8")
    logits(model, cache)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "Layer"]
    tokens, heads, width = 22, 2, 16
    assert cache.nbytes == 2 * 2 * heads * tokens * (width + 4)  # keys and values, two sequences, a float32 scale


@pytest.mark.parametrize(
    ("config", "fields", "says"),
    [
        ("MistralConfig", {**SMALL, "sliding_window": 8}, "no layer of mistral keeps every token"),
        ("MambaConfig", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}, "no layer of mamba"),
        ("T5Config", {}, "t5 has an encoder and a decoder"),
        ("FalconH1Config", SMALL, "falcon_h1 has layers that a quantized cache does not know"),
    ],
)
def test_models_that_it_is_not_for(config: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        KVCache(getattr(transformers, config)(**fields), "int8")


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    fields = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**fields))
    with pytest.raises(ArgumentError, match="MiniMaxForCausalLM takes only a cache of its own kind"):
        KVCache.of(model)


def test_a_model_in_the_place_of_its_configuration_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"KVCache.of\(model, ..\) a model, not Llama"):
        KVCache(model_of(), "int8")
    with pytest.raises(ArgumentError, match=r"KVCache.of\(model, ..\) a model, not Linear"):
        KVCache.of(nn.Linear(3, 3), "int8")


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_attention_that_it_cannot_compute_is_refused(name: str) -> None:
    x = torch.ones(1, 2, 3, 16)
    with pytest.raises(ArgumentError, match=f'has no {name}: use attn_implementation="eager"'):
        cache_attention.attention(None, x, x, x, None, **{name: 30.0})


def test_keys_of_a_step_that_is_over_are_refused() -> None:
    model = model_of()
    layer = KVCache.of(model, "int8").layers[0]
    x = torch.randn(1, 2, 3, 16)
    keys, _ = layer.update(x, x)
    assert torch.equal(keys + 0, layer.store.dense_keys())
    assert keys.shape == (1, 2, 3, 16)
    layer.update(x, x)
    with pytest.raises(ArgumentError, match="a step that ended at token 3, and the cache holds 6"):
        keys + 0


def test_nothing_is_written_into_keys_of_the_cache() -> None:
    layer = KVCache.of(model_of(), "int8").layers[0]
    keys, _ = layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    with pytest.raises(ArgumentError, match=r"add_.* would write into keys or values of a quantized cache: .* clone"):
        keys.add_(1)
    dense = layer.store.dense_keys()
    for write in (lambda: torch.mul(dense, 2, out=keys), lambda: torch._foreach_add_([dense, keys], 1)):
        with pytest.raises(ArgumentError, match="would write into keys or values of a quantized cache"):
            write()
    assert torch.equal(torch.zeros(keys.shape).copy_(keys), dense)


def test_keys_of_the_cache_can_be_read_by_ops_that_write_elsewhere() -> None:
    layer = KVCache.of(model_of(), "int8").layers[0]
    keys, _ = layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    twice, sums = torch.empty(1, 2, 3, 16), torch.ones(1, 2, 3, 16)
    assert torch.mul(keys, 2, out=twice) is twice
    assert torch.equal(twice, layer.store.dense_keys() * 2)
    torch._foreach_add_([sums], [keys])
    assert torch.equal(sums, layer.store.dense_keys() + 1)


def test_keys_and_values_can_be_read_as_floats() -> None:
    """Tokens that stay in float are those of transformers, apart from the order of sums."""
    model = model_of()
    ours, theirs = KVCache(model.config, "int8+first64"), transformers.DynamicCache(config=model.config)
    assert [layer[:2] for layer in ours] == [(None, None)] * len(ours.layers)
    for cache in (ours, theirs):
        logits(model, cache)
    for (keys, values, _), (their_keys, their_values, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(keys, their_keys)
        torch.testing.assert_close(values, their_values)
    with pytest.raises(ArgumentError, match="cannot be assigned: update"):
        ours.layers[0].keys = keys


def test_a_cache_that_is_reset_starts_anew() -> None:
    model = model_of()
    cache = KVCache.of(model, "int8")
    first = logits(model, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits(model, cache), first)


def test_without_a_quantized_cache_the_attention_is_that_of_sdpa() -> None:
    model = model_of()
    wanted = logits(model, None)
    KVCache.of(model)
    assert torch.equal(logits(model, None), wanted)
