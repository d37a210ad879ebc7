"""transformers models with a quantized cache of a fixed size: the numbers of tokens rounded by definition, eager and
compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bitport.errors import ArgumentError
from bitport.integrations.cache_name import with_cache
from bitport.numerics import sqnr
from tests.turns import slow

from .test_kv_cache import (
    IDS,
    SMALL,
    assert_logits_are_those_of_rounded_tokens,
    every_attention,
    generated,
    kv_cache,
    logits,
    model_of,
    rounded_cache,
)

transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
StaticKVCache = kv_cache.StaticKVCache


@every_attention
def test_logits_are_those_of_rounded_tokens(name: str, format: str, attention: str) -> None:
    make = functools.partial(StaticKVCache, max_cache_len=40)
    assert_logits_are_those_of_rounded_tokens(name, format, attention, make)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "temperature": 1e-4}],
    ids=["greedy", "beams", "returned"],
)
def test_ways_of_generating(options: dict[str, Any]) -> None:
    model = model_of()
    wanted = generated(model, rounded_cache(model, "int8"), **options)
    assert torch.equal(generated(model, StaticKVCache.of(model, "int8", max_cache_len=40), **options), wanted)


@pytest.mark.filterwarnings("error:Dynamo detected a call")
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "bitport"), *slow(("llama", "sdpa"), ("gemma3-sliding", "bitport"), ("deepseek-v3-latent", "bitport"))],
)
def test_compiled_in_one_graph(name: str, attention: str) -> None:
    """Prompt and steps, the making of the memory too."""
    model = model_of(name)
    wanted = generated(model, rounded_cache(model, "int4-g16"))
    cache = StaticKVCache.of(model, "int4-g16", max_cache_len=40)
    model.set_attn_implementation(attention)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(generated(model, cache), wanted)
    for stance in ("default", "fail_on_recompile"):  # the first compiles a prompt for memory that exists
        cache.reset()
        with torch.compiler.set_stance(stance):
            assert torch.equal(generated(model, cache), wanted)


def test_a_prompt_without_a_mask() -> None:
    """transformers leaves it out where "sdpa" needs none; the places behind the prompt are hidden all the same."""
    model = model_of()
    wanted = model(IDS, **with_cache(model, rounded_cache(model, "int8"))).logits
    got = model(IDS, **with_cache(model, StaticKVCache.of(model, "int8", max_cache_len=40))).logits
    assert float(sqnr(wanted, got)) > 90


def test_a_cache_that_is_reset_starts_anew_in_the_same_memory() -> None:
    model = model_of()
    cache = StaticKVCache.of(model, "int8", max_cache_len=40)
    assert (cache.get_seq_length(), cache.nbytes) == (0, 0)
    first = logits(model, cache)
    places = [part.data_ptr() for layer in cache.layers for part in layer.store.parts]
    assert int(cache.get_seq_length()) == 22
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert torch.equal(logits(model, cache), first)
    assert [part.data_ptr() for layer in cache.layers for part in layer.store.parts] == places
    assert cache.nbytes == 2 * 2 * 2 * 2 * 40 * (16 + 4)  # layers, keys and values, sequences, heads; a float32 scale


def test_it_may_be_filled_in_inference_mode_and_used_outside() -> None:
    model = model_of()
    cache = StaticKVCache.of(model, "int8", max_cache_len=40)
    with torch.inference_mode():
        first = model(IDS, **with_cache(model, cache)).logits
    cache.reset()
    assert torch.equal(logits(model, cache, mask=torch.ones(2, 22)), first.flatten(0, 1))


def test_tokens_can_be_taken_back() -> None:
    model = model_of()
    cache = StaticKVCache.of(model, "int8", max_cache_len=40)
    first = logits(model, cache)
    for tokens, left in ((-3, 19), (-4, 15)):
        cache.crop(tokens)
        assert int(cache.get_seq_length()) == left
    again = model(IDS[:, 15:], attention_mask=torch.ones(2, 22), **with_cache(model, cache)).logits
    assert float(sqnr(first[-7:], again[1])) > 90
    layer = cache.layers[0]
    for tokens, left in ((30, 22), (4, 4), (-9, 0)):
        layer.crop(tokens)
        assert int(layer.get_seq_length()) == left


def test_it_may_wait_on_the_cpu() -> None:
    layer = StaticKVCache.of(model_of(), "int8", max_cache_len=8).layers[0]
    x = torch.randn(1, 2, 3, 16)
    layer.update(x, x)
    before = layer.keys
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.keys, before)


def test_a_model_may_compute_with_keys_of_the_cache() -> None:
    layer = StaticKVCache.of(model_of(), "int8", max_cache_len=8).layers[0]
    x = torch.randn(1, 2, 3, 16)
    keys, values = layer.update(x, x)
    dense = layer.store.dense_keys()
    assert keys.shape == (1, 2, 8, 16)
    assert torch.equal(keys.transpose(1, 2), dense.transpose(1, 2))
    assert torch.equal(keys[:, :, :3], dense[:, :, :3])
    assert torch.equal(torch.cat([keys, values], 1), torch.cat([dense, dense], 1))


def test_more_tokens_than_fit_are_refused() -> None:
    model = model_of()
    with pytest.raises(ArgumentError, match=r"22 tokens after 0 do not fit: the cache has max_cache_len=16"):
        logits(model, StaticKVCache.of(model, "int8", max_cache_len=16))
    with pytest.raises(ArgumentError, match="max_cache_len must be a number of tokens, at least 1, not 0"):
        StaticKVCache.of(model, max_cache_len=0)


def test_models_and_formats_that_it_is_not_for() -> None:
    with pytest.raises(ArgumentError, match="falcon_h1 has layers that a quantized cache does not know"):
        StaticKVCache(transformers.FalconH1Config(**SMALL), max_cache_len=40)
    with pytest.raises(ArgumentError, match="StaticKVCache takes the configuration of a model"):
        StaticKVCache(model_of(), max_cache_len=40)
    with pytest.raises(ArgumentError, match="keeps some in float until later"):
        StaticKVCache.of(model_of(), "int8+last8", max_cache_len=40)
