"""What the manifest says about a method, before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from bitport.errors import ExportError
from bitport.export import Method, signature
from bitport.export.compile import lowered
from bitport.export.trace import dense, exported

FEW, MANY = Dim("few", min=2, max=8), Dim("many", min=3, max=9)
X, Y = torch.randn(4, 3), torch.randn(5, 3)


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, x]), y * 2


class Nested(nn.Module):
    def forward(self, both: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([both["x"], both["x"]]), both["y"] * 2


class Any_(nn.Module):
    def forward(self, *both: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([both[0], both[0]]), both[1] * 2


def described(module: nn.Module, args: tuple[Any, ...], shapes: Any) -> tuple[dict[str, Any], signature.Sizes]:
    method = dense(Method(module, args, shapes))
    return signature.describe("forward", method, lowered(exported(method)))


def collected() -> ShapesCollection:
    shapes = ShapesCollection()
    shapes[X], shapes[Y] = {0: FEW}, {0: MANY}
    return shapes


@pytest.mark.parametrize(
    ("module", "args", "shapes"),
    [
        pytest.param(Two(), (X, Y), ({0: FEW}, {0: MANY}), id="in order"),
        pytest.param(Two(), (X, Y), {"y": {0: MANY}, "x": {0: FEW}}, id="by name"),
        pytest.param(Two(), (X, Y), collected(), id="by tensor"),
        pytest.param(Nested(), ({"x": X, "y": Y},), ({"y": {0: MANY}, "x": {0: FEW}},), id="nested, by name"),
        pytest.param(Any_(), (X, Y), (({0: FEW}, {0: MANY}),), id="any number"),
        pytest.param(Any_(), (X, Y), {"both": ({0: FEW}, {0: MANY})}, id="any number, by name"),
    ],
)
def test_sizes_have_the_names_and_bounds_of_dynamic_shapes(module: nn.Module, args: Any, shapes: Any) -> None:
    entry, sizes = described(module, args, shapes)
    assert [each["shape"] for each in entry["inputs"]] == [["few", 3], ["many", 3]]
    assert [each["shape"] for each in entry["outputs"]] == [["2*few", 3], ["many", 3]]
    assert sizes == {"few": [2, 8], "many": [3, 9]}


def test_a_name_that_torch_has_for_another_size() -> None:
    """torch names sizes s17, s77 and the like."""
    entry, _ = described(Two(), (X, Y), ({0: Dim.AUTO}, {0: Dim.AUTO}))
    (first, _), (second, _) = (each["shape"] for each in entry["inputs"])
    names = Dim(second, min=2, max=8), Dim(first, min=3, max=9)
    entry, sizes = described(Two(), (X, Y), ({0: names[0]}, {0: names[1]}))
    assert [each["shape"] for each in entry["inputs"]] == [[second, 3], [first, 3]]
    assert entry["outputs"][0]["shape"] == [f"2*{second}", 3]
    assert sizes == {second: [2, 8], first: [3, 9]}


def test_an_input_of_a_computed_size_is_refused() -> None:
    """The loaders of packages compute no sizes of inputs, so they could not check them either."""
    with pytest.raises(ExportError, match=r"y has the size 2\*few.*as two"):
        described(Two(), (X, torch.randn(8, 3)), ({0: FEW}, {0: 2 * FEW}))


def test_what_is_no_tensor_is_named() -> None:
    class Three(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x + 1, 3

    with pytest.raises(ExportError, match="gives 3; a program gives tensors"):
        described(Three(), (X,), None)
