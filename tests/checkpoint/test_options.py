"""Options of quantize_files, and what its report says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitport.checkpoint import quantize_files, read_manifest
from bitport.errors import ArgumentError
from bitport.report.memory import peak
from bitport.schemes import Recipe


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = {"a.weight": torch.randn(16, 64), "b.weight": torch.randn(8, 64), "steps": torch.arange(3)}
    save_file({**made, "mask": torch.tensor([True, False])}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_only_floats_are_cast(source: Path, tmp_path: Path) -> None:
    quantize_files(source, tmp_path / "out", {"a": "int8"}, dtype=torch.float16)
    assert {name: entry.dtype for name, entry in read_manifest(tmp_path / "out").tensors.items()} == {
        "a.weight": torch.float16,
        "b.weight": torch.float16,
        "steps": torch.int64,
        "mask": torch.bool,
    }


@pytest.mark.parametrize("measure", [True, False])
def test_the_report(measure: bool, source: Path, tmp_path: Path) -> None:
    report = quantize_files(source, tmp_path / "out", "int4-g32", algorithm="hqq", measure=measure)
    assert [layer.sqnr is not None for layer in report.quantized] == [measure, measure]
    assert Recipe.from_json(report.recipe) == Recipe.of("int4-g32")
    assert report.algorithm == "hqq"
    assert report.memory_estimate is not None
    assert report.memory_estimate > (16 + 8) * 64 * 4
    assert (report.memory_peak is None) == (peak() is None)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_on_demand(
    progress: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantize_files(source, tmp_path / "out", "int8", progress=progress)
    assert ("quantizing" in capsys.readouterr().err) == progress


@pytest.mark.parametrize("linked", [False, True])
def test_target_that_holds_the_source(linked: bool, source: Path) -> None:
    """Its directory would hold two models, which save() refuses too."""
    if linked:  # as in the cache of the Hugging Face hub
        (source.parent / "snapshot").mkdir()
        source = (source.parent / "snapshot" / source.name).resolve()
        source.symlink_to(source.parent.parent / source.name)
    with pytest.raises(ArgumentError, match="holds the source"):
        quantize_files(source, source.parent, "int8")
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]
