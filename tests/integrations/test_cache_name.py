"""The cache is passed under the name that a model's forward uses for it, without a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitport.errors import ArgumentError
from bitport.integrations.cache_name import NAMES, cache_of, with_cache

transformers = pytest.importorskip("transformers")


class Named(nn.Module):
    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        return ids


class NamedBefore(nn.Module):
    def forward(self, ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        return ids


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def test_by_what_forward_takes() -> None:
    assert with_cache(Named(), 1) == {"cache": 1}
    assert with_cache(NamedBefore(), 1) == {"past_key_values": 1}


def test_models_of_transformers_and_what_is_around_them() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(6)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = model(input_ids=ids).logits
        for each in (model, Wrapper(model)):
            first = each(input_ids=ids[:, :4], use_cache=True)
            rest = each(input_ids=ids[:, 4:], **with_cache(each, cache_of(first)))
            torch.testing.assert_close(rest.logits, whole[:, 4:])
        made = model.generate(ids, max_new_tokens=2, pad_token_id=0, **with_cache(model, transformers.DynamicCache()))
    assert made.shape == (1, 8)


@pytest.mark.parametrize("name", NAMES)
def test_results(name: str) -> None:
    assert cache_of({"logits": 0, name: 1}) == 1


def test_a_model_without_a_cache() -> None:
    with pytest.raises(ArgumentError, match=r"returns no cache .*: it must be a decoder"):
        cache_of({"logits": 0})
