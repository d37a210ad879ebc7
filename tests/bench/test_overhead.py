"""The overhead of bitport's dispatch stays bounded: the limit is generous and only catches regressions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import measure
from bench.overhead import MODES, dispatch

BOUND = {"grad": 4.0, "no_grad": 3.5, "inference": 3.5}
"""Multiples of nn.Linear's own call. The goal is 2.5; best of three runs, since a busy machine disturbs both."""


def test_dispatch_is_cheap() -> None:
    runs = [dispatch(repetitions=31) for _ in range(3)]
    best = {(row["name"], row["mode"]): min(run[at]["ratio"] for run in runs) for at, row in enumerate(runs[0])}
    assert {mode for _, mode in best} == set(MODES)
    assert {key: ratio for key, ratio in best.items() if ratio > BOUND[key[1]]} == {}


def test_records_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    for value in (1, 2):
        path = measure.record("suite", {**measure.header(), "run": f"run {value}"}, [{"value": value}])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["run"] for line in lines] == ["run 1", "run 1", "run 2", "run 2"]
    assert [line["value"] for line in lines[1::2]] == [1, 2]
    assert lines[0]["machine"].keys() == {"cpu", "cores", "threads", "system", "capability", "python", "torch"}


@pytest.mark.parametrize(
    ("model", "family", "flags", "name"),
    [
        ("Some CPU", 25, "fma avx2", "Some CPU, AVX2"),
        ("Some CPU", 25, "avx2 avx512f", "Some CPU"),
        ("Some CPU", 6, "sse2", "Some CPU"),
        ("AMD EPYC", 25, "avx2", "AMD EPYC, AVX2"),
        ("AMD EPYC", 25, "avx2 avx512f", "AMD EPYC, Zen 4"),
        ("AMD EPYC", 26, "avx2 avx512f", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart(tmp_path: Path, model: str, family: int, flags: str, name: str) -> None:
    info = tmp_path / "cpuinfo"
    described = f"cpu family\t: {family}\nmodel name\t: {model}\nflags\t\t: {flags}\n"
    info.write_text(f"processor\t: 0\n{described}\nprocessor\t: 1\n{described}")
    assert measure._cpu_model(info) == name
