"""Imports point only downward; backends sit below the ops and nobody imports them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import printed

from .tree import imported, modules, part

ORDER = (
    ("errors",),
    ("plugins", "missing", "arguments", "optional", "json_text"),
    ("checksum",),
    ("numerics",),
    ("schemes", "layouts"),
    ("tensor",),
    ("ops",),
    ("nn", "report", "calibrate", "cache"),
    ("algorithms",),
    ("checkpoint", "train"),
    ("stream", "interop"),
    ("api", "export"),
    ("__init__",),
    ("integrations", "conformance"),
    ("evaluate",),
    ("cli",),
    ("__main__",),
)
"""From the bottom up. A part may import itself and what is in a lower row."""

BACKENDS_MAY = {"errors", "checksum", "numerics", "schemes", "layouts", "tensor", "ops", "backends"}

LEVEL = {name: level for level, row in enumerate(ORDER) for name in row}

HEAVY = (
    "triton",
    "transformers",
    "diffusers",
    "tokenizers",
    "huggingface_hub",
    "rich",
    "scipy",
    "torch._inductor",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "jax",
    "lm_eval",
)


def targets(path: str) -> list[tuple[str, int]]:
    """Return the parts of bitport that a module imports. Names of the package itself (bitport.QTensor) count as
    "__init__"."""
    parts = {part(each) for each in modules()}
    found = []
    for name, line in imported(path, modules()[path]):
        if name == "bitport" or name.startswith("bitport."):
            below = [*name.split("."), ""][1]
            found.append((below if below in parts else "__init__", line))
    return found


def upward(path: str) -> Iterator[str]:
    own = part(path)
    for other, line in targets(path):
        if own == "backends":
            wrong = other not in BACKENDS_MAY
        else:
            wrong = other == "backends" or (other != own and LEVEL[other] >= LEVEL[own])
        if wrong:
            yield f"{path}:{line}: {own} imports {other}"


def test_imports_point_downward() -> None:
    assert [line for path in modules() for line in upward(path)] == []


def test_every_part_is_in_the_order() -> None:
    """A new part needs a row in ORDER."""
    assert {part(path) for path in modules()} - {"backends"} <= set(LEVEL)


@pytest.fixture(scope="module")
def fresh_import(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What ``import bitport`` adds to a process that has torch: modules, and CPU time relative to what torch took (the
    best of 3, so that neither a busy machine nor compiling the sources the first time counts)."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled"))}
    script = (
        "import sys, time, json; begin = time.process_time(); "
        "import torch, numpy, safetensors.torch; before = set(sys.modules); "
        "start = time.process_time(); import bitport; share = (time.process_time() - start) / (start - begin); "
        "print(json.dumps([share, sorted(set(sys.modules) - before), torch.accelerator.is_available() and "
        "torch.accelerator.current_accelerator().type == 'cuda' and torch.cuda.is_initialized()]))"
    )
    runs = [json.loads(printed(script, **compiled)) for _ in range(3)]
    return {"share": min(run[0] for run in runs), "modules": runs[0][1], "initialized": runs[0][2]}


@pytest.mark.xdist_group("imports")  # measured once, by one worker
def test_importing_bitport_brings_in_nothing_heavy(fresh_import: dict[str, object]) -> None:
    new = fresh_import["modules"]
    assert isinstance(new, list)
    assert "bitport.ops" in new
    unwanted = (*HEAVY, "bitport.backends.", "bitport.cli", "bitport.integrations")
    assert [name for name in new if name.startswith(unwanted)] == []
    assert not fresh_import["initialized"], "import bitport woke the accelerator"


@pytest.mark.xdist_group("imports")
def test_importing_bitport_is_quick(fresh_import: dict[str, object]) -> None:
    share = fresh_import["share"]
    assert isinstance(share, float)
    assert share < 0.35


@pytest.mark.xdist_group("imports")
def test_using_a_model_brings_in_nothing_heavy_either(tmp_path: Path) -> None:
    script = (
        "import sys, json, torch, numpy, safetensors.torch, bitport; from torch import nn; before = set(sys.modules); "
        "build = lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)); model = build(); "
        f"bitport.quantize_(model, 'int4'); bitport.save(model, {str(tmp_path / 'model')!r}); "
        f"loaded = bitport.load(build, {str(tmp_path / 'model')!r}); x = torch.randn(2, 64); "
        "assert torch.equal(loaded(x), model(x)); print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert [name for name in json.loads(printed(script)) if name.startswith(HEAVY)] == []
