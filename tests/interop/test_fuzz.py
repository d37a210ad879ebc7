"""Directories of others with random damage, by a fixed seed: an error of bitport, or a conversion; nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bitport.checkpoint import quantize_files
from bitport.errors import BitportError
from bitport.interop import convert

from ..checkpoint.test_fuzz import damaged

models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")

ROUNDS = 60
SCHEMES = {
    "compressed-tensors": "int3-g32",
    "gptq": "int8",
    "gptq_v2": "int4-g32",
    "awq": "int4-g32",
    "fp8": "fp8-block",
}


@pytest.mark.parametrize("form", SCHEMES)
def test_damage(form: str, tmp_path: Path) -> None:
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 260}
    source = models.make_directory(tmp_path / "float", **small)
    quantize_files(source, tmp_path / "q", SCHEMES[form], dtype=torch.float16, progress=False)
    convert(tmp_path / "q", tmp_path / "whole", to=form, progress=False)
    chance = random.Random(form)
    for number in range(ROUNDS):
        path = tmp_path / f"{number}"
        path.mkdir()
        name = chance.choice(("config.json", "model.safetensors"))
        for each in ("config.json", "model.safetensors"):
            data = (tmp_path / "whole" / each).read_bytes()
            head = 8 + int.from_bytes(data[:8], "little") if each == "model.safetensors" else len(data)
            changed = damaged(data[:head], chance) + data[head:] if each == name else data
            (path / each).write_bytes(changed)
        try:
            convert(path, path / ".." / f"{number}-out", progress=False)
        except BitportError:
            assert not list((tmp_path / f"{number}-out").glob("*")), number
