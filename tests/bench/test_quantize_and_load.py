"""How fast weights are quantized and models are loaded: figures, and tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import bitport
from bench import load, quantize
from bench.limits import Limits
from bench.models import model_of
from bench.suites import Shape
from bitport.integrations.huggingface import save_model


def test_quantizing_is_a_part_of_the_read_bandwidth() -> None:
    found = quantize.figures([0.1, 0.2, 0.4], 1_000_000_000, Limits(read=2e10, units={}))
    assert (found["ms"], found["bytes_per_second"], found["of_read"]) == (200.0, 5e9, 0.25)
    assert "of_read" not in quantize.figures([0.1], 10, "no compiler")


def test_every_scheme_is_quantized() -> None:
    rows = quantize.measure(Shape(256, 64), Limits(1e10, {}), repetitions=1)
    for library in (quantize.TENSOR, quantize.LAYER):
        assert [row["scheme"] for row in rows if row["library"] == library] == list(quantize.SCHEMES)
    assert all(row["ms"] > 0 for row in rows)


def test_loading_is_compared_inside_a_repetition() -> None:
    found = load.figures([0.2, 0.6, 0.3], [0.1, 0.2, 0.1], [0.05, 0.04, 0.06])
    assert (found["ms"], found["read_ms"], found["build_ms"], found["ratio"]) == (300.0, 100.0, 50.0, 3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, made = model_of("llama-tiny"), tmp_path_factory.mktemp("model")
    bitport.quantize_(model, "int4", measure=False, progress=False)
    save_model(model, made)
    return made


@pytest.mark.parametrize("size", [256, 1 << 20])
def test_the_bare_read_reads_everything(folder: Path, size: int) -> None:
    """The buffer holds what was read last: the end of the last file."""
    buffer, last = bytearray(size), load.shards(folder)[-1].read_bytes()
    assert load.bare_read(folder, buffer) > 0
    end = last[len(last) // size * size :] or last[-size:]
    assert buffer.startswith(end)


def test_a_model_is_loaded_in_each_way(folder: Path) -> None:
    rows = load.measure(folder, repetitions=1)
    assert {(row["mode"], row["cache"]) for row in rows} >= {(mode, "warm") for mode in load.MODES}
    assert all(row["ratio"] > 0 for row in rows)
    assert {row["nbytes"] for row in rows} == {sum(path.stat().st_size for path in load.shards(folder))}
