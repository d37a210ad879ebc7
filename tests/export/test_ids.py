"""Ids that are no rows of a table of floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bitport as bp
from bitport.export import Method, load, package

from .needs import needs_packages

WORDS, PLACES = 50, 40


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 256), nn.Embedding(PLACES, 256)
        self.head = nn.Linear(256, 64)
        bp.quantize_(self.eval(), {"head": "int8"}, measure=False, progress=False)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        places = self.places.weight * 2  # computed on every call
        return self.head(self.words(ids) + nn.functional.embedding(at, places))


@pytest.mark.slow
@needs_packages
def test_a_package_refuses_them(tmp_path: Path) -> None:
    """Many too, which are looked up in parallel: the check in AOTInductor's own code ends the process there."""
    model, count = Tables(), torch.export.Dim("count", min=0, max=8192)
    given = torch.arange(7), torch.arange(7, dtype=torch.int32)
    package({"run": Method(model, given, ({0: count}, {0: count}))}, tmp_path / "model.pt2")
    program = load(tmp_path / "model.pt2")
    for rows in (0, 1, 2, 33, 8192):
        ids, at = torch.randint(WORDS, (rows,)), torch.randint(PLACES, (rows,), dtype=torch.int32)
        torch.testing.assert_close(program.run(ids, at), model(ids, at))
    for rows in (1, 8192):
        ids = torch.zeros(rows, dtype=torch.int64)
        for bad, told in ((WORDS, "<= 49 but received 50"), (-1, ">= 0 but received -1")):
            with pytest.raises(RuntimeError, match=told):
                program.run(ids.index_fill(0, torch.tensor([rows // 2]), bad), ids.int())
        with pytest.raises(RuntimeError, match="<= 39 but received 40"):
            program.run(ids, ids.index_fill(0, torch.tensor([rows // 2]), PLACES).int())
