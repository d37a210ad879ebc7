"""One step of a language model, by the kind of its cache: without Python, compared with the package that PyTorch makes
of the same model by itself, and in eager mode with transformers. A kind of :mod:`bench.kv_cache`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bitport as bp
from bitport.evaluate.timing import interleaved, medians, ratio, spread
from bitport.export import load, package

BASE = "bf16, torch"
CANDIDATES = {
    "bf16": (None, None),
    "bf16, cache int8": (None, "int8"),
    "int4": ("int4", None),
    "int4, cache int8": ("int4", "int8"),
    "int4, cache int4-g32": ("int4", "int4-g32"),
}
"""Name -> the schemes of weights and of the cache."""
EAGER = {
    "int4, eager, DynamicCache": None,
    "int4, eager, cache float": "float",
    "int4, eager, cache int8": "int8",
}
"""Name -> the kind of cache."""
CAPACITY, FILLED = 4096, (100, 1000, 4000)
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": CAPACITY,
}
"""8 of the 24 layers of Qwen2.5 0.5B, with fewer words."""

Row = dict[str, Any]


def model_of(scheme: str | None) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES)).bfloat16().eval()
    if scheme:
        bp.quantize_(model, scheme, progress=False)
    return model


def of_torch(folder: Path) -> tuple[Callable[..., Any], list[Tensor]]:
    """The step, with transformers' own attention, as AOTInductor compiles what torch.export gives; and its cache."""
    from bitport.integrations.program import WithCache, empty_cache, sample_of

    model = model_of(None)
    ids, states, _ = sample_of(model, 2)
    cache, module = empty_cache(states, CAPACITY), WithCache(model).eval()
    with torch.no_grad():
        program = torch.export.export(module, (ids[:, :1], torch.tensor([0]), cache), strict=False)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "torch.pt2"))
    return torch._inductor.aoti_load_package(path), cache


def of_bitport(folder: Path, scheme: str | None, kv_cache: str | None) -> tuple[Callable[..., Any], list[Tensor]]:
    from bitport.integrations.program import causal_lm

    methods, meta = causal_lm(model_of(scheme), CAPACITY, kv_cache=kv_cache)
    path = folder / f"{scheme}-{kv_cache}.pt2"
    package({"decode": methods["decode"]}, path, meta=meta)
    return load(path).decode, methods["decode"].args[2]


def of_eager(model: Any, kv_cache: str | None, filled: int) -> Callable[[], Any]:
    """A step of ``model`` after so many tokens, and the removal of its token."""
    from transformers import DynamicCache

    from bitport.integrations.cache_name import with_cache
    from bitport.integrations.kv_cache import KVCache

    cache = DynamicCache(config=model.config) if kv_cache is None else KVCache(model.config, kv_cache)
    heads, width = SIZES["num_key_value_heads"], SIZES["hidden_size"] // SIZES["num_attention_heads"]
    model.set_attn_implementation("sdpa" if kv_cache is None else "bitport")
    for layer in range(SIZES["num_hidden_layers"]):
        cache.update(*torch.randn(2, 1, heads, filled, width).bfloat16(), layer)
    implementation = model.config._attn_implementation

    def step() -> None:
        model.config._attn_implementation = implementation
        model(torch.tensor([[7]]), position_ids=torch.tensor([[filled]]), use_cache=True, **with_cache(model, cache))
        cache.crop(-1)

    return step


def steps(repetitions: int) -> Iterator[Row]:
    """The time of a step after so many tokens, whose values do not matter, as long as each lies in memory of its own:
    a page of zeros that was never written is the same memory as all others."""
    with tempfile.TemporaryDirectory() as folder:
        made = {BASE: of_torch(Path(folder))}
        made |= {name: of_bitport(Path(folder), *kinds) for name, kinds in CANDIDATES.items()}
        for part in (part for _, cache in made.values() for part in cache):
            part.random_(256) if part.dtype == torch.uint8 else part.normal_()
        model = model_of("int4")
        for filled in FILLED:
            given = torch.tensor([[7]]), torch.tensor([filled])
            calls = {name: functools.partial(run, *given, cache) for name, (run, cache) in made.items()}
            eager = {name: of_eager(model, kv_cache, filled) for name, kv_cache in EAGER.items()}
            with torch.no_grad():
                times = interleaved({**calls, **eager}, repetitions=repetitions)
            for name, seconds in medians(times).items():
                ratios = [base / mine for base, mine in zip(times[BASE], times[name], strict=True)]
                found = {"kind": "program", "format": name, "context": filled, "ms": float(f"{seconds * 1e3:.4g}")}
                speedup = {"speedup": round(1 / ratio(times, name, BASE), 3), "noise": round(spread(ratios), 3)}
                size = {"cache": sum(part.nbytes for part in made[name][1])} if name in made else {}
                yield {**found, **speedup, **size}
