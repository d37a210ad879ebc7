"""What a process that sees ever new shapes keeps of them."""

from __future__ import annotations

import functools
import gc

import torch
from torch import nn

import bitport as bp
from bitport.cache import KeyValueStore


def unbounded() -> dict[str, int]:
    """The number of entries of each cache that never drops any."""
    found = {}
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("bitport."):
            info = each.cache_info()
            if info.maxsize is None:
                found[f"{each.__module__}.{each.__qualname__}"] = info.currsize
    return found


def use(size: int) -> None:
    store = KeyValueStore("int8")
    store.append(*torch.randn(2, 1, 1, size, 64))
    store.attend(torch.randn(1, 1, 1, 64))
    for scheme in ("int4-g32", "int8", "int8-dyn", "fp8", "fp8-row", "nf4", "mxfp4"):
        model = nn.Sequential(nn.Embedding(size, 64), nn.Linear(64, size))
        bp.quantize_(model, {"*": scheme})
        model(torch.arange(size))
        model.to("meta")


def test_no_unbounded_cache_is_keyed_by_shapes() -> None:
    use(64)
    before = unbounded()
    for size in range(96, 352, 32):
        use(size)
    assert unbounded() == before
    assert len(before) > 5
