"""Directories with random damage from a fixed seed: either one of bitport's errors or a conversion."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bitport.checkpoint import quantize_files
from bitport.errors import BitportError, CheckpointError
from bitport.interop import convert

from ..checkpoint.test_fuzz import damaged
from .test_real_configs import READ, written

models = pytest.importorskip("tests.integrations.models", reason="needs the extra: pip install 'bitport[hf]'")

ROUNDS = 60
ODD = (
    None,
    [],
    {},
    "x",
    "",
    -1,
    0,
    1 << 70,
    float("inf"),
    float("nan"),
    1e-320,
    True,
    "\ud800",
    [None],
    [[1]],
    {"a": 1},
)
SCHEMES = {
    "compressed-tensors": "int3-g32",
    "gptq": "int8",
    "gptq_v2": "int4-g32",
    "awq": "int4-g32",
    "bitsandbytes": "nf4",
    "torchao": "int4-g32",
    "fp8": "fp8-block",
    "mlx": "int4-g32",
    "hqq": "int3-g64",
    "quanto": "int4",
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


@pytest.mark.parametrize("name", READ)
def test_settings_of_published_models(name: str, tmp_path: Path) -> None:
    """Including formats that bitport does not write."""
    said, tensors, _ = READ[name]
    chance = random.Random(name)
    for number in range(ROUNDS // 3):
        changed = another(copy.deepcopy(said), chance)
        with contextlib.suppress(BitportError):
            path = written(tmp_path / f"{number}", changed if isinstance(changed, dict) else {}, tensors)
            convert(path, tmp_path / f"{number}-out", progress=False)


def test_what_a_gguf_file_is_made_of(tmp_path: Path) -> None:
    """Its settings come from the files next to the weights, any value of which may be replaced."""
    small = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 260}
    models.make_directory(tmp_path / "float", **small)
    quantize_files(tmp_path / "float", tmp_path / "q", "int4-g32-sym", progress=False)
    files = {name: (tmp_path / "q" / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    chance, refused = random.Random(0), 0
    for number in range(5 * ROUNDS):
        name = chance.choice(list(files))
        (tmp_path / "q" / name).write_text(json.dumps(another(json.loads(files[name]), chance)))
        try:
            convert(tmp_path / "q", tmp_path / "out" / f"{number}.gguf", to="gguf", progress=False)
        except BitportError:
            refused += 1
            assert not list((tmp_path / "out").glob(f"{number}.*")), number
        (tmp_path / "q" / name).write_bytes(files[name])
    assert refused > ROUNDS


def another(said: Any, chance: random.Random) -> Any:
    """Replace one value of ``said``, at any depth, with an odd one."""
    inner = list(said) if isinstance(said, dict) else range(len(said)) if isinstance(said, list) else []
    if not inner or chance.random() < 0.2:
        return chance.choice(ODD)
    at = chance.choice(list(inner))
    said[at] = another(said[at], chance)
    return said


WRONG: dict[str, tuple[str, Any, str]] = {
    "a setting": ("bits", 5, ""),
    "a long setting": ("bits", "4" * 10**5, ""),
    "a tensor": ("bits", 8, "model.layers.0.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_says_where_and_is_short(name: str, tmp_path: Path) -> None:
    """A reader sees one configuration, or the tensors of one weight; its errors get the path and the weight."""
    key, value, weight = WRONG[name]
    said, tensors, _ = READ["TheBloke/Llama-2-7B-Chat-GPTQ"]
    path = written(tmp_path / "source", {**said, key: value}, tensors)
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "out", progress=False)
    assert str(path) in str(caught.value)
    assert weight in str(caught.value)
    assert len(str(caught.value)) < 2000
