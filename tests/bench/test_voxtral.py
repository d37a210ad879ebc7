"""The benchmark of a Voxtral-like program: how it is built and how figures are derived. No real measurements."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import measure
from bench.voxtral import __main__ as voxtral
from bench.voxtral import build, page
from bench.voxtral.program import program
from bitport.tensor import QTensor
from tests.bench.test_gpu import TINY

Row = dict[str, Any]


def test_layers_are_quantized_as_they_come() -> None:
    """Bit for bit the same as quantizing the whole model with the same weights."""
    import bitport

    made = build.built(TINY, "int8+int4-g32+bf16", "hqq")
    kinds = {name.partition(".")[0]: type(value) for name, value in made.named_parameters() if value.ndim == 2}
    assert kinds == {"audio_encoder": QTensor, "token_embedding": QTensor, "text_decoder": torch.nn.Parameter}
    whole = program(TINY, torch.device("cpu"))
    bitport.quantize_(whole.audio_encoder, "int8", algorithm="hqq", measure=False)
    ours, theirs = (each.audio_encoder.layers[1].up.weight for each in (made, whole))
    assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_weights_are_those_of_the_seed() -> None:
    one, two = (program(TINY, torch.device("cpu")) for _ in range(2))
    for (name, left), (_, right) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert not torch.equal(one.audio_encoder.layers[0].up.weight, one.audio_encoder.layers[1].up.weight)


def test_a_part_too_many_is_refused() -> None:
    with pytest.raises(SystemExit, match="one for each of audio_encoder, token_embedding, text_decoder"):
        build.schemes_of("int4+int8")


def test_methods_fit_their_modules() -> None:
    chosen = build.methods_of(build.built(TINY, "bf16"))
    shapes = {name: tuple(method.module(*method.args).shape) for name, method in chosen.items()}
    assert shapes == {
        "audio_encoder": (1, TINY.prompt, TINY.width),
        "token_embedding": (1, TINY.prompt, TINY.width),
        "text_prefill": (1, TINY.words),
        "text_decode": (1, TINY.words),
    }


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """A runner in which int4 takes a third of bf16's time, and twice that when decoding; so does prepacked bf16."""
    folders = {name: tmp_path / name for name in ("bf16", build.PREPACKED, "int4")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "program.pt2").write_bytes(bytes(1000 if name == "bf16" else 300))

    def run(options: argparse.Namespace, folder: Path, method: str, way: str) -> Row:
        ms = 30.0 if folder.name == "bf16" else 20.0 if method == "text_decode" else 10.0
        figures = ("load_ms", "median_ms", "p99_ms", "first_ms", "program_ms")
        return dict.fromkeys(figures, ms)

    monkeypatch.setattr(voxtral, "run", run)
    return voxtral.measure(argparse.Namespace(turns=3), folders)


def test_ratios(rows: list[Row]) -> None:
    ratios = {(row.get("method"), row["figure"]): row["ratio"] for row in rows if row["candidate"] == "int4"}
    assert ratios[None, "size"] == 0.3
    assert ratios["text_prefill", "run"] == 0.3333
    assert ratios["text_decode", "load, cold"] == 0.6667
    assert {row["ratio"] for row in rows if row["candidate"] == "bf16"} == {1.0}
    frozen = [row for row in rows if row["candidate"] == build.PREPACKED]
    assert {row["figure"] for row in frozen} == {"run", "run, p99"}, "loads and sizes are those of another format"
    assert voxtral.as_table(rows).count("\n") == len(rows) + 1


def test_the_page_says_what_is_met(rows: list[Row]) -> None:
    about = {"sizes": vars(TINY), "algorithm": "hqq", "runner_threads": 2, "turns": 3, "busy": 0.1}
    head = {**measure.header(), **about}
    text = page.page([head, *({"run": head["run"], **row} for row in rows)])
    assert "| size | 1.0 kB |  |  | 300 B | 0.300 | 0.36 met |" in text
    assert "| text_decode: run | 30.000 ms | 20.000 ms | 0.667 | 20.000 ms | 0.667 | 0.4 MISSED |" in text
    assert "| audio_encoder: load, resident | 30.000 ms |  |  | 10.000 ms | 0.333 | 0.45 met |" in text
