"""No number of a conversion depends on torch.set_default_dtype, and no allocation on torch.set_default_device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.checkpoint import quantize_files, read_manifest
from bitport.interop import convert

from .test_real_configs import READ, written

models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")

WRITTEN = [
    ("awq", "int4-g32"),
    ("bitsandbytes", "int8"),
    ("bitsandbytes", "nf4"),
    ("compressed-tensors", "int4-g32"),
    ("compressed-tensors", "nvfp4-wo"),
    ("float", "int4-g32"),
    ("fp8", "fp8-block"),
    ("gguf", "int4-g32"),
    ("gguf", "mxfp4-wo"),
    ("gptq", "int4-g32-sym"),
    ("hqq", "int4-g64"),
    ("mlx", "int4-g32"),
    ("quanto", "int4-sym"),
    ("quanto", "int8"),
    ("torchao", "int4-g32-sym"),
    ("torchao", "int8"),
]


@contextmanager
def other_defaults() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def content(path: Path) -> Any:
    if path.is_file():
        return path.read_bytes()
    if (path / "bitport.json").exists():  # its shards have different names every time
        manifest = read_manifest(path)
        return [(entry.name, entry.dtype, entry.scheme, entry.parts) for entry in manifest.tensors.values()]
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_converted_alike(source: Path, folder: Path, **options: Any) -> None:
    results = [folder / "usual.gguf", folder / "other.gguf"]
    convert(source, results[0], progress=False, **options)
    with other_defaults():
        convert(source, results[1], progress=False, **options)
    assert content(results[1]) == content(results[0])


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    return models.make_directory(tmp_path_factory.mktemp("float"), **sizes)


@pytest.mark.parametrize(("to", "scheme"), WRITTEN)
def test_there_and_back(to: str, scheme: str, float_model: Path, tmp_path: Path) -> None:
    quantize_files(float_model, tmp_path / "ours", scheme, dtype=torch.float16)
    (tmp_path / "there").mkdir()
    assert_converted_alike(tmp_path / "ours", tmp_path / "there", to=to)
    if to != "float":
        assert_converted_alike(tmp_path / "there" / "usual.gguf", tmp_path)


@pytest.mark.parametrize("name", READ)
def test_published_settings(name: str, tmp_path: Path) -> None:
    said, tensors, _ = READ[name]
    assert_converted_alike(written(tmp_path / "source", said, tensors), tmp_path)
