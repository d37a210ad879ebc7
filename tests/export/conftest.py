"""One package for all tests, since compiling takes most of the time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitport as bp
from bitport.export import Method, Program, load, package
from bitport.ops.product import linear_then

from .needs import missing

WEIGHT_ONLY = ("int2", "int3", "int4-g32", "int5", "int6-channel", "int8", "nf4", "fp8-wo", "mxfp4-wo", "nvfp4-wo")
ROUNDED = ("int8-dyn", "int4-int8", "fp8", "fp8-row", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
SCHEMES = (*WEIGHT_ONLY, *ROUNDED)
K, N, WORDS, EXPERTS = 128, 48, 40, 3


class Every(nn.Module):
    """A layer of each scheme, a lookup, experts, an activation in the op, a matrix that no kernel takes, and a
    convolution whose 48 columns are a group of 32 and a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, K)
        self.layers = nn.ModuleList(nn.Linear(K, N, bias=at % 2 == 0) for at in range(len(SCHEMES)))
        self.gate, self.up = nn.Linear(K, N), nn.Linear(K, N)
        self.odd = nn.Linear(N, 24)
        self.conv = nn.Conv1d(16, 32, 3)
        self.experts = nn.Parameter(torch.randn(EXPERTS, K, N) / K**0.5)

    def forward(self, ids: Tensor, ends: Tensor) -> list[Tensor]:
        x = self.table(ids)
        hidden = linear_then(x, self.gate.weight, self.gate.bias, "silu", self.up(x))
        experts, conv = F.grouped_mm(x, self.experts, offs=ends), self.conv(x.view(-1, 16, K // 16))
        return [x, *(layer(x) for layer in self.layers), self.odd(hidden), experts, conv]


class Half(nn.Module):
    """Another method over the same weights under other names; it modifies its input in place."""

    def __init__(self, whole: Every) -> None:
        super().__init__()
        self.words, self.first = whole.table, whole.layers[2]

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        y = self.first(self.words(ids))
        memory[0].add_(y.sum(0))
        return y


@pytest.fixture(scope="session")
def modules() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = Every().bfloat16().eval()
    recipe = {f"layers.{at}": scheme for at, scheme in enumerate(SCHEMES)}
    bp.quantize_(whole, {**recipe, "table": "int8", "odd": "int4-g24", "*": "int4-g32"}, measure=False)
    return {"every": whole, "half": Half(whole)}


def arguments(rows: int) -> dict[str, tuple[Tensor, ...]]:
    numbers = torch.Generator().manual_seed(rows)
    ids = torch.randint(WORDS, (rows,), generator=numbers)
    ends = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
    memory = torch.zeros(2, N, dtype=torch.bfloat16)
    return {"every": (ids, ends), "half": (ids, memory)}


@pytest.fixture(scope="session")
def packed(modules: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    rows, given = torch.export.Dim("rows", min=1, max=64), arguments(6)
    path = tmp_path_factory.mktemp("export") / "small.pt2"
    methods = {name: Method(module, given[name], ({0: rows}, None)) for name, module in modules.items()}
    package(methods, path, meta={"kind": "test"})
    return path


@pytest.fixture(scope="session")
def program(packed: Path) -> Program:
    return load(packed, verify=True)
