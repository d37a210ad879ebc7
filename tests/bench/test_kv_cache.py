"""Tiny runs of bench.kv_cache, and the page generated from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cached_program, kv_cache
from bench.kv_cache import BASE, PAGE, Heads, attention, page
from bench.results import lines_of
from bitport.numerics import sqnr
from tests.export.needs import needs_packages

pytest.importorskip("transformers", reason="needs the extra: pip install 'bitport[hf]'")
SMALL = Heads(4, 2, 16)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(kv_cache, "MODELS", {"4 heads on 2 of 16": SMALL})
    found = [*attention(SMALL, 40, ("int8", kv_cache.FLOATS), 3), *kv_cache.adding(SMALL, 40, ("int8",), 3)]
    found += attention(SMALL, 40, ("int8",), 3, prompt=True)
    monkeypatch.setattr(kv_cache, "ROOM", 64)
    found += kv_cache.in_static_memory(SMALL, 40, ("int8",), 3)
    monkeypatch.setattr(cached_program, "of_torch", lambda folder: (len, [torch.zeros(8)]))
    monkeypatch.setattr(cached_program, "of_bitport", lambda folder, scheme, kv_cache: (len, [torch.zeros(2)]))
    monkeypatch.setattr(cached_program, "model_of", lambda scheme: None)
    monkeypatch.setattr(cached_program, "of_eager", lambda model, kv_cache, filled: len)
    monkeypatch.setattr(cached_program, "interleaved", lambda calls, repetitions: {name: [1.0, 1.0] for name in calls})
    found += cached_program.steps(2)
    return [*found, *kv_cache.quality(("int8", "int2-g32"), 600)]


@needs_packages
@pytest.mark.slow
def test_programs_that_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    monkeypatch.setattr(cached_program, "SIZES", {**small, **heads})
    monkeypatch.setattr(cached_program, "CAPACITY", 32)
    given = torch.tensor([[7]]), torch.tensor([20])
    run, cache = cached_program.of_torch(tmp_path)
    wanted = run(*given, cache)
    for kinds in ((None, None), (None, "int8")):
        run, cache = cached_program.of_bitport(tmp_path, *kinds)
        assert float(sqnr(wanted.double(), run(*given, cache))) > 30
    model = cached_program.model_of(None)
    for kind in cached_program.EAGER.values():
        step = cached_program.of_eager(model, kind, 20)
        with torch.no_grad():
            step()
            step()


def test_what_is_measured(rows: list[dict[str, Any]]) -> None:
    by = {(row["kind"], row["format"]): row for row in rows}
    assert set(by) == {
        *(("attention", name) for name in (BASE, "int8", kv_cache.FLOATS)),
        *((kind, name) for kind in ("adding", "prompt", "static") for name in (BASE, "int8")),
        *(("quality", name) for name in (BASE, "int8", "int2-g32")),
        *(("program", name) for name in (cached_program.BASE, *cached_program.CANDIDATES, *cached_program.EAGER)),
    }
    sizes = {name: by["attention", name]["bytes_per_token"] for name in (BASE, "int8", kv_cache.FLOATS)}
    assert sizes == {BASE: 128, "int8": 4 * 16 + 4 * 2, kv_cache.FLOATS: 128}
    assert by["attention", BASE]["speedup"] == by["adding", BASE]["speedup"] == 1
    assert by["quality", "int8"]["size"] == (64 + 2) / 128
    assert 0 < by["quality", "int8"]["kl"] < by["quality", "int2-g32"]["kl"]
    assert by["quality", BASE]["scored"] == 598


def test_the_page_holds_the_newest_of_each_kind(rows: list[dict[str, Any]]) -> None:
    machine = {"cpu": "some", "threads": 1, "torch": "2"}
    lines: list[dict[str, Any]] = []
    for run, ms in (("r1", 1.0), ("r2", 2.0)):
        lines.append({"run": run, "commit": "abc", "machine": machine, "busy": 0})
        lines += [{"run": run, **row, **({"ms": ms} if "ms" in row else {})} for row in rows]
    text = page(json.loads(json.dumps(lines)))
    assert "2 ms" in text
    assert "1 ms" not in text
    assert "| bf16, bitport | 128 |" in text
    assert "| int2-g32 |" in text
    assert "Run r2, commit abc" in text
    assert "| int4, cache int8 | 8 B |" in text


def test_the_page_is_that_of_the_records() -> None:
    lines = lines_of(Path(kv_cache.__file__).parent / "results" / "kv_cache.jsonl")
    assert PAGE.read_text(encoding="utf-8") == page(lines)
