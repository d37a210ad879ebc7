"""Attention in packages: over quantized caches and over those of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitport.cache import StaticStore
from bitport.cache.static import StaticFloats
from bitport.export import Method, load, package
from bitport.export.compile import lowered
from bitport.export.trace import exported
from bitport.numerics import sqnr
from bitport.ops.samples import product_budget

from .needs import needs_packages

FORMATS = ("int8", "int4-g16-asym:fp8-wo", "nf4-g32:int3-g16-fzero", "int4-g24:int8-g12", None)
"""Of the fourth the kernel takes no groups; None: floats."""
HEADS, GROUPS, WIDTH, OUT, ROOM = 4, 2, 64, 48, 96


def store_of(name: str | None) -> StaticStore | StaticFloats:
    return StaticFloats() if name is None else StaticStore(name)


class Layers(nn.Module):
    """For each format: tokens are written into its store, and some queries and a single one read it."""

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, cache: list[list[Tensor]]) -> Any:
        seen = (torch.arange(ROOM) <= positions[:, None])[None, None]
        found = []
        for name, parts in zip(FORMATS, cache, strict=True):
            store = store_of(name)
            store.hold(parts, WIDTH, OUT, q.dtype)
            store.write(keys, values, positions)
            found += [store.attend(q, seen, scale=0.2), store.attend(q[:, :, -1:], seen[:, :, -1:])]
        return found


def arguments(rows: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(rows)
    sizes = ((1, HEADS, rows, WIDTH), (1, GROUPS, rows, WIDTH), (1, GROUPS, rows, OUT))
    drawn = [torch.randn(each, generator=numbers).to(dtype) for each in sizes]
    return [*drawn, torch.arange(start, start + rows)]


def empty(dtype: torch.dtype = torch.bfloat16) -> list[list[Tensor]]:
    _, keys, values, _ = arguments(1, dtype=dtype)
    return [store_of(name).zeros(keys, values, ROOM) for name in FORMATS]


@needs_packages
@pytest.mark.xdist_group("package")
@pytest.mark.filterwarnings("error:.*LeafSpec:FutureWarning")
def test_a_package_computes_what_eager_does(tmp_path: Path) -> None:
    """The caches are the same bits, and so is attention over codes: the same kernel. Over floats, and where the kernel
    does not take the groups, eager is torch's own: both are within the budget of sums in float32."""
    rows, cache = torch.export.Dim("rows", min=2, max=64), empty()
    shapes = ({2: rows}, {2: rows}, {2: rows}, {0: rows}, [[None] * len(parts) for parts in cache])
    package({"run": Method(Layers(), (*arguments(5), cache), shapes)}, tmp_path / "layers.pt2")
    program, mine, theirs = load(tmp_path / "layers.pt2"), empty(), empty()
    for count, start in ((60, 0), (3, 60)):
        given = arguments(count, start)
        wanted, got = Layers()(*given, theirs), program.run(*given, mine)
        for parts, expected in zip(mine, theirs, strict=True):
            for part, other in zip(parts, expected, strict=True):
                assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))
        for at, (y, eager) in enumerate(zip(got, wanted, strict=True)):
            if FORMATS[at // 2] in FORMATS[:3]:
                assert torch.equal(y, eager), FORMATS[at // 2]
            else:
                assert float(sqnr(eager.double(), y)) >= product_budget(torch.bfloat16, WIDTH + ROOM, y.numel()) - 3

    for position in (-1, ROOM):
        with pytest.raises(RuntimeError, match=f"but received {position}"):
            program.run(*arguments(3)[:3], torch.tensor([0, position, 1]), empty())


def calls(module: nn.Module, *args: Tensor, rows: torch.export.Dim | None = None) -> list[str]:
    """The kernels of attention that a program of ``module`` calls; queries of ``rows`` rows."""
    shapes = None if rows is None else tuple({2: rows} if at == 0 else None for at in range(len(args)))
    graph = lowered(exported(Method(module, args, shapes))).graph
    found = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [each.removesuffix(".default") for each in found if "attention" in each]


class Attention(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, mask, **self.given)


OURS = ["bitport_export.bitport_float_attention"]
TORCHS = ["aten._scaled_dot_product_flash_attention_for_cpu"]


def operands(rows: int, *, groups: int = HEADS, tokens: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(1, heads, count, WIDTH).to(dtype) for heads, count in ((HEADS, rows), (groups, tokens))] + [
        torch.randn(1, groups, tokens, WIDTH).to(dtype)
    ]


MASK = torch.ones(1, 1, 3, 40, dtype=torch.bool)


@pytest.mark.parametrize(
    ("args", "given", "wanted"),
    [
        (operands(1), {}, OURS),
        (operands(1, groups=2, dtype=torch.float16), {"enable_gqa": True}, OURS),
        ([*operands(1), torch.randn(1, 40)], {"scale": 0.5}, OURS),
        ([*operands(3), MASK], {}, OURS),
        ([*operands(3), MASK[0, 0]], {}, OURS),
        (operands(3), {}, TORCHS),
        ([*operands(3), torch.randn(3, 40)], {}, TORCHS),
        ([*operands(40), torch.ones(40, 40, dtype=torch.bool)], {}, TORCHS),
        (operands(40), {"is_causal": True}, TORCHS),
        (operands(1, dtype=torch.float64), {}, TORCHS),
    ],
    ids=["one", "grouped", "added", "cache", "plain-mask", "rows", "rows-added", "own-tokens", "causal", "float64"],
)
def test_whose_kernel_a_program_calls(args: list[Tensor], given: dict[str, Any], wanted: list[str]) -> None:
    assert calls(Attention(**given), *args) == wanted


def test_any_number_of_queries_over_a_cache() -> None:
    rows, mask = torch.export.Dim("rows", min=2, max=40), torch.ones(1, 1, 1, 40, dtype=torch.bool)
    assert calls(Attention(), *operands(3), mask, rows=rows) == OURS


def test_with_amx_several_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert calls(Attention(), *operands(3), MASK) == TORCHS
    assert calls(Attention(), *operands(1), MASK[:, :, :1]) == OURS


@pytest.mark.parametrize("name", FORMATS[:4])
def test_a_quantized_cache_is_read_by_the_kernel_that_takes_it(name: str) -> None:
    class Read(nn.Module):
        def forward(self, q: Tensor, parts: list[Tensor]) -> Tensor:
            store = StaticStore(name)
            store.hold(parts, WIDTH, OUT, q.dtype)
            return store.attend(q, torch.ones(1, 1, 1, ROOM, dtype=torch.bool))

    q, keys, values, _ = arguments(1)
    found = calls(Read(), q, StaticStore(name).zeros(keys, values, ROOM))  # type: ignore[arg-type]
    assert (found == ["bitport_export.bitport_attention"]) == (name != "int4-g24:int8-g12")
