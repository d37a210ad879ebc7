"""Ids that are no rows of a table of floats, or no positions of a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.export import Method, load, package
from bitport.export.ids import check_ids, decompositions

from .needs import needs_packages

WORDS, PLACES, WIDTH = 50, 40, 16


def each(ids: Tensor) -> Tensor:
    return ids[:, None].expand(-1, WIDTH)


def ones(ids: Tensor) -> Tensor:
    return torch.ones(ids.shape[0], WIDTH)


def scores(table: Tensor, ids: Tensor) -> Tensor:
    return table.t()[:1].expand(ids.shape[0], -1)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lookup": lambda table, ids: nn.functional.embedding(ids, table),
    "index": lambda table, ids: table[ids],
    "columns": lambda table, ids: table.t()[:, ids],
    "behind a mask": lambda table, ids: table.expand(2, -1, -1)[torch.tensor([True, False]), ids[:1]],
    "32 bits": lambda table, ids: table[ids.int()],
    "rows and columns": lambda table, ids: table[ids, ids % WIDTH],
    "twice": lambda table, ids: table.expand(2 * WORDS, WORDS, WIDTH)[ids, ids],
    "no dimensions": lambda table, ids: table[0, 0].gather(0, ids[0] // WORDS),
    "index_select": lambda table, ids: table.index_select(0, ids),
    "gather": lambda table, ids: table.gather(0, each(ids)),
    "index_put": lambda table, ids: table.index_put((ids,), torch.tensor(1.0)),
    "index_copy": lambda table, ids: table.index_copy(-2, ids, ones(ids)),
    "index_add": lambda table, ids: table.index_add(0, ids, ones(ids)),
    "index_fill": lambda table, ids: table.index_fill(0, ids, 1.0),
    "scatter a number": lambda table, ids: table.scatter(0, each(ids), 1.0),
    "scatter": lambda table, ids: table.scatter(0, each(ids), ones(ids)),
    "scatter_add": lambda table, ids: table.scatter_add(0, each(ids), ones(ids)),
    "scatter and add": lambda table, ids: table.scatter(0, each(ids), ones(ids), reduce="add"),
    "scatter and multiply": lambda table, ids: table.scatter(0, each(ids), 2.0, reduce="multiply"),
    "scatter_reduce": lambda table, ids: table.scatter_reduce(0, each(ids), ones(ids), "amax"),
    "take": lambda table, ids: table[:, 0].take(ids),
    "put": lambda table, ids: table[:, 0].put(ids, ones(ids)[:, 0]),
    "loss": lambda table, ids: nn.functional.cross_entropy(scores(table, ids), ids, reduction="none"),
    "loss of points": lambda table, ids: nn.functional.nll_loss(table[None, :, :2], ids[None, :2], reduction="none"),
    "margin": lambda table, ids: nn.functional.multi_margin_loss(scores(table, ids), ids),
    "in a branch": lambda table, ids: torch.cond(
        ids.shape[0] * table[0, 0] < 0, lambda table, ids: table[ids] + 0, lambda table, ids: -table[ids], (table, ids)
    ),
    "a number": lambda table, ids: table[ids[0].item()],
    "a number of a column": lambda table, ids: table.t()[:, ids[0].item() + 0],
    "into a number": lambda table, ids: table.select_scatter(torch.ones(WIDTH), 0, ids[0].item()),
}


class Using(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, table: Tensor, ids: Tensor) -> Tensor:
        return self.use(table, ids)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("name", USES)
def test_the_checks_refuse_what_eager_mode_refuses(name: str, grows: bool) -> None:
    model, table, ids = Using(USES[name]), torch.randn(WORDS, WIDTH), torch.arange(7)
    dims = {0: torch.export.Dim("rows", min=WORDS, max=2 * WORDS)} if grows and name != "twice" else {}
    sizes = dims, {0: torch.export.Dim("ids", max=4096)}
    program = torch.export.export(model, (table, ids), dynamic_shapes=sizes)
    graph = program.run_decompositions(decompositions()).module(check_guards=False)
    graphs = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]
    before = sum(len(each.graph.nodes) for each in graphs)
    check_ids(graph)
    assert sum(len(each.graph.nodes) for each in graphs) > before
    for last in (WORDS - 1, -WORDS, -WORDS - 1, WORDS, -1):
        ids[0] = last
        try:
            wanted = model(table, ids)
        except (IndexError, RuntimeError):
            with pytest.raises(RuntimeError, match="an id is a row"):
                graph(table, ids)
        else:
            assert torch.equal(graph(table, ids), wanted)


def test_no_ids_are_right() -> None:
    """Even for a table without rows, which has no right ones."""
    model, table, ids = Using(lambda table, ids: table[ids]), torch.randn(WORDS, WIDTH), torch.arange(7)
    dims = {0: torch.export.Dim("rows", max=WORDS)}, {0: torch.export.Dim("ids", max=4096)}
    graph = torch.export.export(model, (table, ids), dynamic_shapes=dims).module(check_guards=False)
    check_ids(graph)
    assert graph(table[:0], ids[:0]).shape == (0, WIDTH)
    with pytest.raises(RuntimeError, match="an id is a row"):
        graph(table[:0], ids[:1])


def test_ids_that_are_used_alike_are_checked_once() -> None:
    model, table = Using(lambda table, ids: table[ids] + table[ids] + table[:WIDTH, :][ids]), torch.randn(WORDS, WIDTH)
    graph = torch.export.export(model, (table, torch.arange(7))).module(check_guards=False)
    check_ids(graph)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)) == 2 * 2


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 256), nn.Embedding(PLACES, 256)
        self.turns = nn.Buffer(torch.randn(PLACES, 256))
        self.head = nn.Linear(256, 64)
        bp.quantize_(self.eval(), {"head": "int8"}, measure=False, progress=False)

    def forward(self, ids: Tensor, at: Tensor, cache: Tensor) -> Tensor:
        places = self.places.weight * 2  # computed on every call
        x = self.words(ids) + nn.functional.embedding(at, places) + self.turns[at]
        return self.head(x + cache.index_copy_(0, ids, x)[ids])


@pytest.mark.slow
@needs_packages
def test_a_package_refuses_them(tmp_path: Path) -> None:
    """Many too, which are looked up in parallel: the check in AOTInductor's own code ends the process there. Nothing is
    written then."""
    model, count = Tables(), torch.export.Dim("count", min=0, max=8192)
    given = torch.arange(7), torch.arange(7, dtype=torch.int32), torch.zeros(WORDS, 256)
    package({"run": Method(model, given, ({0: count}, {0: count}, None))}, tmp_path / "model.pt2")
    program = load(tmp_path / "model.pt2")
    for rows in (0, 1, 2, 33, 8192):
        ids, at = torch.arange(rows) % WORDS, torch.randint(PLACES, (rows,), dtype=torch.int32)
        at = at[:WORDS][ids]  # equal ids write equal rows
        one, other = torch.zeros(WORDS, 256), torch.zeros(WORDS, 256)
        with torch.no_grad():
            torch.testing.assert_close(program.run(ids, at, one), model(ids, at, other))
        torch.testing.assert_close(one, other)
    cache = torch.zeros(WORDS, 256)
    for rows in (1, 8192):
        ids = torch.zeros(rows, dtype=torch.int64)
        for bad, told in ((WORDS, "<= 49 but received 50"), (-1, ">= 0 but received -1")):
            with pytest.raises(RuntimeError, match=told):
                program.run(ids.index_fill(0, torch.tensor([rows // 2]), bad), ids.int(), cache)
        with pytest.raises(RuntimeError, match="<= 39 but received 40"):
            program.run(ids, ids.index_fill(0, torch.tensor([rows // 2]), PLACES).int(), cache)
    assert not cache.any()


@pytest.mark.slow
@needs_packages
def test_a_package_refuses_a_number_and_those_of_the_whole_tensor(tmp_path: Path) -> None:
    """The one was read outside the table, the others ended the process."""
    model = Using(lambda table, ids: table.take(ids).sum() + table[ids[-1].item()])
    table, ids = torch.randn(WORDS, WIDTH), torch.arange(8192) % WORDS
    package({"run": Method(model, (table, ids))}, tmp_path / "model.pt2")
    program = load(tmp_path / "model.pt2")
    for last in (-WORDS, WORDS - 1):
        ids[-1] = last
        torch.testing.assert_close(program.run(table, ids), model(table, ids))
    for last, told in ((WORDS, "<= 49 but received 50"), (WORDS * WIDTH, "<= 799 but received 800")):
        ids[-1] = last
        with pytest.raises(RuntimeError, match=told):
            program.run(table, ids)
