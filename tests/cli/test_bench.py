"""``bitport bench``"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from bitport.cli.main import main
from bitport.tensor import QTensor

from .conftest import Run


def test_a_tiny_bench(run: Run) -> None:
    ran = run(
        "bench", "--shapes", "256x48", "--rows", "1,3", "--schemes", "int4,int8-dyn", "--repetitions", 2, "--json"
    )
    assert ran.code == 0
    assert [(row["k"], row["n"], row["rows"], row["scheme"]) for row in ran.data] == [
        (256, 48, m, scheme) for m in (1, 3) for scheme in ("int4", "int8-dyn")
    ]
    for row in ran.data:
        assert row["ms"] > 0
        assert row["bf16_ms"] > 0
        assert row["sqnr_db"] > (45 if row["scheme"] == "int4" else 30), "what bfloat16, or an int8 input, leaves"


def test_a_tiny_layer_is_not_copied_a_million_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MB of copies of 30 bytes would be four million tensors."""
    copied: list[int] = []

    def counted(self: QTensor, fn: Callable[[Tensor], Tensor], **changes: Any) -> QTensor:
        copied.append(1)
        assert len(copied) < 10_000
        return given(self, fn, **changes)

    given = QTensor.map_parts
    monkeypatch.setattr(QTensor, "map_parts", counted)
    ran = run("bench", "--shapes", "5x3", "--rows", "1", "--schemes", "int4", "--repetitions", 1)
    assert ran.code == 0
    assert copied


def test_the_table_names_the_kernel(run: Run) -> None:
    ran = run("bench", "--shapes", "128x16", "--rows", "1", "--schemes", "int4", "--repetitions", 2)
    header, _, row = ran.out.splitlines()
    assert header.split()[:4] == ["shape", "rows", "scheme", "kernel"]
    assert row.split()[:3] == ["128x16", "1", "int4"]


def test_one_measurement_has_no_noise(run: Run) -> None:
    words = ("bench", "--shapes", "128x16", "--rows", "1", "--schemes", "int4", "--repetitions", 1)
    assert run(*words).out.splitlines()[-1].split()[-2] == "-"
    assert run(*words, "--json").data[0]["noise"] is None


def test_an_unknown_scheme_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--schemes", "int9"])
    assert "presets: int2" in capsys.readouterr().err
