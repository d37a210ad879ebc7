"""Where the verbs that write models refuse to write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import Run


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


MODES = pytest.mark.parametrize("mode", [[], ["--in-memory"], ["--overwrite"], ["--resume"]], ids=" ".join)


@MODES
def test_the_directory_of_another_model(run: Run, llama: Path, tmp_path: Path, mode: list[str]) -> None:
    shutil.copytree(llama, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "gpt2"}')
    before = files_of(tmp_path / "other")
    ran = run("quantize", llama, "--scheme", "int4", "-o", tmp_path / "other", *mode)
    assert ran.code == 1
    assert ran.err.endswith("holds another model already; choose another directory, or remove it\n")
    assert files_of(tmp_path / "other") == before


def test_the_directory_of_a_file_that_is_the_source(run: Run, llama: Path, tmp_path: Path) -> None:
    file = next(llama.glob("*.safetensors"))
    shutil.copyfile(file, tmp_path / "weights.safetensors")
    words = ("quantize", tmp_path / "weights.safetensors", "--scheme", "int4", "-o")
    ran = run(*words, tmp_path)
    assert (ran.code, [path.name for path in tmp_path.iterdir()]) == (1, ["weights.safetensors"])
    assert f"{tmp_path} holds the source" in ran.err
    assert run(*words, tmp_path / "out").code == 0


@pytest.mark.parametrize(
    "how", [[], ["--algorithm", "gptq", "--data-tokens", 64], ["--in-memory"]], ids=["", "data", "memory"]
)
def test_the_size_of_files_is_up_to_the_user(run: Run, llama: Path, tmp_path: Path, how: list[object]) -> None:
    """A single tensor may be larger."""
    words = ("quantize", llama, "--scheme", "int4-g32", *how, "-o", tmp_path / "out", "--shard-size")
    assert run(*words, "100kB").code == 0
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 2
    assert min(sizes) < 100_000
    ran = run(*words, "1 kilo")
    assert ran.code == 2
    assert "1 kilo" in ran.err
